//! What does a lookup cost from pages on a device, and what does a placement save?
//!
//! One command is one JSON object with the field `do`; the answer is one JSON object. Python
//! (`tierbed bench lookup --log`) decides what is compared and draws the tables.
//!
//! | command | what it does | answer |
//! |---|---|---|
//! | `place` | placements of the earlier part of a log | replicas, seconds |
//! | `write` | a snapshot of the clones of a placed table | rows, pages, bytes |
//! | `write_by_use` | the same, most used rows first, perhaps with a tail | rows, pages, bytes |
//! | `run` | queries of a log, closed loop, on some threads | counts, time, processor time |
//! | `select` | choosing pages alone, of the same queries | processor time |
//! | `raw` | random reads of single pages, as many at once as the engine takes | reads per second |
//!
//! Tables larger than their logs are [`clones`] of one table side by side.

mod by_use;
mod clones;
mod drive;
mod place;
mod raw;
mod write;

use serde::Deserialize;
use serde_json::Value;
use tierbed_core::{Error, Result};

pub use clones::Clones;
pub(crate) use drive::join;

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Command {
    Place(place::PlaceJob),
    Write(write::WriteJob),
    WriteByUse(by_use::ByUseJob),
    Run(drive::RunJob),
    Select(drive::SelectJob),
    Raw(raw::RawJob),
}

/// Carries out one command; both sides are JSON objects.
///
/// # Errors
/// `Invalid` for a command that is none; what the command meets.
pub fn serve(command: &str) -> Result<Value> {
    let command: Command = serde_json::from_str(command)
        .map_err(|cause| Error::invalid("lookup bench command is wrong").with("cause", cause))?;
    match command {
        Command::Place(job) => place::place(&job),
        Command::Write(job) => write::write(&job),
        Command::WriteByUse(job) => by_use::write(&job),
        Command::Run(job) => drive::run(&job),
        Command::Select(job) => drive::select(&job),
        Command::Raw(job) => raw::raw(&job),
    }
}

#[cfg(test)]
mod tests;
