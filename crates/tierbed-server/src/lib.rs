//! Program that answers lookups over a snapshot, without Python.
//!
//! ```text
//! command line ─┐
//! TIERBED_...  ─┼─▶ Options ─▶ Snapshot::open ─▶ Server::start ─▶ signals ─▶ drain ─▶ stop
//! --config     ─┘   (one table)                    └─ READY=1 to the service manager
//! ```
//!
//! What can be set is one table, [`Options`]: the help, the keys of the file, the variables of the
//! environment and docs/reference/configuration.md are made of it. `tierbed serve` has the same
//! options and defaults; a test compares them.
//!
//! Exit codes: 0 done, 1 the work failed (a disk, damaged data), 2 something is set wrongly, 3 a
//! request did not end and was ended by force.

mod file;
mod manager;
mod opening;
mod options;
mod reference;
mod resident;
mod running;
mod source;
mod values;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind as Asked;
use tierbed_core::{Error, ErrorKind};

pub use file::Setting;
pub use options::{Limiting, Options, Reading, Recording, Routed, Serving, Versions};
pub use reference::reference;
pub use source::Source;
pub use values::Size;

use crate::running::Ended;

/// Something is set wrongly.
const WRONG: u8 = 2;
/// A request did not end.
const ABANDONED: u8 = 3;

/// Runs the program with the words of a command line, its own name first.
pub fn run(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = words.into_iter().collect();
    let (options, matches) = match file::read(&words) {
        Ok(read) => read,
        Err(file::Wrong::Words(error)) => return told_by_clap(&error),
        Err(file::Wrong::File(error)) => return told(&error),
    };
    if options.print_config {
        print!("{}", reference::effective(&matches));
        return ExitCode::SUCCESS;
    }
    match running::serve(&options) {
        Ok(Ended::Whole) => {
            eprintln!("stopped");
            ExitCode::SUCCESS
        }
        Ok(Ended::ByItself) => {
            eprintln!("tierbed-server: the server ended by itself; its log says why");
            ExitCode::FAILURE
        }
        Ok(Ended::WithWorkLeft) => {
            eprintln!("stopped, but a request did not end: ended by force");
            ExitCode::from(ABANDONED)
        }
        Err(error) => told(&error),
    }
}

fn told_by_clap(error: &clap::Error) -> ExitCode {
    // Nobody is left to tell when the stream is closed.
    let _ = error.print();
    match error.kind() {
        Asked::DisplayHelp | Asked::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(WRONG),
    }
}

fn told(error: &Error) -> ExitCode {
    eprintln!("tierbed-server: {error}");
    match error.kind() {
        ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Closed => ExitCode::from(WRONG),
        _ => ExitCode::FAILURE,
    }
}
