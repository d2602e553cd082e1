//! A server that follows a channel: forward, back, to other snapshots, and when things fail.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tierbed_core::env::unix_ms;
use tierbed_remote::{Location, Push, Retry, Seq};

use super::deltas::{asked_rows, Stopping};
use super::*;
use crate::follow::{Follow, Following, Opener};

mod failing;
mod swaps;

const JSON: &str = "application/json";
const CHANNEL: &str = "stable";

/// Publishes versions whose rows all have the number of their version.
struct Trainer {
    folder: tempfile::TempDir,
    location: Location,
    /// The newest whole version, with the deltas upon it.
    newest: Option<Arc<Snapshot>>,
    count: u32,
    /// Whether servers see no version until told.
    holds: bool,
}

impl Trainer {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let location = Location::open(folder.path().join("models").to_str().unwrap()).unwrap();
        Self { folder, location, newest: None, count: 0, holds: false }
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("models")
    }

    /// Writes the next version; a delta where `base` says upon what.
    fn write(&mut self, base: Option<&Snapshot>) -> PathBuf {
        self.count += 1;
        let path = self.folder.path().join(format!("published-{}", self.count));
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(&path).unwrap());
        let schema = Schema::new(vec![table("user", 500, 4), table("item.v2", 1000, 7)]).unwrap();
        let mut writer = SnapshotWriter::create(folder, &schema, &Budget::new(1 << 20)).unwrap();
        if let Some(base) = base {
            writer.set_base(base).unwrap();
        }
        let number = self.count as f32;
        for row in 0..300 {
            writer.push(TableId(0), RowId(row), &[number; 4]).unwrap();
            writer.push(TableId(1), RowId(3 * row), &[number; 7]).unwrap();
        }
        let committed = json!({ "committed_at_ms": unix_ms() - 5_000 }).to_string();
        writer.attach("committed.json", committed.as_bytes()).unwrap();
        writer.finish().unwrap();
        path
    }

    fn push(&self, folder: &Path, base: Option<&str>) -> u32 {
        let identity = identity_of(folder);
        let push = Push { base, ..Push::new(folder, &identity, "canary", unix_ms() / 1_000) };
        self.location.push(&push, &mut |_, _| Ok(())).unwrap();
        if !self.holds {
            self.promote();
        }
        self.count
    }

    fn whole(&mut self) -> u32 {
        let folder = self.write(None);
        let opened = FsFolder::open(&folder).unwrap();
        self.newest = Some(Arc::new(Snapshot::open(Arc::new(opened), &small()).unwrap()));
        self.push(&folder, None)
    }

    /// A delta upon the newest version.
    fn delta(&mut self) -> u32 {
        let newest = self.newest.clone().unwrap();
        let before = newest.generation().identity;
        let folder = self.write(Some(&newest));
        newest.apply(Arc::new(FsFolder::open(&folder).unwrap())).unwrap();
        self.push(&folder, Some(&before))
    }

    fn promote(&self) {
        self.location.promote("canary", CHANNEL, unix_ms() / 1_000).unwrap();
    }

    fn roll_back(&self, version: u32) {
        let now_s = unix_ms() / 1_000;
        for channel in [CHANNEL, "canary"] {
            self.location.rollback(channel, Seq(u64::from(version)), now_s).unwrap();
        }
    }

    fn follow(&self) -> Follow {
        Follow {
            poll: Duration::from_millis(10),
            sync_bytes_per_s: Some(0),
            retry: Retry { try_count: 2, pause: Duration::ZERO },
            ..Follow::new(self.store().to_str().unwrap(), CHANNEL, self.folder.path().join("here"))
        }
    }

    fn begin(&self) -> Result<Following> {
        Following::begin(self.follow(), Opener::new(|_| Ok(small())))
    }

    fn serve(&self) -> Server {
        // A busy machine is no reason to refuse.
        let options = limited(|limits| limits.queue_ms_max = 60_000);
        Server::follow(&options, self.begin().unwrap(), None).unwrap()
    }

    fn here(&self) -> BTreeSet<u64> {
        let names = std::fs::read_dir(self.folder.path().join("here")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter_map(|name| Some(Seq::of_folder(&name)?.0)).collect()
    }

    /// Returns the bytes of the files that were pulled for a version.
    fn bytes_here(&self, version: u64) -> u64 {
        let folder = self.folder.path().join("here").join(Seq(version).folder_name());
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let pulled = entries.filter(|entry| {
            let name = entry.file_name().into_string().unwrap();
            name != tierbed_remote::PARTS_NAME && name != "LOCK"
        });
        pulled.map(|entry| entry.metadata().unwrap().len()).sum()
    }
}

fn identity_of(folder: &Path) -> String {
    let folder = FsFolder::open(folder).unwrap();
    tierbed_snapshot::manifest::Manifest::read(&folder).unwrap().identity().unwrap()
}

fn small() -> SnapshotOptions {
    let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
    SnapshotOptions { dram_budget_bytes: 4 << 20, engine, ..SnapshotOptions::default() }
}

/// Returns the number of the version that answers; all rows of an answer have it.
fn answering(server: &Server) -> u32 {
    let rows = asked_rows(server);
    assert!(rows.iter().all(|number| *number == rows[0]), "{rows:?}");
    rows[0] as u32
}

/// Waits until something holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{what} does not happen");
}

fn until_answers(server: &Server, version: u32) {
    until(&format!("version {version}"), || answering(server) == version);
}

/// Returns a metric's value; 0 where it is not told.
fn metric(server: &Server, name: &str) -> f64 {
    let text = get(server, "/metrics").text();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.map_or(0.0, |value| value.parse().unwrap())
}

fn health(server: &Server) -> Value {
    ask(server, "GET", "/health", JSON, b"").json()
}

/// Asks while `work` is done; returns how many answers there were. Each is of one version.
fn under_load(server: &Server, only_rises: bool, work: impl FnOnce()) -> u64 {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lookers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let (mut newest, mut count) = (0, 0);
                    while !stop.load(Ordering::Relaxed) {
                        let version = answering(server);
                        assert!(!only_rises || version >= newest, "{version} behind {newest}");
                        (newest, count) = (version, count + 1);
                    }
                    count
                })
            })
            .collect();
        let stopping = Stopping(&stop);
        work();
        drop(stopping);
        lookers.into_iter().map(|looker| looker.join().unwrap()).sum()
    })
}

#[test]
fn a_follower_sees_every_version_or_a_later_one() {
    let mut trainer = Trainer::new();
    trainer.whole();
    let server = trainer.serve();
    assert_eq!(answering(&server), 1);
    let asked = under_load(&server, true, || {
        for at in 0..10 {
            let version = if at % 5 == 4 { trainer.whole() } else { trainer.delta() };
            until("the version or a later one", || answering(&server) >= version);
        }
        // Two at once.
        trainer.delta();
        let version = trainer.delta();
        until_answers(&server, version);
    });
    assert!(asked > 20, "{asked}");
    // Answers are of a version a moment before it is told.
    until("the last version's health", || health(&server)["version"] == json!(13));
    let told = health(&server);
    assert_eq!((&told["version"], &told["status"]), (&json!(13), &json!("ok")));
    assert_eq!(told["snapshot"], json!("models"));
    let fresh_s = told["freshness_s"].as_f64().unwrap();
    assert!((5.0..60.0).contains(&fresh_s), "{fresh_s}");
    assert!(told["sync_lag_s"].as_f64().unwrap() < 10.0);
    assert!(metric(&server, "tierbed_freshness_seconds") >= fresh_s);
    assert_eq!(metric(&server, "tierbed_version"), 13.0);
    assert!(metric(&server, "tierbed_sync_bytes_total") > 4096.0);
    assert!(metric(&server, "tierbed_sync_lag_seconds") < 10.0);
    assert_eq!(metric(&server, "tierbed_swaps_total{result=\"ok\"}"), 2.0);
    assert_eq!(metric(&server, "tierbed_swap_duration_seconds_count"), 2.0);
    let error = server.apply(Arc::new(MemoryFolder::new())).unwrap_err();
    assert!(error.to_string().contains("remedy: push the delta to the channel"), "{error}");
    assert!(server.stop());
}

#[test]
fn a_rollback_serves_the_old_answer() {
    let mut trainer = Trainer::new();
    trainer.whole();
    for _ in 0..3 {
        trainer.delta();
    }
    let server = trainer.serve();
    under_load(&server, false, || {
        // Deltas go, the snapshot alone, all of them again, another branch, another snapshot, back.
        for version in [3, 2, 1, 4] {
            trainer.roll_back(version);
            until_answers(&server, version);
        }
        trainer.roll_back(2);
        trainer.newest = Some(followed(&trainer, 2));
        let branch = trainer.delta();
        until_answers(&server, branch);
        trainer.roll_back(4);
        until_answers(&server, 4);
        let other = trainer.whole();
        until_answers(&server, other);
        trainer.roll_back(3);
        until_answers(&server, 3);
    });
    assert_eq!(metric(&server, "tierbed_swaps_total{result=\"ok\"}"), 2.0);
    assert_eq!(health(&server)["version"], json!(3));
    drop(server);
    // What was served last starts, not what is newest.
    std::fs::rename(trainer.store(), trainer.folder.path().join("away")).unwrap();
    assert_eq!(answering(&trainer.serve()), 3);
}

/// Opens a version as its publisher had it.
fn followed(trainer: &Trainer, version: u32) -> Arc<Snapshot> {
    let folder = |at: u32| {
        let path = trainer.folder.path().join(format!("published-{at}"));
        Arc::new(FsFolder::open(path).unwrap()) as Arc<dyn Folder>
    };
    let snapshot = Snapshot::open(folder(1), &small()).unwrap();
    (2..=version).for_each(|at| drop(snapshot.apply(folder(at)).unwrap()));
    Arc::new(snapshot)
}

#[test]
fn versions_that_serve_no_more_leave_the_machine() {
    let mut trainer = Trainer::new();
    trainer.whole();
    trainer.delta();
    let server = trainer.serve();
    assert_eq!(trainer.here(), [1, 2].into());
    trainer.whole();
    until_answers(&server, 3);
    // One that was rolled back to needs no download.
    until("the note of version 3", || trainer.here() == [1, 2, 3].into());
    let pulled = metric(&server, "tierbed_sync_bytes_total");
    assert_eq!(pulled, trainer.bytes_here(3) as f64, "every byte that was fetched, once");
    trainer.roll_back(2);
    until_answers(&server, 2);
    assert_eq!(metric(&server, "tierbed_sync_bytes_total"), pulled);
    for _ in 0..3 {
        let version = trainer.whole();
        until_answers(&server, version);
    }
    until("two versions", || trainer.here() == [5, 6].into());
}
