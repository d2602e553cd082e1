#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use super::*;

fn refused(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn values_become_words_of_the_command_line() {
    let text = "snapshot = \"ads=/data/ads\"\n\
                queue-ms-max = 0x14\n\
                drain-delay = 2.5\n\
                access-log = true\n\
                tls-client-names = [\"a\", \"b\"]\n\
                record-tables = [\"user,item\", \"word\"]\n";
    let values = parse(text).unwrap();
    let of = |id: &str| values.iter().find(|value| value.id == id).unwrap().words.clone();
    assert_eq!(of("snapshot"), ["ads=/data/ads"]);
    assert_eq!(of("queue_ms_max"), ["20"]);
    assert_eq!(of("drain_delay"), ["2.5"]);
    assert_eq!(of("access_log"), ["true"]);
    assert_eq!(of("tls_client_names"), ["a,b"]);
    assert_eq!(of("record_tables"), ["user,item", "word"]);
}

#[test]
fn an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one() {
    let told = refused("# of the ads\naddress = \"127.0.0.1:0\"\n\nqueue-ms = 20\n");
    assert!(told.contains("line: 4") && told.contains("option: queue-ms"), "{told}");
    assert!(told.contains("remedy: write queue-ms-max"), "{told}");
    let told = refused("zebra = 1\n");
    assert!(told.contains("remedy: write one of the options of --help"), "{told}");
}

#[test]
fn words_that_only_a_command_line_has_are_no_keys() {
    for key in ["config", "print-config", "help", "version", "queue_ms_max"] {
        let told = refused(&format!("{key} = \"1\"\n"));
        assert!(told.contains("does not know"), "{key}: {told}");
    }
}

#[test]
fn a_value_that_does_not_fit_is_refused_with_its_line_and_what_would() {
    let told = refused("\nqueue-ms-max = 0\n");
    assert!(told.contains("line: 2") && told.contains("--queue-ms-max"), "{told}");
    assert!(told.contains("write whole milliseconds, 1 to 86400000"), "{told}");
    let told = refused("queue-ms-max = [1, 2]\n");
    assert!(told.contains("takes one value"), "{told}");
    let told = refused("limits = {queue-ms-max = 3}\n");
    assert!(told.contains("line: 1") && told.contains("found: table"), "{told}");
    let told = refused("queue-ms-max = 9999999999999999999999\n");
    assert!(told.contains("line: 1"), "{told}");
}

#[test]
fn a_file_of_several_commands_has_a_section_for_a_server() {
    let run = "queue-ms-max = 20\n[train]\nepochs = 2\n[store]\npath = \"run\"\n\
               [serve]\nthreads = 2\nidle-ms-max = 30\n";
    let values = parse(run).unwrap();
    let ids: Vec<&str> = values.iter().map(|value| value.id.as_str()).collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    assert!(ids.contains(&"queue_ms_max") && ids.contains(&"idle_ms_max"), "{ids:?}");
    let told = refused("[train]\nepochs = 2\n\n[serve]\nqueue-ms = 20\n");
    assert!(told.contains("line: 5") && told.contains("remedy: write queue-ms-max"), "{told}");
    let told = refused("[sevre]\nqueue-ms-max = 20\n");
    assert!(told.contains("line: 1") && told.contains("option: sevre"), "{told}");
    let told = refused("slow-ms = 1\n[serve]\nslow-ms = 2\n");
    assert!(told.contains("option: slow-ms") && told.contains("remedy: leave one out"), "{told}");
    assert_eq!(parse("[serve]\nslow-ms = 2\n").unwrap().len(), 1);
    let told = refused("threads = 2\n");
    assert!(told.contains("does not know"), "{told}");
}

#[test]
fn what_is_no_toml_is_refused_with_its_line() {
    let told = refused("address = \"127.0.0.1:0\"\nqueue-ms-max\n");
    assert!(told.contains("line: 2") && told.contains("no TOML"), "{told}");
}

#[test]
fn every_option_has_a_name_that_is_its_field() {
    for arg in command().get_arguments().filter(|arg| !arg.is_positional()) {
        assert_eq!(arg.get_long(), Some(name(arg).as_str()));
    }
}

#[test]
fn what_a_remedy_says_to_write_is_taken() {
    for (wrong, remedy, right) in [
        ("queue-ms = 20", "write queue-ms-max", "queue-ms-max = 20"),
        ("zebra = 1", "write one of the options of --help, without its dashes", "slow-ms = 1"),
        ("queue-ms-max", "write a line for each option: queue-ms-max = 20", "queue-ms-max = 20"),
        ("slow-ms = [1, 2]", "write one value, without brackets", "slow-ms = 1"),
        (
            "cache = 2026-01-31",
            "write a text, a number, true or false, or a list of texts",
            "cache = [\"int8:lru\", \"int4:lru\"]",
        ),
    ] {
        let told = refused(wrong);
        assert!(
            told.ends_with(&format!("remedy: {remedy})"))
                || told.contains(&format!("remedy: {remedy},")),
            "{told}"
        );
        assert_eq!(parse(right).unwrap().len(), 1, "{right}");
    }
}

#[test]
fn files_that_cannot_be_read_are_refused_until_one_is_named_that_can() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.toml");
    let told = values(&path).unwrap_err().to_string();
    assert!(told.contains("remedy: name a file that the server may read"), "{told}");
    for bytes in [vec![0xff, 0xfe], vec![b'#'; 1 + (1 << 20)]] {
        std::fs::write(&path, bytes).unwrap();
        let told = values(&path).unwrap_err().to_string();
        assert!(told.contains("remedy: name a file of options in TOML"), "{told}");
    }
    std::fs::write(&path, "slow-ms = 5\n").unwrap();
    assert_eq!(values(&path).unwrap().len(), 1);
}

#[test]
fn a_host_sets_options_without_command_line_and_environment() {
    let set = |name: &str, value: &str| Setting { name: name.into(), value: value.into() };
    let options = Options::of_settings(&[
        set("snapshot", "/data/ads"),
        set("dram-budget", "64MiB"),
        set("cache", "lru,int8:lru:2"),
        set("poll", "500ms"),
    ])
    .unwrap();
    assert_eq!(options.snapshot.as_deref(), Some("/data/ads"));
    assert_eq!(options.reading.dram_budget.0, 64 << 20);
    assert_eq!((options.reading.cache.as_str(), options.versions.poll), ("lru,int8:lru:2", 0.5));
    assert_eq!(options.limits.indices_max, tierbed_serve::Limits::default().indices_max);
    for (name, value, expected) in
        [("dram-budget", "much", "write a size"), ("dram", "1GiB", "write dram-budget")]
    {
        let told = Options::of_settings(&[set(name, value)]).unwrap_err().to_string();
        assert!(told.contains(expected), "{told}");
    }
}
