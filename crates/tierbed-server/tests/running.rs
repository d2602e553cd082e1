//! The program as a service: answers, signals, the service manager, exit codes.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::fs::{self, FileTimes, OpenOptions};
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use kit::{command, element, run, write_snapshot, Running};
use rustix::process::Signal;
use tierbed_snapshot::manifest::MANIFEST_NAME;

fn small() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_snapshot(&folder.path().join("ads"), 1000, 4);
    folder
}

#[test]
fn lookups_are_answered_with_the_rows_of_the_snapshot() {
    let folder = small();
    let server = Running::start(&folder.path().join("ads"), &["--grpc-address", "127.0.0.1:0"]);
    assert!(server.line.starts_with("serving lookups on http://127.0.0.1:"), "{}", server.line);
    assert!(server.line.contains(" and grpc://127.0.0.1:"), "{}", server.line);
    assert_eq!(server.get("/readyz").0, 200);
    let (status, body) = server.lookup(&[7, 999]);
    assert_eq!(status, 200, "{body}");
    let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
    for (bag, row) in [7, 999].into_iter().enumerate() {
        for at in 0..4 {
            let found = answer["features"]["item"][bag][at as usize].as_f64().unwrap();
            assert_eq!(found as f32, element(row, at), "row {row}, element {at}");
        }
    }
    server.signal(Signal::INT);
    let (status, told) = server.wait();
    assert_eq!(status.code(), Some(0));
    assert!(told.ends_with("stopped\n"), "{told}");
}

#[test]
fn the_name_before_the_folder_is_the_models() {
    let folder = small();
    let path = format!("ads={}", folder.path().join("ads").display());
    let server = Running::of(&mut command(&[&path, "--address", "127.0.0.1:0"]));
    assert_eq!(server.get("/v2/models/ads.rows").0, 200);
    assert_eq!(server.get("/v2/models/tierbed.rows").0, 404);
    let (code, _, told) = run(&[&path, "--model-name", "feed"]);
    assert_eq!(code, 2);
    assert!(told.contains("remedy: leave out one of NAME= and --model-name"), "{told}");
}

#[test]
fn sigterm_drains_until_a_second_one_ends_it() {
    let folder = small();
    let server = Running::start(&folder.path().join("ads"), &["--drain-delay", "600"]);
    server.signal(Signal::TERM);
    let began = Instant::now();
    while server.get("/readyz").0 != 503 {
        assert!(began.elapsed() < Duration::from_secs(20), "still ready");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.get("/livez").0, 200);
    assert_eq!(server.lookup(&[1]).0, 200, "all is answered while it drains");
    server.signal(Signal::TERM);
    let (status, told) = server.wait();
    assert_eq!(status.code(), Some(0), "{told}");
    assert!(began.elapsed() < Duration::from_secs(60));
}

/// Writes `text` of equal length over a file, as if nothing had happened to it.
fn replace_unseen(path: &std::path::Path, text: &str) {
    let before = fs::metadata(path).unwrap();
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.set_times(FileTimes::new().set_modified(before.modified().unwrap())).unwrap();
    assert_eq!(fs::metadata(path).unwrap().len(), before.len());
}

#[test]
fn sighup_reads_tokens_again_even_where_nothing_tells_that_they_changed() {
    let folder = small();
    let tokens = folder.path().join("tokens");
    // SHA-256 of `one`, and of `two`.
    let one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
    let two = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";
    fs::write(&tokens, format!("ranker {one} infer\n")).unwrap();
    let server =
        Running::start(&folder.path().join("ads"), &["--tokens", tokens.to_str().unwrap()]);
    let asks = |token: &str| {
        let lines = format!("Authorization: Bearer {token}\r\nContent-Type: application/json\r\n");
        let body = r#"{"features":{"item":{"values":[1],"offsets":[0,1]}}}"#;
        server.ask("POST /v1/lookup", &lines, body).0
    };
    assert_eq!((asks("one"), asks("two")), (200, 401));
    replace_unseen(&tokens, &format!("ranker {two} infer\n"));
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(asks("one"), 200, "nothing tells of the change");
    server.signal(Signal::HUP);
    let began = Instant::now();
    while asks("two") != 200 {
        assert!(began.elapsed() < Duration::from_secs(20), "the old tokens");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(asks("one"), 401);
}

#[test]
fn the_service_manager_hears_that_it_is_ready_alive_and_stopping() {
    let folder = small();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let snapshot = folder.path().join("ads");
    let words = [snapshot.to_str().unwrap(), "--address", "127.0.0.1:0", "--drain-delay", "0"];
    let mut command = command(&words);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "400000");
    let server = Running::of(&mut command);
    let heard = || {
        let mut bytes = [0; 64];
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    assert_eq!(heard(), "READY=1");
    assert_eq!(server.get("/readyz").0, 200, "it is what it said");
    assert_eq!((heard(), heard()), ("WATCHDOG=1".to_owned(), "WATCHDOG=1".to_owned()));
    server.signal(Signal::TERM);
    while heard() != "STOPPING=1" {}
    assert_eq!(server.wait().0.code(), Some(0));
}

#[test]
fn a_manager_that_cannot_be_reached_is_told_with_a_remedy() {
    let folder = small();
    let snapshot = folder.path().join("ads");
    let mut command = command(&[snapshot.to_str().unwrap(), "--address", "127.0.0.1:0"]);
    command.env("NOTIFY_SOCKET", folder.path().join("nobody"));
    let (code, _, told) = kit::ended(&mut command);
    assert_eq!(code, 2);
    assert!(told.contains("remedy: start it by the manager, or without NOTIFY_SOCKET"), "{told}");
    let socket = folder.path().join("somebody");
    let _listening = UnixDatagram::bind(&socket).unwrap();
    command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", "soon");
    let (code, _, told) = kit::ended(&mut command);
    assert_eq!(code, 2);
    let remedy = "remedy: set WatchdogSec= of the unit, and leave the variable to systemd";
    assert!(told.contains(remedy), "{told}");
    command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC");
    assert_eq!(Running::of(&mut command).get("/readyz").0, 200);
}

#[test]
fn what_cannot_be_served_is_told_with_its_exit_code() {
    let folder = small();
    let (code, _, told) = run(&[]);
    assert!(code == 2 && told.contains("remedy: give the folder that publish wrote"), "{told}");
    let (code, _, told) = run(&[folder.path().to_str().unwrap()]);
    assert!(code == 2 && told.contains("not a snapshot"), "{told}");
    let snapshot = folder.path().join("ads");
    let path = snapshot.to_str().unwrap();
    let (code, _, told) = run(&[path, "--address", "192.0.2.1:80"]);
    assert!(code == 2 && told.contains("remedy: choose a free port"), "{told}");
    let (code, _, told) = run(&[path, "--dram-budget", "4KiB"]);
    assert!(code == 2 && told.contains("minimum_bytes: "), "{told}");
    let manifest = snapshot.join(MANIFEST_NAME);
    let bytes = fs::read(&manifest).unwrap();
    fs::write(&manifest, &bytes[..bytes.len() / 2]).unwrap();
    let (code, _, told) = run(&[path]);
    assert_eq!(code, 1, "damage is no wrong call: {told}");
}

#[test]
fn a_plan_of_resident_rows_answers_as_python_wrote_it() {
    let folder = small();
    let plan = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/plan.safetensors");
    let words = ["--resident", plan, "--misses", "surrogate"];
    let server = Running::start(&folder.path().join("ads"), &words);
    // Two rows of the head, in int8, and two that have two bytes of a product code.
    for row in [0, 5, 1, 999] {
        let (status, body) = server.lookup(&[row]);
        assert_eq!(status, 200, "{body}");
        let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
        let found = answer["features"]["item"][0][3].as_f64().unwrap();
        assert!((found - f64::from(element(row, 3))).abs() < 4.0, "row {row}: {found}");
    }
    let (_, metrics) = server.get("/metrics");
    let of = |kind: &str| {
        let line = metrics.lines().find(|line| line.contains(kind) && !line.starts_with('#'));
        let line = line.unwrap_or_else(|| panic!("no {kind}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert_eq!((of("rows_resident"), of("rows_surrogate")), (2.0, 2.0));
}

#[test]
fn a_plan_that_does_not_fit_is_refused_with_what_to_do() {
    let folder = small();
    let snapshot = folder.path().join("ads");
    let plan = folder.path().join("plan");
    let good = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/plan.safetensors"));
    let good = good.unwrap();
    let refused = |snapshot: &std::path::Path, bytes: &[u8]| {
        fs::write(&plan, bytes).unwrap();
        let words = [snapshot.to_str().unwrap(), "--resident", plan.to_str().unwrap()];
        let (code, _, told) = run(&words);
        (code, told)
    };
    let (code, told) = refused(&snapshot, b"no plan at all");
    assert!(code == 2 && told.contains("remedy: name a file that TierPlan.save wrote"), "{told}");
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let (code, told) = refused(&snapshot, &damaged);
    let remedy = "remedy: write the plan again, by tb.plan_tiers and save";
    assert!(code == 1 && told.contains(remedy), "{told}");
    // Another snapshot: its table has another name.
    let other = folder.path().join("other");
    kit::write_table(&other, "word", 1000, 4);
    let (code, told) = refused(&other, &good);
    assert!(code == 2 && told.contains("remedy: plan the tiers of this snapshot"), "{told}");
}
