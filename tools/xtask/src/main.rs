//! Is the house in order? The house commands, `cargo x <command>`.
//!
//! They need nothing but cargo. `make` builds on them and adds the Python half.

mod commands;
mod tidy;

use std::process::ExitCode;

const HELP: &str = "\
cargo x <command>

  check               cargo fmt --check, clippy with warnings as errors, tidy
  test                Rust unit, integration and documentation tests
  tidy                house rules: sizes, words, arrows between crates, docs, links, unsafe
  count [--list | --set]
                      size and robustness figures of every crate; --list shows each place
                      counted, --set lowers the ceilings that tidy checks
  sim [--seed N] [--rounds N]
                      seeded simulations of faulty disks; a seed replays one run
  config              write configuration.md and run-file.md of docs/reference from the options
  docs                Rust API reference, then the link checks of tidy
  ci                  check, test, sim, docs, in this order
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["check"] => commands::check(),
        ["test"] => commands::test(),
        ["tidy"] => tidy::run(&commands::root()),
        ["count"] => tidy::count::run(&commands::root()),
        ["count", "--list"] => tidy::count::list(&commands::root()),
        ["count", "--set"] => tidy::count::set(&commands::root()),
        ["sim", options @ ..] => commands::sim(options),
        ["config"] => commands::config(),
        ["docs"] => commands::docs(),
        ["ci"] => commands::ci(),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => Err(format!("unknown command: {}\n\n{HELP}", words.join(" "))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
