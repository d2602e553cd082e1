//! How many rows per second does a policy take, index included?
//!
//! ```console
//! $ cargo run --release -p tierbed-cache --example policy_speed -- lru,s3-fifo,ours
//! ```
//! Groups of 26 rows drawn from a skewed distribution over a million rows go through a cache of a
//! tenth of them: robin-hood index, keys, policy, no row bytes. One thread; the time is the
//! processor time of the process, so that other work on the machine counts little.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a program for measuring")]

use tierbed_cache::policy::{Group, PolicyKind, SLOT_BITS};
use tierbed_cache::RobinHoodIndex;
use tierbed_core::env::{mix64, SplitMix64};

const ROWS: usize = 1 << 20;
const CAPACITY: usize = ROWS / 10;
const GROUP_ROWS: usize = 26;
const GROUPS: usize = 200_000;

/// Row numbers, about as skewed as Zipf's law with exponent 1.
fn draw(rng: &mut SplitMix64) -> u32 {
    ((ROWS as f64).powf(rng.unit_f64()) - 1.0) as u32
}

/// Seconds of processor time so far, of this process.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<f64>().unwrap() / 100.0
}

fn run(kind: PolicyKind, groups: &[Vec<u32>]) -> (f64, f64) {
    let mut policy = kind.build();
    for (slab, first) in (0..CAPACITY).step_by(1 << SLOT_BITS).enumerate() {
        policy.add_slab(slab as u32, (CAPACITY - first).min(1 << SLOT_BITS) as u32);
    }
    let mut index = RobinHoodIndex::with_capacity(CAPACITY);
    let (mut keys, mut scores) = (vec![0u64; CAPACITY], vec![0u16; ROWS]);
    let mut free: Vec<u32> = (0..CAPACITY as u32).rev().collect();
    let (mut hits, mut hashes, mut slots) = (0, Vec::new(), Vec::new());
    let start_s = processor_s();
    for group in groups {
        hashes.clear();
        hashes.extend(group.iter().map(|&row| mix64(u64::from(row))));
        slots.clear();
        slots.extend(
            group.iter().zip(&hashes).map(|(&row, &hash)| {
                index.find(hash, |slot| keys[slot as usize] == u64::from(row))
            }),
        );
        let hit_count = slots.iter().flatten().count() as u32;
        hits += hit_count as usize;
        let row_count = group.len() as u32;
        policy.begin_group(&Group { hashes: &hashes, row_count, hit_count });
        for (&row, (&hash, &slot)) in group.iter().zip(hashes.iter().zip(&slots)) {
            // A row of this group may have left since.
            if let Some(slot) = slot.filter(|&slot| keys[slot as usize] == u64::from(row)) {
                policy.touch(slot);
                continue;
            }
            let arrival = policy.arrive(hash, scores[row as usize], free.is_empty());
            scores[row as usize] = arrival.score;
            if !arrival.is_admitted {
                continue;
            }
            for _ in 0..arrival.flushed.max(u32::from(free.is_empty())) {
                let victim = policy.victim().unwrap();
                let old = keys[victim as usize];
                scores[old as usize] = policy.evict(victim, mix64(old));
                index.remove(mix64(old), victim);
                keys[victim as usize] = u64::MAX;
                free.push(victim);
            }
            let slot = free.pop().unwrap();
            assert!(index.insert(hash, slot));
            keys[slot as usize] = u64::from(row);
            policy.insert(slot, hash, arrival.score);
        }
        policy.end_group();
    }
    let row_count = (groups.len() * GROUP_ROWS) as f64;
    (row_count / (processor_s() - start_s), hits as f64 / row_count)
}

fn main() {
    let names = std::env::args().nth(1).unwrap_or_else(|| "lru,s3-fifo,ev-lfu,ours".to_owned());
    let mut rng = SplitMix64::new(1);
    let group = |rng: &mut SplitMix64| {
        let mut rows = Vec::with_capacity(GROUP_ROWS);
        while rows.len() < GROUP_ROWS {
            let row = draw(rng);
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        rows
    };
    let groups: Vec<Vec<u32>> = (0..GROUPS).map(|_| group(&mut rng)).collect();
    println!("policy,row_updates_per_s,hit_rate,policy_bytes_per_row");
    for name in names.split(',') {
        let kind = PolicyKind::from_name(name).unwrap();
        let (rate, hit_rate) = run(kind, &groups);
        println!("{name},{rate:.3e},{hit_rate:.4},{}", kind.build().bytes_per_slot());
    }
}
