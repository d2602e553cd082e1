//! One measured system in a process of its own; commands on standard input. See
//! `tierbed_bench::training::serve`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match tierbed_bench::training::serve(std::io::stdin().lock(), std::io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
