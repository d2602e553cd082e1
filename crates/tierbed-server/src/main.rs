//! `tierbed-server`: see the library's documentation.

use std::process::ExitCode;

fn main() -> ExitCode {
    tierbed_server::run(std::env::args_os())
}
