//! One process, one system: commands come in as lines of JSON, answers go out as lines of JSON.
//!
//! | command | fields | answer |
//! |---|---|---|
//! | `trace` | `path scale seed` | what the trace holds |
//! | `plan` | `trace folder batch_len dim window_bytes memory_bytes` | its size and cost |
//! | `open` | `job`: see [`Job`] | time to open and fill |
//! | `run` | `first count mode`: `train` or `pass` | what the slice took |
//! | `checkpoint` | | how long it took |
//!
//! The command's name is in the field `do`.
//! A failed command answers `{"error", "kind"}`; the next one is served all the same.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Error, Result, TableId};
use tierbed_io::FsFolder;
use tierbed_lab::trace::{write_trace, TraceOptions};
use tierbed_train::planned::{EpochPlan, PlanBuilder, PlanOptions, PlanShape};

use super::batches::{Batches, FEATURE_COUNT};
use super::job::{schema_of, Job};
use super::session::{Mode, Session};
use crate::meter::{process_cpu_ns, resident_bytes, thread_cpu_ns, Meter};

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
enum Command {
    Trace {
        path: PathBuf,
        scale: f64,
        seed: u64,
    },
    Plan {
        trace: PathBuf,
        folder: PathBuf,
        batch_len: usize,
        dim: u32,
        window_bytes: u64,
        memory_bytes: u64,
    },
    Open {
        job: Job,
    },
    Run {
        first: u64,
        count: u64,
        mode: String,
    },
    Checkpoint,
}

/// Serves commands until the input ends.
///
/// # Errors
/// `Io` when the answers cannot be written.
pub fn serve(input: impl BufRead, mut output: impl Write) -> Result<()> {
    let mut session = None;
    for line in input.lines() {
        let line = line.map_err(|cause| Error::os("could not read a command", cause))?;
        let answer = serde_json::from_str(&line)
            .map_err(|cause| Error::invalid("command is wrong").with("cause", cause))
            .and_then(|command| obey(command, &mut session))
            .unwrap_or_else(
                |error| json!({ "error": error.to_string(), "kind": error.kind().name() }),
            );
        writeln!(output, "{answer}")
            .and_then(|()| output.flush())
            .map_err(|cause| Error::os("could not answer", cause))?;
    }
    Ok(())
}

fn obey(command: Command, session: &mut Option<Session>) -> Result<Value> {
    let meter = Meter::new();
    let start_us = meter.now_us();
    let seconds = || (meter.now_us() - start_us) as f64 / 1e6;
    match command {
        Command::Trace { path, scale, seed } => {
            let stats = write_trace(&TraceOptions { seed, scale }, &path, &mut |_| Ok(()))?;
            Ok(json!({
                "seconds": seconds(),
                "samples": stats.sample_count,
                "total": stats.total(),
                "columns": stats.columns,
                "rows_per_batch_of_2048": stats.rows_per_batch(),
            }))
        }
        Command::Plan { trace, folder, batch_len, dim, window_bytes, memory_bytes } => {
            let options = PlanOptions { window_bytes, memory_bytes, ..PlanOptions::default() };
            make_plan(Batches::open(&trace, batch_len)?, folder, dim, options)
        }
        Command::Open { job } => {
            *session = None;
            let start_ns = process_cpu_ns();
            *session = Some(Session::open(&job)?);
            let (resident, _) = resident_bytes();
            Ok(json!({
                "seconds": seconds(),
                "cpu_ns": process_cpu_ns() - start_ns,
                "resident_bytes": resident,
            }))
        }
        Command::Run { first, count, mode } => {
            let mode = match mode.as_str() {
                "train" => Mode::Train,
                "pass" => Mode::Pass,
                other => return Err(Error::invalid("unknown mode").with("found", other)),
            };
            open(session)?.run(first, count, mode)
        }
        Command::Checkpoint => open(session)?.checkpoint(),
    }
}

fn open(session: &mut Option<Session>) -> Result<&mut Session> {
    session.as_mut().ok_or_else(|| Error::invalid("no system is open"))
}

// Reading the trace is not part of the plan's cost.
fn make_plan(
    mut batches: Batches,
    folder: PathBuf,
    dim: u32,
    options: PlanOptions,
) -> Result<Value> {
    let meter = Meter::new();
    let schema = schema_of(&batches.trace().row_counts(), dim)?;
    let tables: Vec<_> = (0..FEATURE_COUNT as u32).map(TableId).collect();
    let shape = PlanShape::new(&schema, &tables)?;
    let folder = Arc::new(FsFolder::create(&folder)?);
    let memory_bytes = options.memory_bytes;
    let mut builder = PlanBuilder::new(folder.clone(), "plan", shape, "bench", options)?;
    let (start_ns, start_us) = (process_cpu_ns(), meter.now_us());
    let (mut reading_ns, mut reading_us) = (0, 0);
    for number in 0..batches.batch_count() {
        let (read_ns, read_us) = (thread_cpu_ns(), meter.now_us());
        batches.read(number, 0)?;
        reading_ns += thread_cpu_ns() - read_ns;
        reading_us += meter.now_us() - read_us;
        builder.push(&batches.bags(0)?)?;
    }
    builder.finish()?;
    let cpu_ns = (process_cpu_ns() - start_ns).saturating_sub(reading_ns);
    let took_us = (meter.now_us() - start_us).saturating_sub(reading_us);
    let stats = EpochPlan::open(folder.as_ref(), "plan")?.stats();
    let (_, resident_peak) = resident_bytes();
    Ok(json!({
        "seconds": took_us as f64 / 1e6,
        "cpu_ns": cpu_ns,
        "windows": stats.window_count,
        "batches": stats.batch_count,
        "entries": stats.entry_count,
        "file_bytes": stats.file_bytes,
        "memory_bytes": memory_bytes,
        "resident_peak_bytes": resident_peak,
    }))
}
