//! What can be set: one table, three places, and words for every mistake.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use kit::{command, ended, run, write_snapshot};
use tierbed_server::Options;

const PAGE: &str = "../../docs/reference/configuration.md";

#[test]
fn the_reference_is_what_the_table_says() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    if std::env::var_os("TIERBED_WRITE_REFERENCE").is_some() {
        fs::write(&page, tierbed_server::reference()).unwrap();
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page == tierbed_server::reference(), "the page is stale: write it by `cargo x config`");
}

/// A value that each option refuses, and what the refusal must say besides the option.
fn wrong(unit: &str) -> Option<(&'static str, &'static str)> {
    match unit {
        "SIZE" => Some(("4XB", "write a size")),
        "COUNT" => Some(("-1", "write a whole number, ")),
        "MS" => Some(("-1", "write whole milliseconds")),
        "SECONDS" => Some(("soon", "write seconds, 0 to 86400")),
        "SHARE" => Some(("2", "write a number above 0, up to 1")),
        "true|false" => Some(("perhaps", "write true or false")),
        _ => None,
    }
}

/// Options whose values only the server can judge: what it says of a wrong one.
const JUDGED: [(&str, &str, &str); 26] = [
    ("address", "nowhere", "remedy: choose a free port"),
    ("grpc-address", "nowhere", "remedy: choose a free port"),
    ("admin-address", "nowhere", "remedy: choose a free port"),
    ("cache", "fifo2", "remedy: use one of"),
    ("resident", "absent", "remedy: name a file that TierPlan.save wrote"),
    ("neighbours", "absent", "remedy: add neighbours:second_chance:4 to the tiers"),
    ("refresh", "nobody", "remedy: name tables that the snapshot has"),
    ("record", "/proc/none", "remedy: name a folder that the server may write"),
    ("record-tables", "nobody", "remedy: name tables that the snapshot has"),
    ("tokens", "absent", "remedy: name a file that the server may read"),
    ("tls-cert", "absent", "remedy: give tls_cert and tls_key together"),
    ("tls-key", "absent", "remedy: give tls_cert and tls_key together"),
    ("tls-client-ca", "absent", "remedy: give tls_cert and tls_key together"),
    ("tls-client-names", "a", "remedy: give tls_client_ca with tls_client_names"),
    ("local", "/proc/none", "/proc/none"),
    ("deltas", "absent", "absent"),
    ("members", "absent", "remedy: give route and members together"),
    ("shard-ca", "absent", "remedy: give route and members together"),
    ("shard-cert", "absent", "remedy: give route and members together"),
    ("shard-key", "absent", "remedy: give route and members together"),
    ("shard-name", "absent", "remedy: give route and members together"),
    ("shard-token", "absent", "remedy: give route and members together"),
    ("route", "absent", "remedy: leave out one of SNAPSHOT and --route"),
    ("model-name", "a/b", "a/b"),
    ("config", "absent", "remedy: name a file that the server may read"),
    ("otlp-endpoint", "nowhere", COLLECTOR),
];

/// What is said of a collector that is none.
#[cfg(feature = "otel")]
const COLLECTOR: &str = "remedy: write http://host:4317";
/// What is said of any collector.
#[cfg(not(feature = "otel"))]
const COLLECTOR: &str = "remedy: build it with --features otel";

#[test]
fn every_option_refuses_a_wrong_value_and_says_what_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("ads");
    write_snapshot(&snapshot, 100, 4);
    let snapshot = snapshot.to_str().unwrap();
    let mut walked = 0;
    for arg in Options::command().get_arguments() {
        let Some(name) = arg.get_long() else { continue };
        if ["help", "version", "print-config"].contains(&name) {
            continue;
        }
        let unit = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
        let choices = arg.get_possible_values();
        let (value, needs) = match wrong(&unit.unwrap_or_default()) {
            Some(wrong) => wrong,
            None if !choices.is_empty() => ("neither", "possible values: "),
            None => {
                let judged = JUDGED.iter().find(|(judged, ..)| *judged == name);
                let judged =
                    judged.unwrap_or_else(|| panic!("no wrong value of --{name} is tried"));
                (judged.1, judged.2)
            }
        };
        let given = format!("--{name}={value}");
        let mut words = vec![snapshot, "--address=127.0.0.1:0", &given];
        if name == "address" {
            words.remove(1);
        }
        let record = folder.path().join("log");
        let record = format!("--record={}", record.display());
        if name == "record-tables" {
            words.push(&record);
        }
        let (code, _, told) = run(&words);
        assert!((1..=2).contains(&code), "{given}: {code}, {told}");
        assert!(told.contains(needs), "{given}: {told}");
        walked += 1;
    }
    assert!(walked > 40, "{walked}");
}

#[test]
fn the_command_line_goes_before_the_environment_and_that_before_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    let text = "snapshot = \"/data/ads\"\nqueue-ms-max = 11\nidle-ms-max = 12\nbags-max = 13\n\
                access-log = true\n";
    fs::write(&file, text).unwrap();
    let mut command = command(&["--print-config", "--config", file.to_str().unwrap()]);
    command.args(["--bags-max", "33", "--access-log=false"]);
    command.env("TIERBED_IDLE_MS_MAX", "22").env("TIERBED_BAGS_MAX", "23");
    let (code, printed, told) = ended(&mut command);
    assert_eq!(code, 0, "{told}");
    for line in [
        "snapshot = \"/data/ads\"  # file",
        "queue-ms-max = 11  # file",
        "idle-ms-max = 22  # TIERBED_IDLE_MS_MAX",
        "bags-max = 33  # command line",
        "access-log = false  # command line",
        "body-ms-max = 10000  # default",
        "dram-budget = \"256MiB\"  # default",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
}

#[test]
fn what_is_printed_is_a_file_that_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "ads=/data/\"a\\ds\"",
        "--record-tables=user,item",
        "--record-tables=word",
        "--tls-client-names=a,b",
        "--require-auth",
        "--record-sample=0.5",
    ];
    let mut all = vec!["--print-config"];
    all.extend(words);
    let (code, printed, told) = run(&all);
    assert_eq!(code, 0, "{told}");
    let file = folder.path().join("printed.toml");
    fs::write(&file, &printed).unwrap();
    let (code, again, told) = run(&["--print-config", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{told}");
    let values = |text: &str| {
        let lines = text.lines().map(|line| line.split("  # ").next().unwrap().to_owned());
        lines.collect::<Vec<_>>()
    };
    assert_eq!(values(&again), values(&printed));
}

#[test]
fn a_file_that_is_wrong_ends_with_2_and_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    fs::write(&file, "queue-ms-max = 20\nidle-ms = 5\n").unwrap();
    let (code, _, told) = run(&["--config", file.to_str().unwrap()]);
    assert_eq!(code, 2);
    assert!(told.contains("line: 2") && told.contains("remedy: write idle-ms-max"), "{told}");
    assert!(told.contains(file.to_str().unwrap()), "{told}");
}

#[test]
fn help_shows_every_limit_with_unit_and_default() {
    let (code, help, _) = run(&["--help"]);
    assert_eq!(code, 0);
    for line in ["--queue-ms-max <MS>", "--body-max <SIZE>", "[default: 16MiB]", "--idle-ms-max"] {
        assert!(help.contains(line), "{line}: {help}");
    }
    let (code, version, _) = run(&["--version"]);
    assert_eq!((code, version.as_str()), (0, "tierbed-server 0.1.0\n"));
}

#[test]
fn every_limit_of_the_server_is_an_option_but_one() {
    let limits = serde_json::to_value(tierbed_serve::Limits::default()).unwrap();
    let command = Options::command();
    for name in limits.as_object().unwrap().keys() {
        let option = name.replace("_bytes", "").replace('_', "-");
        let is_option = command.get_arguments().any(|arg| arg.get_long() == Some(&option));
        assert_eq!(is_option, name != "degraded_ms", "{name}");
    }
}
