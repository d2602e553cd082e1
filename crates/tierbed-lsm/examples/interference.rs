//! How long does a window's read take while the tree compacts? Plain, SILK-like and RecDB's
//! scheduling side by side.
//!
//! `cargo run --release -p tierbed-lsm --example interference -- FOLDER [ROUNDS]`. FOLDER should
//! lie on the disk in question; it gets about 1 GB, which is removed. Each round runs all
//! schedulers one after the other on the same seeded trace; a line per scheduler and round, then
//! the medians. Source: RecDB §4.4 and Fig. 12a (read latency with and without scheduler).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a measurement, not a library"
)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::store::{Ahead, RowWrite};
use tierbed_core::{Budget, RowId, RowKey, RowStore, TableId, TableSchema, TrainStore};
use tierbed_io::FsFolder;
use tierbed_lsm::{LsmOptions, LsmStore, Scheduling, WorkerChoice};

const ROWS: u64 = 1_500_000;
const DIM: u32 = 32;
const BATCH_ACCESSES: u64 = 2_600;
const BATCH_SAMPLES: u64 = 100;
const WINDOW_BATCHES: u64 = 64;
const WINDOWS: u64 = 12;
/// Time a batch computes; training sleeps meanwhile, as it would wait for a GPU.
const BATCH_US: u64 = 12_000;
const BUDGET_BYTES: u64 = 64 << 20;
/// Small, so that a merge of level 0 is shorter than a window, as with the paper's 512 batches.
const MEMTABLE_BYTES: usize = 2 << 20;

fn key(rank: u64) -> RowKey {
    RowKey::new(TableId(0), RowId(rank.wrapping_mul(0x9E37_79B1) % ROWS))
}

fn batch(number: u64) -> Vec<RowKey> {
    let mut rng = SplitMix64::new(number);
    (0..BATCH_ACCESSES).map(|_| key((rng.unit_f64().powi(4) * ROWS as f64) as u64)).collect()
}

struct Outcome {
    read_us: Vec<u64>,
    write_us: Vec<u64>,
    train_us: u64,
    compactions: u64,
    deferred: u64,
    l0_max: usize,
}

fn write(store: &mut LsmStore, keys: &[RowKey], record: &[u8]) {
    let rows: Vec<_> = keys.iter().map(|key| RowWrite { key: *key, record }).collect();
    store.write(&rows).unwrap();
}

fn fill(folder: &Path) {
    let folder = Arc::new(FsFolder::create(folder).unwrap());
    let mut options = LsmOptions::plain(Budget::new(BUDGET_BYTES));
    options.worker = WorkerChoice::Inline;
    options.sst.sst_bytes = MEMTABLE_BYTES as u64;
    options.shape.level1_bytes = 4 * MEMTABLE_BYTES as u64;
    let mut store = LsmStore::open(folder, options).unwrap();
    store.add_table(TableSchema::plain("t", ROWS, DIM)).unwrap();
    let record = vec![1; store.schema().table(TableId(0)).unwrap().record_bytes()];
    for first in (0..ROWS).step_by(5000) {
        let keys: Vec<_> =
            (first..first + 5000).map(|row| RowKey::new(TableId(0), RowId(row))).collect();
        write(&mut store, &keys, &record);
    }
    store.commit("filled", &[]).unwrap();
}

fn train(folder: &Path, scheduling: Scheduling) -> Outcome {
    let clock = SystemClock::default();
    let folder = Arc::new(FsFolder::create(folder).unwrap());
    let mut options = LsmOptions::recdb(Budget::new(BUDGET_BYTES));
    options.scheduling = scheduling;
    options.memory.memtable_bytes = MEMTABLE_BYTES;
    options.memory.sealed_memtables_max = 2;
    options.sst.sst_bytes = MEMTABLE_BYTES as u64;
    options.shape.level1_bytes = 4 * MEMTABLE_BYTES as u64;
    let mut store = LsmStore::open(folder, options).unwrap();
    let record = vec![2; store.schema().table(TableId(0)).unwrap().record_bytes()];
    let mut outcome = Outcome {
        read_us: vec![],
        write_us: vec![],
        train_us: 0,
        compactions: 0,
        deferred: 0,
        l0_max: 0,
    };
    let started = clock.now_us();
    for window in 0..WINDOWS {
        let batches: Vec<_> =
            (0..WINDOW_BATCHES).map(|at| batch(window * WINDOW_BATCHES + at)).collect();
        let accesses = batches.concat();
        let unique: BTreeSet<_> = accesses.iter().copied().collect();
        let keys: Vec<_> = unique.into_iter().collect();
        let before = clock.now_us();
        store.read(&keys, &mut |_, _| Ok(())).unwrap();
        outcome.read_us.push(clock.now_us() - before);
        store
            .observe(&Ahead {
                batches_buffered: WINDOW_BATCHES as u32,
                accesses_buffered: accesses.len() as u64,
                sample_count: WINDOW_BATCHES * BATCH_SAMPLES,
                access_count: accesses.len() as u64,
                visit_accesses: &|visit| accesses.iter().for_each(|row| visit(*row)),
            })
            .unwrap();
        for mut rows in batches {
            std::thread::sleep(std::time::Duration::from_micros(BATCH_US));
            rows.sort_unstable();
            rows.dedup();
            let before = clock.now_us();
            write(&mut store, &rows, &record);
            outcome.write_us.push(clock.now_us() - before);
            outcome.l0_max = outcome.l0_max.max(store.version().level(0).len());
        }
    }
    outcome.train_us = clock.now_us() - started;
    outcome.compactions = store.lsm_stats().compaction_count;
    outcome.deferred = store.lsm_stats().deferred_count;
    outcome
}

fn quantile(values: &[u64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted[((sorted.len() - 1) as f64 * share).round() as usize] as f64 / 1000.0
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().expect("name a folder");
    let rounds: usize = arguments.next().map_or(3, |rounds| rounds.parse().unwrap());
    let root = Path::new(&folder).join("interference");
    let _ = std::fs::remove_dir_all(&root);
    let filled = root.join("filled");
    fill(&filled);
    let kinds = [
        ("levelled", Scheduling::Levelled),
        ("silk", Scheduling::SilkLike { device_bytes_per_s: 200e6 }),
        ("recdb", Scheduling::LookAhead),
    ];
    let mut medians = vec![[const { Vec::new() }; 3]; kinds.len()];
    for round in 0..rounds {
        for (at, (name, scheduling)) in kinds.iter().enumerate() {
            let copy = root.join("copy");
            let _ = std::fs::remove_dir_all(&copy);
            std::fs::create_dir_all(&copy).unwrap();
            for entry in std::fs::read_dir(&filled).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
            }
            let outcome = train(&copy, *scheduling);
            let (p50, p99) = (quantile(&outcome.read_us, 0.5), quantile(&outcome.read_us, 0.99));
            let write_p99 = quantile(&outcome.write_us, 0.99);
            println!(
                "round {round} {name}: window reads p50 {p50:.1} ms, p99 {p99:.1} ms; writes p99 \
                 {write_p99:.1} ms; {:.1} s in all; {} compactions, {} put off, level 0 at most {}",
                outcome.train_us as f64 / 1e6,
                outcome.compactions,
                outcome.deferred,
                outcome.l0_max
            );
            for (list, value) in medians[at].iter_mut().zip([p50, p99, write_p99]) {
                list.push(value);
            }
        }
    }
    for ((name, _), mut lists) in kinds.iter().zip(medians) {
        let median = |list: &mut Vec<f64>| {
            list.sort_unstable_by(f64::total_cmp);
            list[list.len() / 2]
        };
        let [p50, p99, write_p99] = &mut lists;
        println!(
            "{name}, medians of {rounds} rounds: reads p50 {:.1} ms, p99 {:.1} ms; writes p99 \
             {:.1} ms",
            median(p50),
            median(p99),
            median(write_p99)
        );
    }
    let _ = std::fs::remove_dir_all(&root);
}
