//! Do threads that hit different rows get in each other's way?
//!
//! ```console
//! $ cargo run --release -p tierbed-cache --example tier_speed -- lru,ours
//! ```
//! One thread, then two, ask a tier of 16 shards that holds every row for groups of 26 rows of 64
//! bytes, skewed; every row is a hit and is copied out. The first rate is by the processor time of
//! the threads, so that other work on the machine counts little; sleeping for a lock shows only
//! in the second, by the wall, which needs a quiet machine.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a program for measuring")]
#![allow(clippy::disallowed_methods, reason = "measures the time of the wall")]

use std::time::Instant;

use tierbed_cache::{PolicyKind, RowClass, ShardedTier, TierOptions, Visits};
use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, RowKey, TableId};

const ROWS: u64 = 100_000;
const ROW_WORDS: usize = 16;
const GROUP_ROWS: usize = 26;
const GROUPS: usize = 200_000;

fn key(row: u64) -> RowKey {
    RowKey::new(TableId(0), RowId(row))
}

/// Seconds of processor time so far, of this thread.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// Asks for the groups of one thread; returns hits per second of its processor time.
fn ask(tier: &ShardedTier, seed: u64) -> f64 {
    let mut rng = SplitMix64::new(seed);
    let draw = |rng: &mut SplitMix64| ((ROWS as f64).powf(rng.unit_f64()) - 1.0) as u64;
    // Drawn before the time begins; few enough to stay in the processor's cache.
    let groups: Vec<Vec<RowKey>> =
        (0..2000).map(|_| (0..GROUP_ROWS).map(|_| key(draw(&mut rng))).collect()).collect();
    let mut visits = Visits::with_capacity(GROUP_ROWS);
    let mut out = vec![0f32; GROUP_ROWS * ROW_WORDS];
    let (start_s, mut hits) = (processor_s(), 0u64);
    for group in groups.iter().cycle().take(GROUPS) {
        tier.get_many(group, &mut visits, |at, row| {
            out[at * ROW_WORDS..][..ROW_WORDS].copy_from_slice(row);
            hits += 1;
        });
    }
    assert_eq!(hits, (GROUPS * GROUP_ROWS) as u64);
    hits as f64 / (processor_s() - start_s)
}

fn main() {
    let names = std::env::args().nth(1).unwrap_or_else(|| "lru,ours".to_owned());
    println!("policy,threads,hits_per_processor_s,hits_per_wall_s");
    for name in names.split(',') {
        let options = TierOptions {
            capacity_bytes: 64 << 20,
            classes: vec![RowClass { row_words: ROW_WORDS, row_count: ROWS }],
            policy: PolicyKind::from_name(name).unwrap(),
        };
        let tier = ShardedTier::new(&options, 16).unwrap();
        let row = [1f32; ROW_WORDS];
        let keys: Vec<RowKey> = (0..ROWS).map(key).collect();
        tier.insert_many(&keys, &mut Visits::default(), |_| Some(&row[..])).unwrap();
        for thread_count in [1u64, 2, 1, 2] {
            let start = Instant::now();
            let rates: Vec<f64> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..thread_count)
                    .map(|seed| {
                        scope.spawn({
                            let tier = &tier;
                            move || ask(tier, seed)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let wall_s = start.elapsed().as_secs_f64();
            let wall = (thread_count as usize * GROUPS * GROUP_ROWS) as f64 / wall_s;
            println!("{name},{thread_count},{:.3e},{wall:.3e}", rates.iter().sum::<f64>());
        }
    }
}
