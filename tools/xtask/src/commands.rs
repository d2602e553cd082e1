//! What runs when one says `cargo x check`? Thin sequences of cargo calls.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::tidy;

/// Returns the repository's root folder, two above xtask's own folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Features that the Rust tests have; those of the Makefile.
const TESTED: [&str; 2] = ["--features", "tierbed-server/otel"];

/// Formatting, lints, house rules.
pub(crate) fn check() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"], &[])?;
    let clippy = ["clippy", "--locked", "--workspace", "--all-targets"];
    cargo(&[&clippy[..], &TESTED, &["--", "-D", "warnings"]].concat(), &[])?;
    tidy::run(&root())
}

/// Rust tests; the Python module is left out, it is tested from Python.
pub(crate) fn test() -> Result<(), String> {
    cargo(&[&["test", "--locked"], &TESTED[..]].concat(), &[])
}

/// Rust API reference without warnings, then the documents' own rules.
pub(crate) fn docs() -> Result<(), String> {
    // The crates are read by those who work on them: a link to a private module is a good link.
    let flags = "-D warnings -A rustdoc::private-intra-doc-links".to_owned();
    let warnings_are_errors = ("RUSTDOCFLAGS", flags);
    cargo(&["doc", "--locked", "--workspace", "--no-deps"], &[warnings_are_errors])?;
    tidy::run_docs(&root())
}

/// Writes the references of settings, of a server and of a run: the tests that compare them do.
pub(crate) fn config() -> Result<(), String> {
    let environment = [("TIERBED_WRITE_REFERENCE", "1".to_owned())];
    let tests = ["-p", "tierbed-server", "--test", "configuration", "the_reference"];
    cargo(&[&["test", "--locked", "--quiet"], &tests[..]].concat(), &environment)?;
    let of_a_run = ["-m", "pytest", "-q", "python/tests/cli/test_run_file_page.py"];
    run("python", ".venv/bin/python", &of_a_run, &environment)
}

/// Everything above, cheapest first.
pub(crate) fn ci() -> Result<(), String> {
    check()?;
    test()?;
    sim(&[])?;
    docs()
}

/// What `cargo x sim` was asked for.
#[derive(Debug, PartialEq, Eq)]
struct SimOptions {
    /// Replays exactly this seed.
    seed: Option<u64>,
    /// Fresh seeds per suite; 4 when neither option is given.
    round_count: Option<u64>,
}

impl SimOptions {
    fn parse(options: &[&str]) -> Result<Self, String> {
        let mut parsed = Self { seed: None, round_count: None };
        let mut rest = options;
        while let [name, value, tail @ ..] = rest {
            let number: u64 =
                value.parse().map_err(|_| format!("{name} takes a number, got {value}"))?;
            match *name {
                "--seed" => parsed.seed = Some(number),
                "--rounds" => parsed.round_count = Some(number),
                _ => return Err(format!("unknown option of sim: {name}")),
            }
            rest = tail;
        }
        if parsed.seed.is_some() && parsed.round_count.is_some() {
            return Err("--seed replays one round; give --seed or --rounds, not both".to_owned());
        }
        match rest {
            [] => Ok(parsed),
            _ => Err(format!("option of sim without a value: {}", rest.join(" "))),
        }
    }
}

/// Runs every `tests/sim_*.rs` of the crates and tools with fresh seeds, or with the one given.
///
/// The suites read the seed from `TIERBED_SIM_SEED` and print it, so a failure can be replayed.
pub(crate) fn sim(options: &[&str]) -> Result<(), String> {
    let options = SimOptions::parse(options)?;
    let suites = sim_suites(&root())?;
    if suites.is_empty() {
        return Err("no simulation suite: expected crates/*/tests/sim_*.rs".to_owned());
    }
    let seeds = match options.seed {
        Some(seed) => vec![seed],
        None => (0..options.round_count.unwrap_or(4))
            .map(|round| fresh_seed().wrapping_add(round))
            .collect(),
    };
    for seed in seeds {
        println!("simulation seed {seed} (replay: cargo x sim --seed {seed})");
        for (package, suite) in &suites {
            let environment = [("TIERBED_SIM_SEED", seed.to_string())];
            cargo(&["test", "--locked", "--quiet", "-p", package, "--test", suite], &environment)?;
        }
    }
    Ok(())
}

/// Lists (package, test name) of every simulation suite.
fn sim_suites(root: &Path) -> Result<Vec<(String, String)>, String> {
    let mut suites = Vec::new();
    for folder in ["crates", "tools"] {
        for file in tidy::files_under(&root.join(folder))? {
            let tests = file.parent().filter(|parent| parent.ends_with("tests"));
            let (Some(tests), Some(stem)) = (tests, file.file_stem()) else { continue };
            let stem = stem.to_string_lossy();
            if stem.starts_with("sim_") && file.extension().is_some_and(|e| e == "rs") {
                let manifest = tests.with_file_name("Cargo.toml");
                suites.push((package_name(&manifest)?, stem.into_owned()));
            }
        }
    }
    Ok(suites)
}

fn package_name(manifest: &Path) -> Result<String, String> {
    let text = fs::read_to_string(manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
    let name = tidy::package_name(&text);
    name.map(str::to_owned).ok_or_else(|| format!("{}: no package name", manifest.display()))
}

#[expect(clippy::disallowed_methods, reason = "a fresh seed needs the time; it is printed")]
fn fresh_seed() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.as_secs()
}

fn cargo(arguments: &[&str], environment: &[(&str, String)]) -> Result<(), String> {
    let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    run("cargo", &program, arguments, environment)
}

/// Runs a program in the repository's root, and shows it as `name`.
fn run(
    name: &str,
    program: &str,
    arguments: &[&str],
    environment: &[(&str, String)],
) -> Result<(), String> {
    let shown = format!("{name} {}", arguments.join(" "));
    println!("$ {shown}");
    let status = Command::new(program)
        .current_dir(root())
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .status()
        .map_err(|error| format!("{shown}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{shown}: {status}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_options_name_a_seed_or_rounds() {
        assert_eq!(SimOptions::parse(&[]), Ok(SimOptions { seed: None, round_count: None }));
        let replay = SimOptions::parse(&["--seed", "7"]).unwrap();
        assert_eq!(replay.seed, Some(7));
        for wrong in [
            &["--seed"][..],
            &["--seed", "x"],
            &["--speed", "1"],
            &["--seed", "7", "--rounds", "2"],
        ] {
            assert!(SimOptions::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
