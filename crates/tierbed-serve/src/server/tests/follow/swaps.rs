//! Other snapshots, taken over while clients ask.

use super::*;

/// Bytes of this process in memory.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

/// Tells whether this process runs `test` alone; else lets another do that, and checks that it
/// passes: other tests of a program take memory, too.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "TIERBED_TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|found| found == test) {
        return true;
    }
    let (_, module) = module_path!().split_once("::").unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([&format!("{module}::{test}"), "--exact"])
        .env(ALONE, test)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
    false
}

#[test]
fn thirty_swaps_take_no_more_memory_and_no_answer() {
    if !is_alone("thirty_swaps_take_no_more_memory_and_no_answer") {
        return;
    }
    let mut trainer = Trainer::new();
    trainer.whole();
    let server = trainer.serve();
    let (mut used, mut resident) = (Vec::new(), Vec::new());
    under_load(&server, true, || {
        for _ in 0..30 {
            let version = trainer.whole();
            until_answers(&server, version);
            until("all of the budget", || {
                metric(&server, "tierbed_dram_used_bytes") == f64::from(4 << 20)
            });
            used.push(metric(&server, "tierbed_dram_used_bytes"));
            resident.push(resident_bytes());
        }
    });
    assert_eq!(metric(&server, "tierbed_swaps_total{result=\"ok\"}"), 30.0);
    assert_eq!(metric(&server, "tierbed_sync_failures_total{reason=\"closed\"}"), 0.0);
    let early = resident[5..10].iter().max().unwrap();
    let late = resident[25..].iter().min().unwrap();
    assert!(*late < early + (8 << 20), "{resident:?}");
    assert!(get(&server, "/metrics").text().contains(&format!(
        "identity=\"{}\"",
        trainer.newest.clone().unwrap().identity().unwrap()
    )));
    assert!(server.stop());
}

#[test]
fn a_snapshot_that_does_not_fit_beside_is_refused_and_the_old_one_answers() {
    let mut trainer = Trainer::new();
    trainer.whole();
    // Enough for one, and some rows.
    let opener = Opener::new(|folder| {
        let none = SnapshotOptions { dram_budget_bytes: 0, ..small() };
        let folder = FsFolder::open(folder.path().unwrap())?;
        let error = Snapshot::open(Arc::new(folder), &none).unwrap_err();
        let dram_budget_bytes = error.minimum_bytes().unwrap() + (16 << 10);
        Ok(SnapshotOptions { dram_budget_bytes, ..small() })
    });
    let server =
        Server::follow(&options(), Following::begin(trainer.follow(), opener).unwrap(), None)
            .unwrap();
    trainer.whole();
    let failed = "tierbed_swaps_total{result=\"failed\"}";
    until("a swap that fails", || metric(&server, failed) >= 1.0);
    assert_eq!(answering(&server), 1);
    let told = health(&server).to_string();
    assert!(told.contains("open the snapshot with a larger dram_budget"), "{told}");
    assert!(server.stop());
}

#[test]
fn a_snapshot_that_somebody_holds_delays_the_next_swap() {
    let mut trainer = Trainer::new();
    trainer.whole();
    let following = trainer.begin().unwrap();
    let held = Arc::clone(following.snapshot());
    let server = Server::follow(&options(), following, None).unwrap();
    let version = trainer.whole();
    until_answers(&server, version);
    let last = trainer.whole();
    let closed = "tierbed_sync_failures_total{reason=\"closed\"}";
    until("a refusal", || metric(&server, closed) >= 1.0);
    assert_eq!(answering(&server), version);
    let told = health(&server).to_string();
    assert!(told.contains("let go of it, or restart the server"), "{told}");
    drop(held);
    until_answers(&server, last);
    assert!(server.stop());
}
