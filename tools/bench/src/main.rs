//! How much memory does training really take? The training access pattern without Python.
//!
//! Runs look-ahead, lookups, updates and checkpoints over skewed ids and prints what was counted
//! as JSON. Small enough to be run inside a memory limit: besides the budget it holds one window
//! of ids and one gradient.

mod pattern;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use pattern::{run, PatternOptions};

/// Trains tables with the access pattern of a recommender model and prints counts as JSON.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Folder of the store (new or empty).
    #[arg(long)]
    store: PathBuf,
    /// Memory the engine may use, in bytes.
    #[arg(long, default_value_t = 16 << 20)]
    budget_bytes: u64,
    /// Where rows live: `file`, `cold`, `memory`, `lsm`, `lsm_plain`, `hashdb`, `mmap`,
    /// `rocksdb` or `rocksdb_universal`.
    #[arg(long, default_value = "file")]
    backend: String,
    /// How bytes move: `auto`, `io_uring`, `pread` or `inline`.
    #[arg(long, default_value = "auto")]
    io_engine: String,
    /// Tables, each read by one feature.
    #[arg(long, default_value_t = 26)]
    tables: u32,
    /// Rows of each table.
    #[arg(long, default_value_t = 100_000)]
    rows: u64,
    /// Elements of a row.
    #[arg(long, default_value_t = 16)]
    dim: u32,
    /// Samples of a batch.
    #[arg(long, default_value_t = 512)]
    batch_size: usize,
    /// Batches.
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Batches announced ahead; 0 for none.
    #[arg(long, default_value_t = 0)]
    window: u64,
    /// Seed of ids and gradients.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    tierbed_compare::register_stores();
    let arguments = Arguments::parse();
    let options = PatternOptions {
        budget_bytes: arguments.budget_bytes,
        backend: arguments.backend,
        io_engine: arguments.io_engine,
        tables: arguments.tables,
        rows: arguments.rows,
        dim: arguments.dim,
        batch_size: arguments.batch_size,
        steps: arguments.steps,
        window: arguments.window,
        seed: arguments.seed,
    };
    match run(&arguments.store, &options) {
        Ok(report) => {
            println!("{report:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
