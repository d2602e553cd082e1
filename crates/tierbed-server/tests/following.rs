//! The program follows a channel, whatever ends it.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kit::{command, run, Running};
use rustix::process::Signal;
use tierbed_core::env::{unix_ms, SplitMix64};
use tierbed_core::{Budget, RowId, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{Location, Push, Seq};
use tierbed_snapshot::{Snapshot, SnapshotOptions, SnapshotWriter};

const ROWS: u64 = 400;

/// Publishes versions whose rows all have the number of their version.
struct Trainer {
    folder: tempfile::TempDir,
    location: Location,
    newest: Option<Snapshot>,
    count: u64,
}

impl Trainer {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let location = Location::open(folder.path().join("ads").to_str().unwrap()).unwrap();
        Self { folder, location, newest: None, count: 0 }
    }

    /// Publishes the next version: a delta upon the newest one, where there is one and `is_delta`.
    fn publish(&mut self, is_delta: bool) -> u64 {
        self.count += 1;
        let path = self.folder.path().join(format!("published-{}", self.count));
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(path.clone()).unwrap());
        let schema = Schema::new(vec![TableSchema::plain("item", ROWS, 16)]).unwrap();
        let budget = Budget::new(4 << 20);
        let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget).unwrap();
        let base = self.newest.as_ref();
        let base = base.filter(|base| is_delta && base.generation().delta_count < 8);
        let before = base.map(|base| base.generation().identity);
        if let Some(base) = base {
            writer.set_base(base).unwrap();
        }
        for row in 0..ROWS {
            writer.push(TableId(0), RowId(row), &[self.count as f32; 16]).unwrap();
        }
        writer.finish().unwrap();
        let identity = match base {
            Some(base) => base.apply(folder).unwrap().identity,
            None => {
                let options = SnapshotOptions { dram_budget_bytes: 4 << 20, ..Default::default() };
                let newest = self.newest.insert(Snapshot::open(folder, &options).unwrap());
                newest.identity().unwrap()
            }
        };
        let push = Push::new(&path, &identity, "stable", unix_ms() / 1_000);
        let push = Push { base: before.as_deref(), part_bytes: 4096, ..push };
        self.location.push(&push, &mut |_, _| Ok(())).unwrap();
        self.count
    }

    fn place(&self) -> String {
        format!("{}@stable", self.folder.path().join("ads").display())
    }

    fn here(&self) -> PathBuf {
        self.folder.path().join("here")
    }

    fn serve(&self, bandwidth: &str) -> Running {
        let (place, here) = (format!("ads={}", self.place()), self.here());
        Running::of(&mut command(&[
            &place,
            "--local",
            here.to_str().unwrap(),
            "--address=127.0.0.1:0",
            "--poll=10ms",
            "--dram-budget=4MiB",
            &format!("--sync-bandwidth={bandwidth}"),
        ]))
    }
}

/// Returns the version that answers: all rows have its number.
fn answering(server: &Running) -> u64 {
    let (status, body) = server.lookup(&[0, 7, 201, 399]);
    assert_eq!(status, 200, "{body}");
    let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
    let bags = answer["features"]["item"].as_array().unwrap().iter();
    let numbers: Vec<f64> =
        bags.flat_map(|bag| bag.as_array().unwrap()).map(|x| x.as_f64().unwrap()).collect();
    assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
    numbers[0] as u64
}

fn until_answers(server: &Running, version: u64) {
    let began = Instant::now();
    while answering(server) != version {
        assert!(began.elapsed() < Duration::from_secs(60), "version {version} is not served");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_channel_is_followed_to_where_it_goes() {
    let mut trainer = Trainer::new();
    trainer.publish(false);
    let server = trainer.serve("1GiB");
    assert_eq!((server.get("/v2/models/ads.rows").0, answering(&server)), (200, 1));
    for is_delta in [true, false, true] {
        let version = trainer.publish(is_delta);
        until_answers(&server, version);
    }
    trainer.location.rollback("stable", Seq(2), unix_ms() / 1_000).unwrap();
    until_answers(&server, 2);
    server.signal(Signal::INT);
    let (status, told) = server.wait();
    assert_eq!(status.code(), Some(0), "{told}");
    assert!(told.contains("\"event\":\"version_served\"") && told.ends_with("stopped\n"), "{told}");
}

#[test]
fn what_is_missing_is_said() {
    let trainer = Trainer::new();
    let (code, _, told) = run(&[&trainer.place()]);
    assert_eq!(code, 2);
    assert!(told.contains("remedy: add --local FOLDER"), "{told}");
    let here = trainer.here();
    let here = here.to_str().unwrap();
    let (code, _, told) = run(&[&trainer.place(), "--local", here, "--sync-bandwidth=1GiB"]);
    assert_eq!(code, 2);
    assert!(told.contains("remedy: publish to it, or follow one that"), "{told}");
    let (code, _, told) = run(&[&trainer.place(), "--local", here, "--record", here]);
    assert_eq!(code, 2);
    assert!(told.contains("remedy: record at a server of one version"), "{told}");
}

/// Kills the program `count` times at any moment of pulling, applying and swapping.
fn kill(count: u64, seed: u64) {
    let (mut trainer, mut rng) = (Trainer::new(), SplitMix64::new(seed));
    let mut newest = trainer.publish(false);
    for round in 0..count {
        let server = trainer.serve("1GiB");
        // The store is here: whatever was going on when it was killed, the newest one answers.
        assert_eq!(answering(&server), newest, "round {round} of seed {seed}");
        for _ in 0..=rng.below(2) {
            newest = trainer.publish(rng.below(3) > 0);
        }
        std::thread::sleep(Duration::from_micros(rng.below(60_000)));
        server.signal(Signal::KILL);
        drop(server);
        if round % 4 == 3 {
            let away = trainer.folder.path().join("away");
            let store = trainer.folder.path().join("ads");
            std::fs::rename(&store, &away).unwrap();
            let alone = answering(&trainer.serve("1GiB"));
            assert!((1..=newest).contains(&alone), "round {round} of seed {seed}");
            std::fs::rename(&away, &store).unwrap();
        }
    }
}

#[test]
fn a_killed_server_serves_again() {
    kill(20, 1);
}

#[test]
#[ignore = "takes minutes: for `make test-long`"]
fn a_server_killed_many_times_serves_again() {
    (2..12).for_each(|seed| kill(60, seed));
}
