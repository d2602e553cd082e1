//! What does a row cost in each baseline? Loads a table, then reads and overwrites random rows.
//!
//! `cargo run --release -p tierbed-compare --example random_updates --`
//! `FOLDER [ROWS] [WINDOWS] [THREADS]`
//!
//! Rows of 148 bytes (dim 36, row-wise Adagrad); windows of 20,000 sorted random rows, skewed; the
//! store has 5 % of the table as memory. No row buffer above: every row reaches the store. THREADS
//! is RocksDB's number of reading threads.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measuring program")]

use std::path::Path;
use std::sync::Arc;

use tierbed_compare::{
    is_rocksdb_available, HashDb, HashDbOptions, MmapOptions, MmapStore, RocksMode, RocksOptions,
    RocksStore,
};
use tierbed_core::env::{Env, SplitMix64};
use tierbed_core::store::RowWrite;
use tierbed_core::{
    Budget, OptimizerKind, Result, RowId, RowKey, TableId, TableSchema, TrainStore,
};
use tierbed_io::FsFolder;

const WINDOW_ROWS: usize = 20_000;

fn open(name: &str, path: &Path, memory_bytes: u64, threads: usize) -> Result<Box<dyn TrainStore>> {
    let folder = Arc::new(FsFolder::create(path)?);
    let budget = Budget::unlimited();
    Ok(match name {
        "hashdb" => Box::new(HashDb::open(folder, HashDbOptions::within(memory_bytes, budget))?),
        "mmap" => Box::new(MmapStore::open(folder, MmapOptions::new(budget)?)?),
        _ => {
            let mode = match name {
                "rocksdb" => RocksMode::Levelled,
                _ => RocksMode::Universal,
            };
            let preset = RocksOptions::within(memory_bytes, mode, budget);
            let options = RocksOptions { read_threads: threads, ..preset };
            Box::new(RocksStore::open(folder, options)?)
        }
    })
}

fn cpu_us() -> u64 {
    // utime and stime of this process, threads included, in ticks of 10 ms.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).unwrap().parse::<u64>().unwrap();
    (ticks(11) + ticks(12)) * 10_000
}

fn measure(name: &str, folder: &Path, row_count: u64, counts: (usize, usize)) -> Result<()> {
    let (windows, threads) = counts;
    let table = TableSchema {
        optimizer: OptimizerKind::RowWiseAdagrad,
        ..TableSchema::plain("t", row_count, 36)
    };
    let (record_bytes, table_bytes) = (table.record_bytes(), table.table_bytes());
    let path = folder.join(name);
    let mut store = open(name, &path, table_bytes / 20, threads)?;
    store.add_table(table)?;
    let record = vec![7u8; record_bytes];
    let key = |row| RowKey::new(TableId(0), RowId(row));
    for first in (0..row_count).step_by(WINDOW_ROWS) {
        let rows = first..(first + WINDOW_ROWS as u64).min(row_count);
        let rows: Vec<_> = rows.map(|row| RowWrite { key: key(row), record: &record }).collect();
        store.write(&rows)?;
    }
    store.commit("loaded", &[])?;
    let before = store.stats();
    let (clock, mut rng) = (Env::real(0).clock, SplitMix64::new(1));
    let (started_us, started_cpu_us) = (clock.now_us(), cpu_us());
    let mut touched = 0;
    for _ in 0..windows {
        let skewed = |rng: &mut SplitMix64| rng.unit_f64() * rng.unit_f64() * row_count as f64;
        let mut keys: Vec<_> = (0..WINDOW_ROWS).map(|_| key(skewed(&mut rng) as u64)).collect();
        keys.sort_unstable();
        keys.dedup();
        store.read(&keys, &mut |_, found| {
            assert!(found.is_some());
            Ok(())
        })?;
        let rows: Vec<_> = keys.iter().map(|key| RowWrite { key: *key, record: &record }).collect();
        store.write(&rows)?;
        touched += keys.len() as u64;
    }
    let wall_us = clock.now_us() - started_us;
    let (cpu, after) = (cpu_us() - started_cpu_us, store.stats());
    let per_row = |bytes: u64| bytes / touched;
    println!(
        "{name:18} {:7.3} M rows/s {:6} ns CPU/row, {:5} + {:5} bytes/row, disk {:.2} of the table",
        touched as f64 / wall_us as f64,
        1000 * cpu / touched,
        per_row(after.io.read_bytes - before.io.read_bytes),
        per_row(after.io.write_bytes - before.io.write_bytes),
        after.disk_bytes as f64 / table_bytes as f64,
    );
    drop(store);
    let _ = std::fs::remove_dir_all(path);
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let number =
        |at: usize, default: u64| arguments.get(at).map_or(default, |text| text.parse().unwrap());
    let folder = arguments.get(1).expect("a folder for scratch data");
    for name in ["rocksdb", "rocksdb_universal", "mmap", "hashdb"] {
        if name.starts_with("rocks") {
            if let Err(missing) = is_rocksdb_available() {
                println!("{name:18} left out: {missing}");
                continue;
            }
        }
        let counts = (number(3, 30) as usize, number(4, 16) as usize);
        measure(name, Path::new(folder), number(2, 2_000_000), counts)?;
    }
    Ok(())
}
