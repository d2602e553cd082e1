//! How large is a trace of this scale? Writes it and prints what was counted.
//!
//! ```text
//! cargo run --release -p tierbed-lab --example trace -- FILE [scale] [seed]
//! ```

use std::path::Path;
use std::process::ExitCode;

use tierbed_core::env::Env;
use tierbed_core::{Error, Result};
use tierbed_lab::trace::{write_trace, TraceOptions};

fn run(words: &[String]) -> Result<()> {
    let path = words.first().ok_or_else(|| Error::invalid("usage: trace FILE [scale] [seed]"))?;
    let number = |at: usize, default: f64| {
        words.get(at).and_then(|word| word.parse().ok()).unwrap_or(default)
    };
    let options = TraceOptions { scale: number(1, 0.01), seed: number(2, 1.0) as u64 };
    let clock = Env::real(0).clock;
    let started_us = clock.now_us();
    let stats = write_trace(&options, Path::new(path), &mut |_| Ok(()))?;
    let seconds = (clock.now_us() - started_us) as f64 / 1e6;
    let total = stats.total();
    println!(
        "{} samples, {} rows: {} once, {} twice or more, {} ten times or more; {:.0} rows a batch",
        stats.sample_count,
        total.row_count,
        total.once_count,
        total.row_count - total.once_count,
        total.ten_times_count,
        stats.rows_per_batch(),
    );
    for (at, column) in stats.columns.iter().enumerate() {
        println!("C{}: {} rows, {} once", at + 1, column.row_count, column.once_count);
    }
    let ids = stats.sample_count * 26;
    println!("{seconds:.1} s, {:.0} ns an id", seconds * 1e9 / ids as f64);
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
