//! Load on servers of rows: requests that come whether or not earlier ones were answered.
//!
//! ```text
//! arrivals, drawn ─▶ free connection ─▶ request ─▶ answer, checked ─▶ time since the arrival
//! ```
//!
//! A closed loop asks less while a server is slow and so leaves out what its callers would have
//! waited. Here latency counts from the moment when a request was meant to be sent; a run in which
//! the generator itself was late is void. Rows follow from their numbers, so every server has the
//! same and every answer can be checked.
//!
//! | command | does |
//! |---|---|
//! | `write` | writes a snapshot of the rows |
//! | `delta` | writes what a later version of the rows changed |
//! | `fill` | brings all rows into a server's memory |
//! | `load` | asks for some time at some rates |
//! | `engine` | looks up in this process, one request after another |

mod arrivals;
mod connection;
mod engine;
mod load;
mod peer;
mod report;
mod rows;
mod shards;

use serde::Deserialize;
use serde_json::Value;
use tierbed_core::{Error, Result};

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Command {
    Write(rows::WriteJob),
    Shards(shards::ShardsJob),
    Delta(rows::DeltaJob),
    Fill(peer::FillJob),
    Load(load::LoadJob),
    Engine(engine::EngineJob),
}

/// Carries out one command; both sides are JSON objects.
///
/// # Errors
/// `Invalid` for a command that is none; what the command meets.
pub fn serve(command: &str) -> Result<Value> {
    let command: Command = serde_json::from_str(command)
        .map_err(|cause| Error::invalid("serve bench command is wrong").with("cause", cause))?;
    match command {
        Command::Write(job) => rows::write(&job),
        Command::Shards(job) => shards::write(&job),
        Command::Delta(job) => rows::delta(&job),
        Command::Fill(job) => peer::fill(&job),
        Command::Load(job) => load::load(&job),
        Command::Engine(job) => engine::engine(&job),
    }
}

#[cfg(test)]
mod tests;
