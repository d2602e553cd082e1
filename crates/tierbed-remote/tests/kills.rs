//! Processes that are killed while they push, pull, promote, roll back and prune.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kit::{at_once, seed_of, Answer, Does, Faulty, Place, NOW_S};
use tempfile::TempDir;
use tierbed_core::env::SplitMix64;
use tierbed_core::Result;
#[cfg(feature = "s3")]
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{FolderObjects, Location, Objects, Prune, Seq, Want};
use tierbed_sim::kill::{run_and_kill, run_to_its_end, victim, Fate};

/// Names the bucket of victims, where it is one.
const BUCKET_NAME: &str = "bucket";

/// Opens the objects of victims over `folder`.
fn objects(folder: &Path) -> Arc<dyn Objects> {
    #[cfg(feature = "s3")]
    if let Some(named) = FsFolder::open(folder).unwrap().read(BUCKET_NAME).unwrap() {
        let named = String::from_utf8(named).unwrap();
        let (endpoint, address) = named.split_once(' ').unwrap();
        let settings = kit::settings(endpoint, kit::WRITER);
        return Arc::new(tierbed_remote::BucketObjects::open(address, &settings).unwrap());
    }
    Arc::new(FolderObjects::new(&folder.join("ads")))
}

fn open(folder: &Path) -> Location {
    Location::of(objects(folder), "ads")
}

/// Makes a folder for victims whose versions lie in a place of this kind.
fn folder_of(place: &Place) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    #[cfg(feature = "s3")]
    if place.name == "bucket" {
        let named = format!("{} {}", kit::server().unwrap().endpoint, place.address);
        let folder = FsFolder::open(folder.path()).unwrap();
        folder.write_durable(BUCKET_NAME, named.as_bytes()).unwrap();
    }
    assert_eq!(place.name == "bucket", folder.path().join(BUCKET_NAME).exists());
    folder
}

/// What victims do, and what must hold whenever they are killed.
struct Job {
    name: &'static str,
    prepare: fn(&Location),
    run: fn(&Location, &Path) -> Result<()>,
    check: fn(&Location, &Path),
}

/// Parts of a version of the kit, and the lengths of their marks.
const PARTS: u64 = 9;
const MARKS_HEADER_BYTES: u64 = 40;
const MARK_BYTES: u64 = 12;

fn prune_all(location: &Location) -> Result<()> {
    location.prune(Prune { keep_s: 0, now_s: NOW_S }, &mut |_, _| Ok(())).map(drop)
}

fn one_of(location: &Location, all: &[&[u64]]) {
    let served = location.served("stable").unwrap();
    assert!(all.contains(&served.as_slice()), "a lost or mixed version: {served:?}");
}

/// Pulls into the folder that the victim pulled into, where what it fetched counts.
fn pull_on(location: &Location, folder: &Path) {
    let local = folder.join("local");
    let mut left = 0;
    for name in ["000001", "000002"] {
        if local.join(name).exists() {
            seed_of(&local.join(name));
            continue;
        }
        let marks = std::fs::metadata(local.join(format!("{name}.incoming/parts.done")));
        let marked = marks.map_or(0, |marks| marks.len().saturating_sub(MARKS_HEADER_BYTES));
        left += PARTS - marked / MARK_BYTES;
    }
    let pulled = location.pull_into("stable", &local).unwrap();
    assert_eq!(pulled.folders.iter().map(|at| seed_of(at)).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(pulled.parts_fetched, left, "what is here is not fetched again");
    assert_eq!(location.pull_into("stable", &local).unwrap().parts_fetched, 0);
}

const JOBS: [Job; 6] = [
    Job {
        name: "push",
        prepare: |location| drop(location.push_whole(1, "stable").unwrap()),
        run: |location, _| location.push_whole(2, "stable").map(drop),
        check: |location, _| one_of(location, &[&[1], &[2]]),
    },
    Job {
        name: "delta",
        prepare: |location| drop(location.push_whole(1, "stable").unwrap()),
        run: |location, _| location.push_delta(2, 1, "stable").map(drop),
        check: |location, _| one_of(location, &[&[1], &[1, 2]]),
    },
    Job {
        name: "pull",
        prepare: |location| {
            location.push_whole(1, "stable").unwrap();
            location.push_delta(2, 1, "stable").unwrap();
        },
        run: |location, folder| location.pull_into("stable", &folder.join("local")).map(drop),
        check: pull_on,
    },
    Job {
        name: "prune",
        prepare: |location| {
            for seed in 1..4 {
                location.push_whole(seed, "stable").unwrap();
            }
            location.push_delta(4, 3, "stable").unwrap();
            location.push_whole(5, "canary").unwrap();
            location.push_whole(6, "canary").unwrap();
            location.rollback("stable", Seq(2), 0).unwrap();
            location.pin(Seq(4)).unwrap();
        },
        run: |location, _| prune_all(location),
        check: |location, folder| {
            one_of(location, &[&[2]]);
            assert_eq!(location.served("canary").unwrap(), [6]);
            let want = Want::Version(Seq(4));
            let to = tempfile::tempdir_in(folder).unwrap();
            let pulled = location.pull(&want, to.path(), &at_once(), &mut |_, _| Ok(())).unwrap();
            assert_eq!(pulled.folders.iter().map(|at| seed_of(at)).collect::<Vec<_>>(), [3, 4]);
        },
    },
    Job {
        name: "promote",
        prepare: |location| {
            location.push_whole(1, "stable").unwrap();
            location.push_whole(2, "canary").unwrap();
            location.push_delta(3, 2, "canary").unwrap();
        },
        run: |location, _| location.promote("canary", "stable", NOW_S).map(drop),
        check: |location, _| one_of(location, &[&[1], &[2, 3]]),
    },
    Job {
        name: "rollback",
        prepare: |location| {
            location.push_whole(1, "stable").unwrap();
            location.push_whole(2, "stable").unwrap();
        },
        run: |location, _| location.rollback("stable", Seq(1), NOW_S).map(drop),
        check: |location, _| one_of(location, &[&[1], &[2]]),
    },
];

/// Does a job over a store that kills it at a request.
fn do_until_killed(folder: &Path, job: &Job, at: u64, after: bool) {
    let killing = Faulty::new(objects(folder), move |call| match call.number == at {
        true => Answer::Kills { after },
        false => Answer::Fine,
    });
    (job.run)(&Location::of(Arc::new(killing), "ads"), folder).unwrap();
}

/// What a victim does until it is killed: versions come, are promoted and pulled, and go.
fn work(folder: &Path, mut seed: u64) {
    loop {
        let location = open(folder);
        location.push_whole(seed, "canary").unwrap();
        location.push_delta(seed + 1, seed, "canary").unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
        location.pull_into("stable", &folder.join("local")).unwrap();
        prune_all(&location).unwrap();
        seed += 2;
    }
}

/// Does what the parent asked for, in a victim.
fn be_victim(folder: &Path, said: &str) {
    // What it leaves goes with the folder.
    tempfile::env::override_temp_dir(folder).unwrap();
    match said.split(' ').collect::<Vec<_>>()[..] {
        ["work", seed] => work(folder, seed.parse().unwrap()),
        [name, at, after] => {
            let job = JOBS.iter().find(|job| job.name == name).unwrap();
            do_until_killed(folder, job, at.parse().unwrap(), after == "after");
        }
        _ => panic!("no such job: {said}"),
    }
}

/// Kills victims at every request of a job, and looks at the place after each; returns how many.
fn kill_at_every_request(test: &str, make: fn() -> Place, job: &Job) -> u64 {
    let mut killed = 0;
    for after in ["before", "after"] {
        for at in 0.. {
            let place = make();
            let folder = folder_of(&place);
            (job.prepare)(&open(folder.path()));
            let said = format!("{} {at} {after}", job.name);
            let fate = run_to_its_end(test, folder.path(), &said).unwrap();
            let location = open(folder.path());
            (job.check)(&location, folder.path());
            // Who comes next goes on.
            (job.run)(&location, folder.path()).unwrap();
            (job.check)(&location, folder.path());
            if fate == Fate::Finished {
                assert!(at > 2, "there was something to end");
                break;
            }
            killed += 1;
        }
    }
    killed
}

/// Kills `rounds` victims over one place at any moment, and looks at it after each.
fn kill_and_look(test: &str, make: fn() -> Place, rounds: u64) -> u64 {
    let place = make();
    let folder = folder_of(&place);
    open(folder.path()).push_whole(1, "stable").unwrap();
    let mut rng = SplitMix64::new(rounds);
    for round in 0..rounds {
        let delay = Duration::from_micros(5_000 + rng.below(150_000));
        let said = format!("work {}", 2 + round * 1000);
        let fate = run_and_kill(test, folder.path(), &said, delay);
        assert_eq!(fate.unwrap(), Fate::Killed);
        let served = open(folder.path()).served("stable").unwrap();
        let is_of_one = matches!(served[..], [1]) || matches!(served[..], [a, b] if b == a + 1);
        assert!(is_of_one, "versions of two pushes: {served:?}");
        // Downloads go on where they were, and what has its name is whole.
        let local = folder.path().join("local");
        let pulled = open(folder.path()).pull_into("stable", &local).unwrap();
        let seeds: Vec<u64> = pulled.folders.iter().map(|at| seed_of(at)).collect();
        assert_eq!(seeds, served);
    }
    rounds
}

#[test]
fn versions_survive_kills_at_any_moment() {
    const NAME: &str = "versions_survive_kills_at_any_moment";
    if let Some((folder, said)) = victim() {
        return be_victim(&folder, &said);
    }
    for make in kit::kinds() {
        kill_and_look(NAME, make, 8);
    }
}

/// The least number of kills of a campaign.
const KILLS_MIN: u64 = 500;

/// Each request of each job, then any moment, for as many kills as a campaign has.
#[test]
#[ignore = "takes minutes; run by make test-long"]
fn versions_survive_hundreds_of_kills() {
    const NAME: &str = "versions_survive_hundreds_of_kills";
    if let Some((folder, said)) = victim() {
        return be_victim(&folder, &said);
    }
    let kinds = kit::kinds();
    let mut total = 0;
    println!("| place | job | kills |\n|---|---|---|");
    for make in &kinds {
        let place = make().name;
        for job in &JOBS {
            let kills = kill_at_every_request(NAME, *make, job);
            println!("| {place} | {} | {kills} |", job.name);
            total += kills;
        }
    }
    let rounds = KILLS_MIN.saturating_sub(total).div_ceil(kinds.len() as u64).max(100);
    for make in &kinds {
        let kills = kill_and_look(NAME, *make, rounds);
        println!("| {} | any moment | {kills} |", make().name);
        total += kills;
    }
    println!("| all | all | {total} |");
    assert!(total >= KILLS_MIN, "{total} kills");
}
