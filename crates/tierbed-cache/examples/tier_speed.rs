//! Is a tier as quick as a general cache, and do threads get in each other's way?
//!
//! ```console
//! $ cargo run --release -p tierbed-cache --example tier_speed -- quick_cache,lru,group_frequency
//! ```
//! One thread, then two, ask a tier of 16 shards, or the `quick_cache` crate, for groups of 26 rows
//! of 64 bytes, skewed. `hits`: all of 100,000 rows are held, and every row found is copied out.
//! `skewed`: 100,000 of a million rows are held; rows that are missing are inserted at once. A tier
//! whose policy knows groups is looked into first and told of the group then, as it is in serving.
//!
//! Nanoseconds per row are of the processor time of the threads, so that other work on the machine
//! counts little; sleeping for a lock shows only in the rate by the wall, which needs a quiet
//! machine.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a program for measuring")]
#![allow(clippy::disallowed_methods, reason = "measures the time of the wall")]

use std::thread;
use std::time::Instant;

use quick_cache::sync::Cache;
use tierbed_cache::{PolicyKind, RowClass, ShardedTier, TierGroup, TierOptions, Visits};
use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, RowKey, TableId};

const HELD_ROWS: u64 = 100_000;
const ALL_ROWS: u64 = 1_000_000;
const ROW_WORDS: usize = 16;
const GROUP_ROWS: usize = 26;
const GROUPS: usize = 200_000;

type Row = [f32; ROW_WORDS];

fn key(row: u64) -> RowKey {
    RowKey::new(TableId(0), RowId(row))
}

/// What is measured: rows that are found are copied to `out`, others are inserted.
trait RowCache: Sync {
    /// Returns how many rows of the group were found.
    fn ask(&self, group: &[RowKey], scratch: &mut Scratch) -> u64;
}

/// One thread's memory.
struct Scratch {
    visits: Visits,
    out: Vec<Row>,
    missing: Vec<RowKey>,
    is_found: Vec<bool>,
    slots: Vec<u32>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            visits: Visits::with_capacity(GROUP_ROWS),
            out: vec![[0.0; ROW_WORDS]; GROUP_ROWS],
            missing: Vec::with_capacity(GROUP_ROWS),
            is_found: vec![false; GROUP_ROWS],
            slots: vec![u32::MAX; GROUP_ROWS],
        }
    }
}

impl RowCache for ShardedTier {
    fn ask(&self, group: &[RowKey], scratch: &mut Scratch) -> u64 {
        let Scratch { visits, out, missing, is_found, .. } = scratch;
        is_found.fill(false);
        self.get_many(group, visits, |at, _, row| {
            out[at].copy_from_slice(row);
            is_found[at] = true;
        });
        missing.clear();
        missing.extend(group.iter().zip(&*is_found).filter(|(_, &found)| !found).map(|(&k, _)| k));
        if !missing.is_empty() {
            let row: Row = [1.0; ROW_WORDS];
            self.insert_many(missing, visits, |_| Some(&row[..])).unwrap();
        }
        (group.len() - missing.len()) as u64
    }
}

/// A tier whose policy wants to know which rows were asked for together.
struct GroupTier(ShardedTier);

impl RowCache for GroupTier {
    fn ask(&self, group: &[RowKey], scratch: &mut Scratch) -> u64 {
        let Scratch { visits, out, slots, .. } = scratch;
        slots.fill(u32::MAX);
        let mut hit_count = 0;
        self.0.peek_many(group, visits, |at, slot, row| {
            out[at].copy_from_slice(row);
            slots[at] = slot;
            hit_count += 1;
        });
        let (row_words, row_count) = (&[ROW_WORDS; GROUP_ROWS][..], GROUP_ROWS as u32);
        let told = TierGroup { keys: group, row_words, slots, row_count, hit_count };
        let row: Row = [1.0; ROW_WORDS];
        self.0.settle(&told, visits, |_| Some(&row[..]), |_, _| ()).unwrap();
        u64::from(hit_count)
    }
}

impl RowCache for Cache<u64, Row> {
    fn ask(&self, group: &[RowKey], scratch: &mut Scratch) -> u64 {
        let mut hits = 0;
        for (&key, out) in group.iter().zip(&mut scratch.out) {
            if let Some(row) = self.get(&key.row.0) {
                *out = row;
                hits += 1;
            } else {
                self.insert(key.row.0, [1.0; ROW_WORDS]);
            }
        }
        hits
    }
}

/// A tier of `policy` with room for just `HELD_ROWS` of `row_count` rows.
fn tier(policy: PolicyKind, row_count: u64) -> ShardedTier {
    let with = |capacity_bytes: u64| {
        let classes = vec![RowClass { row_words: ROW_WORDS, row_count }];
        ShardedTier::new(
            &TierOptions { capacity_bytes, classes, tables: vec![row_count], policy },
            16,
        )
        .unwrap()
    };
    let mut bytes = HELD_ROWS * 4 * ROW_WORDS as u64;
    while with(bytes).rows_max() < HELD_ROWS {
        bytes += 1 << 16;
    }
    println!("# {}: {} bytes for {HELD_ROWS} rows", policy.name(), bytes);
    with(bytes)
}

fn cache(name: &str, row_count: u64) -> Box<dyn RowCache> {
    if name == "quick_cache" {
        return Box::new(Cache::<u64, Row>::new(HELD_ROWS as usize));
    }
    let policy = PolicyKind::from_name(name).unwrap();
    let tier = tier(policy, row_count);
    if policy.knows_groups() {
        Box::new(GroupTier(tier))
    } else {
        Box::new(tier)
    }
}

fn draw_groups(row_count: u64, seed: u64) -> Vec<Vec<RowKey>> {
    let mut rng = SplitMix64::new(seed);
    let mut draw = || key(((row_count as f64).powf(rng.unit_f64()) - 1.0) as u64);
    let mut draw_group = || {
        let mut group = Vec::with_capacity(GROUP_ROWS);
        while group.len() < GROUP_ROWS {
            let key = draw();
            if !group.contains(&key) {
                group.push(key);
            }
        }
        group
    };
    (0..GROUPS).map(|_| draw_group()).collect()
}

/// Seconds of processor time so far, of this thread.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// Asks for the groups of one thread; returns rows found and seconds of its processor time.
fn ask_all(cache: &dyn RowCache, groups: &[Vec<RowKey>]) -> (u64, f64) {
    let mut scratch = Scratch::new();
    let start_s = processor_s();
    let hits = groups.iter().map(|group| cache.ask(group, &mut scratch)).sum();
    (hits, processor_s() - start_s)
}

/// Asks with `thread_count` threads and prints one line.
fn measure(name: &str, workload: &str, cache: &dyn RowCache, threads: &[Vec<Vec<RowKey>>]) {
    let start = Instant::now();
    let told: Vec<(u64, f64)> = thread::scope(|scope| {
        let asking: Vec<_> =
            threads.iter().map(|groups| scope.spawn(move || ask_all(cache, groups))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let rows = (threads.len() * GROUPS * GROUP_ROWS) as f64;
    let hits: u64 = told.iter().map(|(hits, _)| hits).sum();
    let processor_s: f64 = told.iter().map(|(_, seconds)| seconds).sum();
    println!(
        "{name},{workload},{},{:.1},{:.3e},{:.4}",
        threads.len(),
        processor_s * 1e9 / rows,
        rows / start.elapsed().as_secs_f64(),
        hits as f64 / rows
    );
}

fn main() {
    let names =
        std::env::args().nth(1).unwrap_or_else(|| "quick_cache,lru,group_frequency".to_owned());
    println!("cache,workload,threads,processor_ns_per_row,rows_per_wall_s,hit_share");
    for (workload, row_count) in [("hits", HELD_ROWS), ("skewed", ALL_ROWS)] {
        let threads = [draw_groups(row_count, 0), draw_groups(row_count, 1)];
        let caches: Vec<(&str, Box<dyn RowCache>)> =
            names.split(',').map(|name| (name, cache(name, row_count))).collect();
        for (_, cache) in &caches {
            for groups in &threads {
                ask_all(&**cache, groups);
            }
        }
        // In turns, because the machine's speed changes.
        for _ in 0..5 {
            for (name, cache) in &caches {
                measure(name, workload, &**cache, &threads[..1]);
                measure(name, workload, &**cache, &threads);
            }
        }
    }
}
