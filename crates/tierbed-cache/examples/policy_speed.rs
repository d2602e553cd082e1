//! How many rows per second does a policy take, index included?
//!
//! ```console
//! $ cargo run --release -p tierbed-cache --example policy_speed -- lru,s3_fifo,group_frequency
//! $ cargo run --release -p tierbed-cache --example policy_speed -- auto misses
//! ```
//! Groups of 26 rows go through a cache of 100,000: index, keys, policy, no row bytes.
//! `skewed` draws them from a million rows, about as Zipf's law with exponent 1; `hits` are of rows
//! that are all cached, `misses` of rows that hardly are. One thread; rates are by the processor
//! time of the thread, the median and the best of ten pieces (the clock has steps of 4 ms): on a
//! machine with other work the best is the one that was disturbed least.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a program for measuring")]

use tierbed_cache::policy::{EvictionPolicy, Group, PolicyKind, SLOT_BITS};
use tierbed_cache::SlotIndex;
use tierbed_core::env::{mix64, SplitMix64};

const ROWS: usize = 1 << 20;
const CAPACITY: usize = 100_000;
const GROUP_ROWS: usize = 26;
const GROUPS_PER_PIECE: usize = 40_000;
const PIECES: usize = 10;

/// Seconds of processor time so far, of this thread.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// Index, keys and policy.
struct Cache {
    policy: Box<dyn EvictionPolicy>,
    index: SlotIndex,
    keys: Vec<u64>,
    /// As their records would hold them, of policies that remember them.
    scores: Option<Vec<u16>>,
    free: Vec<u32>,
    hashes: Vec<u64>,
    slots: Vec<Option<u32>>,
    hits: usize,
}

impl Cache {
    fn new(kind: PolicyKind) -> Self {
        let mut policy = kind.build();
        for (slab, first) in (0..CAPACITY).step_by(1 << SLOT_BITS).enumerate() {
            policy.add_slab(slab as u32, (CAPACITY - first).min(1 << SLOT_BITS) as u32);
        }
        Self {
            policy,
            index: SlotIndex::with_capacity(CAPACITY, CAPACITY as u32),
            keys: vec![u64::MAX; CAPACITY],
            scores: kind.remembers_scores().then(|| vec![0; ROWS]),
            free: (0..CAPACITY as u32).rev().collect(),
            hashes: Vec::new(),
            slots: Vec::new(),
            hits: 0,
        }
    }

    fn ask(&mut self, group: &[u32]) {
        self.hashes.clear();
        self.hashes.extend(group.iter().map(|&row| mix64(u64::from(row))));
        self.index.warm(&self.hashes);
        if let Some(scores) = &self.scores {
            // Scores come with the records, which have just been read.
            let together = group.iter().fold(0, |all, &row| all ^ scores[row as usize]);
            std::hint::black_box(together);
        }
        self.slots.clear();
        for (&row, &hash) in group.iter().zip(&self.hashes) {
            let is_it = |slot: u32| self.keys[slot as usize] == u64::from(row);
            self.slots.push(self.index.find(hash, is_it));
        }
        let hit_count = self.slots.iter().flatten().count() as u32;
        self.hits += hit_count as usize;
        let row_count = group.len() as u32;
        self.policy.begin_group(&Group { hashes: &self.hashes, row_count, hit_count });
        for (at, &row) in group.iter().enumerate() {
            // A row of this group may have left since.
            let slot = self.slots[at].filter(|&slot| self.keys[slot as usize] == u64::from(row));
            match slot {
                Some(slot) => self.policy.touch(slot),
                None => self.come_in(row, self.hashes[at]),
            }
        }
        self.policy.end_group();
    }

    fn come_in(&mut self, row: u32, hash: u64) {
        let is_full = self.free.is_empty();
        let known = self.scores.as_ref().map_or(0, |scores| scores[row as usize]);
        let arrival = self.policy.arrive(hash, known, is_full);
        self.remember(row.into(), arrival.score);
        if !arrival.is_admitted {
            return;
        }
        for _ in 0..arrival.flushed.max(u32::from(is_full)) {
            let victim = self.policy.victim().unwrap();
            let old = self.keys[victim as usize];
            let score = self.policy.evict(victim, mix64(old));
            self.remember(old, score);
            self.index.remove(mix64(old), victim);
            self.keys[victim as usize] = u64::MAX;
            self.free.push(victim);
        }
        let slot = self.free.pop().unwrap();
        assert!(self.index.insert(hash, slot));
        self.keys[slot as usize] = u64::from(row);
        self.policy.insert(slot, hash, arrival.score);
    }

    fn remember(&mut self, row: u64, score: u16) {
        if let Some(scores) = &mut self.scores {
            scores[row as usize] = score;
        }
    }
}

/// Groups of different rows, behind one another.
fn groups(count: usize, seed: u64, draw: impl Fn(&mut SplitMix64) -> u32) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let mut rows: Vec<u32> = Vec::with_capacity(count * GROUP_ROWS);
    for _ in 0..count {
        let start = rows.len();
        while rows.len() < start + GROUP_ROWS {
            let row = draw(&mut rng);
            if !rows[start..].contains(&row) {
                rows.push(row);
            }
        }
    }
    rows
}

/// Median and best rate over the pieces of `rows`, and the share of hits.
fn measure(cache: &mut Cache, rows: &[u32]) -> (f64, f64, f64) {
    cache.hits = 0;
    let mut rates: Vec<f64> = Vec::new();
    for piece in rows.chunks(GROUPS_PER_PIECE * GROUP_ROWS) {
        let start_s = processor_s();
        piece.chunks_exact(GROUP_ROWS).for_each(|group| cache.ask(group));
        rates.push(piece.len() as f64 / (processor_s() - start_s));
    }
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() / 2], rates[rates.len() - 1], cache.hits as f64 / rows.len() as f64)
}

fn main() {
    let names =
        std::env::args().nth(1).unwrap_or_else(|| "lru,s3_fifo,ev_lfu,group_frequency".to_owned());
    let group_count = PIECES * GROUPS_PER_PIECE;
    let skewed = |rng: &mut SplitMix64| ((ROWS as f64).powf(rng.unit_f64()) - 1.0) as u32;
    let cached = |rng: &mut SplitMix64| rng.below(CAPACITY as u64) as u32;
    let rare =
        |rng: &mut SplitMix64| (CAPACITY as u64 + rng.below((ROWS - CAPACITY) as u64)) as u32;
    let draws = [
        ("hits", groups(group_count, 1, cached)),
        ("misses", groups(group_count, 2, rare)),
        ("skewed", groups(group_count, 3, skewed)),
    ];
    let only = std::env::args().nth(2);
    let is_wanted = |rows: &str| only.as_deref().is_none_or(|only| only == rows);
    let fill: Vec<u32> = (0..CAPACITY as u32).collect();
    println!("policy,rows,median_per_s,best_per_s,hit_rate,policy_bytes_per_row");
    for name in names.split(',') {
        let kind = PolicyKind::from_name(name).unwrap();
        for (rows, groups) in draws.iter().filter(|(rows, _)| is_wanted(rows)) {
            let mut cache = Cache::new(kind);
            fill.chunks(GROUP_ROWS).for_each(|group| cache.ask(group));
            let (median, best, hit_rate) = measure(&mut cache, groups);
            let bytes = kind.build().bytes_per_slot();
            println!("{name},{rows},{median:.3e},{best:.3e},{hit_rate:.4},{bytes}");
        }
    }
}
