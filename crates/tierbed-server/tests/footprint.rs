//! Memory beyond the budget, and time to the first answer.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use kit::{write_snapshot, Running};
use rustix::fs::{fadvise, Advice};

/// Most memory of the process beyond its budget.
const BEYOND_MAX: u64 = 40 << 20;
/// Elements of a row.
const DIM: u32 = 64;
/// Rows of one lookup.
const ASKED_ROWS: u64 = 500;
/// Clients that ask at once.
const CLIENTS: u64 = 8;

/// No request is refused on a slow machine.
const PATIENT: [&str; 2] = ["--queue-ms-max", "600000"];

/// Asks for all rows, by several clients at once, summed: answers are short, the cache fills.
fn fill(server: &Running, row_count: u64) {
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                for begin in (0..row_count).step_by(ASKED_ROWS as usize) {
                    if begin / ASKED_ROWS % CLIENTS == client {
                        let rows = begin..(begin + ASKED_ROWS).min(row_count);
                        let status = server.sum(rows).0;
                        assert_eq!(status, 200);
                    }
                }
            });
        }
    });
}

/// Tells of the process's memory, and refuses too much beyond the budget.
fn check_memory(server: &Running, budget: u64, when: &str) {
    let [rss, anonymous, file] =
        ["VmRSS:", "RssAnon:", "RssFile:"].map(|what| server.memory_bytes(what));
    let kib = |bytes: u64| bytes >> 10;
    eprintln!(
        "{when}: {} KiB resident ({} anonymous, {} of files), budget {} KiB",
        kib(rss),
        kib(anonymous),
        kib(file),
        kib(budget)
    );
    assert!(rss <= budget + BEYOND_MAX, "{when}: {rss} bytes, budget {budget}");
}

#[test]
fn memory_beyond_the_budget_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("ads");
    let row_count = 100_000;
    write_snapshot(&snapshot, row_count, DIM);
    let budget = 16 << 20;
    let words = ["--dram-budget", "16MiB", "--grpc-address", "127.0.0.1:0"];
    let server = Running::start(&snapshot, &[&words[..], &PATIENT].concat());
    check_memory(&server, budget, "ready");
    fill(&server, row_count);
    check_memory(&server, budget, "asked for every row");
    let (_, metrics) = server.get("/metrics");
    assert!(metrics.contains("pages_read"), "rows were read: {metrics}");
}

/// Makes the kernel forget the pages of a folder's files.
fn forget(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let file = File::open(path).unwrap();
            file.sync_all().unwrap();
            fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        }
    }
}

/// The release build: `TIERBED_SERVER=build/server/tierbed-server`.
#[test]
#[ignore = "writes a gigabyte"]
fn a_cold_gigabyte_is_ready_within_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("ads");
    let row_count = (1 << 30) / (4 * u64::from(DIM));
    write_snapshot(&snapshot, row_count, DIM);
    let mut ready = Vec::new();
    for _ in 0..5 {
        forget(&snapshot);
        let words = ["--dram-budget", "128MiB"];
        let server = Running::start(&snapshot, &[&words[..], &PATIENT].concat());
        while server.get("/readyz").0 != 200 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ready.push(server.started.elapsed());
        check_memory(&server, 128 << 20, "ready");
        if ready.len() == 5 {
            let began = Instant::now();
            fill(&server, row_count / 4);
            eprintln!("a quarter of the rows asked for in {:?}", began.elapsed());
            check_memory(&server, 128 << 20, "asked for more rows than fit");
        }
    }
    ready.sort();
    eprintln!("from exec to the first 200 of /readyz: {ready:?}");
    assert!(ready[2] <= Duration::from_secs(1), "median {:?}", ready[2]);
}
