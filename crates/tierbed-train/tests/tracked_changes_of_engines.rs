//! Deltas of every engine, through random lives of a store, of noted rows and of compared ones:
//! with their base they make what a full publish makes.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::Run;
use tierbed_core::env::SplitMix64;
use tierbed_core::{Budget, OptimizerKind, RowStore, TableId};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::init_record;
use tierbed_snapshot::delta::apply_delta;
use tierbed_snapshot::{PageLayout, Snapshot, SnapshotOptions, SnapshotRows};
use tierbed_train::window::{DeltaBase, FindBy};
use tierbed_train::{restore_checkpoint, Answer, Order, PlanRequest, ShardedEngine};

/// What a store is opened with.
#[derive(Debug, Clone, Copy)]
struct Case {
    order: Order,
    shards: Option<u32>,
}

const CASES: [Case; 5] = [
    Case { order: Order::Window, shards: None },
    Case { order: Order::Forward, shards: None },
    Case { order: Order::Auto, shards: None },
    Case { order: Order::Window, shards: Some(2) },
    Case { order: Order::Forward, shards: Some(2) },
];

/// A store, and what it published.
struct Life {
    case: Case,
    run: Run,
    scratch: tempfile::TempDir,
    engine: Option<ShardedEngine>,
    /// Which plan is followed; another one has more batches.
    day: u64,
    /// The same at the last checkpoint, and at those kept.
    day_saved: u64,
    kept: Vec<(String, u64)>,
    has_moved: bool,
    bases: Vec<PathBuf>,
    step: u64,
    tracked: u64,
    compared: u64,
}

impl Life {
    fn begin(case: Case, seed: u64) -> Self {
        let optimizer = OptimizerKind::ALL[seed as usize % OptimizerKind::ALL.len()];
        // Of less, shards along a plan would have nothing to spare for notes.
        let run = Run { budget_bytes: 48 << 20, ..Run::pooled(optimizer) };
        let mut life = Self {
            case,
            run,
            scratch: tempfile::tempdir().unwrap(),
            engine: None,
            day: 0,
            day_saved: 0,
            kept: Vec::new(),
            has_moved: false,
            bases: Vec::new(),
            step: 0,
            tracked: 0,
            compared: 0,
        };
        life.open();
        life
    }

    fn store(&self) -> Arc<dyn Folder> {
        Arc::new(FsFolder::create(self.scratch.path().join("store")).unwrap())
    }

    fn path(&mut self, what: &str) -> PathBuf {
        self.step += 1;
        self.scratch.path().join(format!("{what}{}", self.step))
    }

    fn engine(&mut self) -> &mut ShardedEngine {
        self.engine.as_mut().unwrap()
    }

    fn open(&mut self) {
        self.engine = None;
        let config = self.run.config(self.case.order, self.case.shards);
        self.engine = Some(self.run.open(Some(self.store()), &config).unwrap());
        self.follow();
    }

    fn is_planned(&self) -> bool {
        self.case.order != Order::Window && !self.has_moved
    }

    fn follow(&mut self) {
        self.run.batches = 12 + self.day;
        if !self.is_planned() {
            return;
        }
        let Self { run, engine, day, .. } = self;
        let engine = engine.as_mut().unwrap();
        let features = run.plan(engine);
        let request = PlanRequest { source: format!("day {day}"), window_batches_max: 3 };
        let store = engine.writable().unwrap();
        if store.follow(&features, &request).unwrap() == Answer::PlanNeeded {
            store.start_plan(&features, &request).unwrap();
            for step in 0..run.batches {
                store.push_planned(&run.batch(step).bags(), true).unwrap();
            }
            store.finish_plan().unwrap();
            let answer = store.follow(&features, &request).unwrap();
            assert!(matches!(answer, Answer::Following { .. }), "{answer:?}");
        }
    }

    fn train(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step += 1;
            let Self { run, engine, step, .. } = self;
            let engine = engine.as_mut().unwrap();
            let at = engine.engine().position().map_or(*step, |(_, batch)| batch);
            run.step(engine, at).unwrap();
        }
    }

    fn checkpoint(&mut self) {
        self.run.checkpoint(self.engine.as_mut().unwrap(), 0).unwrap();
        self.day_saved = self.day;
    }

    fn full(&mut self, what: &str) -> PathBuf {
        let path = self.path(what);
        let engine = self.engine().engine_mut();
        engine.publish_placed(&path, PageLayout::default(), &[], &mut |_, _| true).unwrap();
        path
    }

    fn delta(&mut self, base: &Path, find_by: FindBy) -> PathBuf {
        let path = self.path("delta");
        let base = DeltaBase {
            folder: Arc::new(FsFolder::open(base).unwrap()),
            deltas: Vec::new(),
            find_by,
        };
        let engine = self.engine().engine_mut();
        engine.publish_delta(&path, base, &[], &mut |_, _| true).unwrap();
        path
    }

    fn count(&mut self, what: &str) -> u64 {
        self.engine().engine_mut().stats().unwrap()["changes"][what].as_u64().unwrap()
    }

    /// Publishes against `base` in both ways and in full; returns what base and delta make.
    fn check(&mut self, base: &Path) -> PathBuf {
        let tracked = self.count("deltas_tracked");
        let auto = self.delta(base, FindBy::Auto);
        let is_tracked = self.count("deltas_tracked") - tracked;
        self.tracked += is_tracked;
        self.compared += 1 - is_tracked;
        let compared = self.delta(base, FindBy::Compared);
        if is_tracked == 0 {
            assert!(files(&auto) == files(&compared), "{:?}: changes were missed", self.case);
        }
        let rows_of = |delta: &Path| opened(delta).manifest().row_count;
        assert!(rows_of(&compared) <= rows_of(&auto), "{:?}: every change is noted", self.case);
        let full = rows(&self.full("whole"));
        let [next, exact] = [&auto, &compared].map(|delta| {
            let next = self.path("next");
            let out: Arc<dyn Folder> = Arc::new(FsFolder::create(&next).unwrap());
            apply_delta(&opened(base), &opened(delta), &out, &Budget::new(8 << 20)).unwrap();
            next
        });
        assert!(full == rows(&next), "{:?}: rows differ", self.case);
        assert!(full == rows(&exact), "{:?}: rows that were compared differ", self.case);
        next
    }

    fn keep(&mut self) {
        let name = format!("k{}", self.kept.len());
        self.engine().single().unwrap().keep_checkpoint(&name, &[]).unwrap();
        self.day_saved = self.day;
        self.kept.push((name, self.day));
    }

    fn restore(&mut self, at: usize) {
        let (name, day) = self.kept[at].clone();
        self.engine = None;
        restore_checkpoint(&self.scratch.path().join("store"), &name).unwrap();
        (self.day, self.day_saved) = (day, day);
        self.open();
    }

    /// One thing that happens to a store.
    fn live(&mut self, rng: &mut SplitMix64) {
        let is_single = self.case.shards.is_none();
        match rng.below(12) {
            0 => self.checkpoint(),
            1 => {
                let base = self.full("base");
                self.bases.push(base);
            }
            2 | 3 if !self.bases.is_empty() => {
                let at = rng.below(self.bases.len() as u64) as usize;
                let next = self.check(&self.bases[at].clone());
                self.bases.push(next);
            }
            4 => {
                // Killed: what the last checkpoint has not is lost.
                self.day = self.day_saved;
                self.open();
            }
            5 if is_single && !self.has_moved => self.keep(),
            6 if is_single && !self.kept.is_empty() && !self.has_moved => {
                let at = rng.below(self.kept.len() as u64) as usize;
                self.restore(at);
            }
            7 if self.is_planned() => {
                self.checkpoint();
                self.day += 1;
                self.follow();
                self.day_saved = self.day;
            }
            _ => {
                let steps = 1 + rng.below(4);
                self.train(steps);
            }
        }
    }

    /// Leaves the plan for good.
    fn move_away(&mut self) {
        let Self { run, engine, .. } = self;
        run.batches = 1000;
        run.step(engine.as_mut().unwrap(), 999).unwrap();
        assert!(engine.as_ref().unwrap().engine().position().is_none());
        self.has_moved = true;
        self.checkpoint();
    }

    /// Comes to a plan again, in another session that insists on it.
    fn come_back(&mut self) {
        self.checkpoint();
        self.has_moved = false;
        self.case.order = Order::Forward;
        self.open();
        assert!(self.engine().engine().position().is_some());
    }
}

fn opened(path: &Path) -> Arc<Snapshot> {
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::open(path).unwrap());
    Arc::new(Snapshot::open_any(folder, &SnapshotOptions::default()).unwrap())
}

fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let folder = FsFolder::open(path).unwrap();
    let names = folder.list().unwrap().into_iter();
    names.map(|name| (name.clone(), folder.read(&name).unwrap().unwrap())).collect()
}

/// The bits of every row of a snapshot, those not stored among them.
fn rows(path: &Path) -> Vec<Vec<u32>> {
    let snapshot = opened(path);
    let mut all = Vec::new();
    for (id, table) in (0..).map(TableId).zip(snapshot.schema().tables()) {
        let first = all.len();
        let mut record = vec![0.0; table.record_words()];
        for row in 0..table.row_count {
            init_record(table, row, &mut record);
            all.push(record[..table.dim as usize].iter().map(|word| word.to_bits()).collect());
        }
        let mut stored = SnapshotRows::new(Arc::clone(&snapshot));
        stored
            .scan(id, &mut |row, record| {
                let words = record.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
                all[first + row.0 as usize] = words.take(table.dim as usize).collect();
                Ok(())
            })
            .unwrap();
    }
    all
}

#[test]
fn deltas_of_random_lives_make_what_a_full_publish_makes() {
    for case in CASES {
        let (mut tracked, mut compared) = (0, 0);
        for seed in 0..2 {
            let (mut life, mut rng) = (Life::begin(case, seed), SplitMix64::new(seed));
            life.train(3);
            let first = life.full("base");
            life.bases.push(first.clone());
            life.train(1);
            life.check(&first);
            for _ in 0..24 {
                life.live(&mut rng);
            }
            if case.order == Order::Auto {
                let base = life.full("base");
                life.move_away();
                let before = life.tracked;
                life.check(&base);
                assert_eq!(life.tracked, before + 1, "a move to the other engine keeps notes");
                life.open();
                life.check(&base);
                assert_eq!(life.tracked, before + 2, "and so does its checkpoint");
                life.come_back();
                life.check(&base);
                assert_eq!(life.tracked, before + 3, "and the way back to a plan");
                life.bases.push(base);
                for _ in 0..8 {
                    life.live(&mut rng);
                }
            }
            (tracked, compared) = (tracked + life.tracked, compared + life.compared);
        }
        println!("{case:?}: {tracked} tracked, {compared} compared");
        assert!(tracked > 3 && compared > 0, "{case:?}: {tracked} tracked, {compared} compared");
    }
}

#[test]
fn notes_survive_a_resume_another_plan_and_an_earlier_checkpoint() {
    for case in CASES {
        let mut life = Life::begin(case, 1);
        life.train(2);
        let base = life.full("base");
        life.train(2);
        life.checkpoint();
        life.train(3);
        life.open();
        life.check(&base);
        assert_eq!((life.tracked, life.compared), (1, 0), "{case:?}: resumed");
        if life.is_planned() {
            life.checkpoint();
            life.day += 1;
            life.follow();
            life.check(&base);
            assert_eq!((life.tracked, life.compared), (2, 0), "{case:?}: another plan");
            life.train(2);
        }
        if case.shards.is_none() {
            life.keep();
            life.train(1);
            let later = life.full("base");
            life.train(2);
            life.checkpoint();
            life.restore(0);
            let tracked = life.tracked;
            life.check(&base);
            assert_eq!(life.tracked, tracked + 1, "{case:?}: an earlier checkpoint");
            life.check(&later);
            assert_eq!((life.tracked, life.compared), (tracked + 1, 1), "{case:?}: later than it");
        }
    }
}
