//! Processes that are killed while they push, pull, promote and prune.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::path::Path;
use std::time::Duration;

use kit::{Does, NOW_S};
use tierbed_core::env::SplitMix64;
use tierbed_remote::{Location, Prune};
use tierbed_sim::kill::{run_and_kill, victim, Fate};

fn open(folder: &Path) -> Location {
    Location::open(folder.join("ads").to_str().unwrap()).unwrap()
}

/// What a victim does until it is killed: versions come, are promoted and pulled, and go.
fn work(folder: &Path, job: &str) {
    // What it leaves goes with the folder.
    tempfile::env::override_temp_dir(folder).unwrap();
    let mut seed = job.parse().unwrap();
    loop {
        let location = open(folder);
        location.push_whole(seed, "canary").unwrap();
        location.push_delta(seed + 1, seed, "canary").unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
        location.pull_into("stable", &folder.join("local")).unwrap();
        location.prune(Prune { keep_s: 0, now_s: NOW_S }, &mut |_, _| Ok(())).unwrap();
        seed += 2;
    }
}

/// Kills `rounds` victims over one folder, and looks at it after each.
fn kill_and_look(rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path()).push_whole(1, "stable").unwrap();
    let mut rng = SplitMix64::new(rounds);
    for round in 0..rounds {
        let delay = Duration::from_micros(5_000 + rng.below(150_000));
        let job = (2 + round * 1000).to_string();
        let fate = run_and_kill("versions_survive_kills_at_any_moment", folder.path(), &job, delay);
        assert_eq!(fate.unwrap(), Fate::Killed);
        let served = open(folder.path()).served("stable").unwrap();
        let is_of_one = matches!(served[..], [1]) || matches!(served[..], [a, b] if b == a + 1);
        assert!(is_of_one, "versions of two pushes: {served:?}");
        // Downloads go on where they were, and what has its name is whole.
        let local = folder.path().join("local");
        let pulled = open(folder.path()).pull_into("stable", &local).unwrap();
        let seeds: Vec<u64> = pulled.folders.iter().map(|at| kit::seed_of(at)).collect();
        assert_eq!(seeds, served);
    }
}

#[test]
fn versions_survive_kills_at_any_moment() {
    if let Some((folder, job)) = victim() {
        return work(&folder, &job);
    }
    kill_and_look(12);
}

/// The same, for as long as a campaign takes.
#[test]
#[ignore = "takes minutes; run by make test-long"]
fn versions_survive_hundreds_of_kills() {
    kill_and_look(500);
}
