//! What does the pre-pass cost, and what does reading its plan back cost?
//!
//! Generates a skewed trace of 26 features in memory (tables as large as Criteo-Kaggle's,
//! scaled), plans it several times and reads the plan as training does. Prints processor time of
//! the calling thread per row update (distinct rows per batch), the least of the rounds, and bytes
//! per sample.
//!
//! ```text
//! cargo run --release -p tierbed-train --example plan_cost -- scale=0.25 skew=8 rounds=3
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a measuring program that panics has failed, as it should"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::{Bags, TableId};
use tierbed_io::FsFolder;
use tierbed_train::planned::{EpochPlan, PlanBuilder, PlanOptions, PlanShape};

/// Distinct values of the 26 categorical columns of Criteo-Kaggle.
const CARDINALITIES: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27,
    14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

fn options() -> BTreeMap<String, String> {
    let pairs = std::env::args().skip(1).filter_map(|word| {
        word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

fn get<T: std::str::FromStr>(options: &BTreeMap<String, String>, key: &str, default: T) -> T {
    options.get(key).and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Ids are uniform numbers to the power `skew`, times the rows of the table.
fn batch(at: u64, rows: &[u64], (size, skew): (usize, f64)) -> Vec<i64> {
    let mut rng = SplitMix64::new(at.wrapping_mul(0x9E37_79B9) ^ 77);
    let mut indices = Vec::with_capacity(size * rows.len());
    for &rows in rows {
        for _ in 0..size {
            let id = (rng.unit_f64().powf(skew) * rows as f64) as u64;
            indices.push(id.min(rows - 1) as i64);
        }
    }
    indices
}

fn distinct_rows(batch: &[i64], size: usize) -> u64 {
    let count = |ids: &[i64]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.chunk_by(|a, b| a == b).count() as u64
    };
    batch.chunks(size).map(count).sum()
}

fn thread_cpu_ns() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Returns the processor time of pushing, finishing and reading back.
fn measure(
    folder: &Arc<FsFolder>,
    batches: &[Vec<i64>],
    shape: &PlanShape,
    made: &PlanOptions,
) -> [u64; 3] {
    let size = batches[0].len() / 26;
    let offsets: Vec<i64> = (0..=(26 * size) as i64).collect();
    let start = thread_cpu_ns();
    let mut builder =
        PlanBuilder::new(folder.clone(), "plan", shape.clone(), "trace", made.clone()).unwrap();
    for indices in batches {
        builder.push(&Bags::new(indices, &offsets, None, 26).unwrap()).unwrap();
    }
    let pushed = thread_cpu_ns();
    builder.finish().unwrap();
    let finished = thread_cpu_ns();
    let plan = EpochPlan::open(&**folder, "plan").unwrap();
    let opened = thread_cpu_ns();
    let sum = plan.read_all().unwrap();
    let read = thread_cpu_ns();
    assert!(sum > 0);
    [pushed - start, finished - pushed, read - opened]
}

fn main() {
    let options = options();
    let scale: f64 = get(&options, "scale", 0.25);
    let size = get(&options, "batch", 512usize);
    let skew: f64 = get(&options, "skew", 8.0);
    let scaled = |rows: &u64| ((*rows as f64 * scale) as u64).max((*rows).min(1000));
    let rows: Vec<u64> = CARDINALITIES.iter().map(scaled).collect();
    let batches: Vec<_> =
        (0..get(&options, "batches", 1500)).map(|at| batch(at, &rows, (size, skew))).collect();
    let updates: u64 = batches.iter().map(|batch| distinct_rows(batch, size)).sum();
    let samples = (batches.len() * size) as u64;
    let record_bytes = 4 * (36 + 2);
    let table_bytes = rows.iter().sum::<u64>() * record_bytes;
    let shape = PlanShape {
        feature_tables: (0..26).map(TableId).collect(),
        record_bytes: vec![record_bytes as u32; 26],
        row_counts: rows,
    };
    let made = PlanOptions {
        window_bytes: get(&options, "window", table_bytes / 20 / 12),
        memory_bytes: get(&options, "memory", 256 << 20),
        ..PlanOptions::default()
    };
    println!(
        "{} MiB of tables, {} batches of {size}, skew {skew}: {updates} row updates, \
         {:.3} per index",
        table_bytes >> 20,
        batches.len(),
        updates as f64 / (26 * samples) as f64
    );
    let path = PathBuf::from(get(&options, "folder", "plan-cost".to_owned()));
    let folder = Arc::new(FsFolder::create(&path).unwrap());
    let mut least = [u64::MAX; 3];
    for _ in 0..get(&options, "rounds", 3) {
        let times = measure(&folder, &batches, &shape, &made);
        for (least, now) in least.iter_mut().zip(times) {
            *least = now.min(*least);
        }
    }
    let stats = EpochPlan::open(&*folder, "plan").unwrap().stats();
    let per_update = |ns: u64| ns as f64 / updates as f64;
    println!(
        "push {:.1} + finish {:.1} = {:.1} ns, reading {:.1} ns cpu per row update; \
         {:.1} bytes per sample; {} windows, {:.2} entries per row update",
        per_update(least[0]),
        per_update(least[1]),
        per_update(least[0] + least[1]),
        per_update(least[2]),
        stats.file_bytes as f64 / samples as f64,
        stats.window_count,
        stats.entry_count as f64 / updates as f64,
    );
    fs::remove_dir_all(&path).unwrap();
}
