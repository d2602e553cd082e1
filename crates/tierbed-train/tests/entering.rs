//! Rows that were trained without a plan come to one: the bits of a run in memory go on.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it copies files directly"
)]

#[path = "common/auto.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;

use common::Run;
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_io::{Folder, FsFolder, MemoryFolder};
use tierbed_train::window::rows::NewRows;
use tierbed_train::window::Backend;
use tierbed_train::{
    kept_checkpoints, restore_checkpoint, Access, Answer, OnMismatch, Order, OrderConfig,
    PlanRequest, ShardedEngine,
};

/// Steps without a plan: in the middle of an epoch.
const BEFORE: u64 = 17;

fn request() -> PlanRequest {
    PlanRequest { source: "epoch".to_owned(), window_batches_max: 3 }
}

/// Makes the plan of an epoch, and returns what came of following it.
fn plan(run: &Run, engine: &mut ShardedEngine) -> Answer {
    let layout = run.plan(engine);
    let answer = engine.writable().unwrap().follow(&layout, &request()).unwrap();
    if answer != Answer::PlanNeeded {
        return answer;
    }
    engine.writable().unwrap().start_plan(&layout, &request()).unwrap();
    for step in 0..run.batches {
        engine.writable().unwrap().push_planned(&run.batch(step).bags(), true).unwrap();
    }
    engine.writable().unwrap().finish_plan().unwrap();
    engine.writable().unwrap().follow(&layout, &request()).unwrap()
}

fn reason(answer: &Answer) -> &str {
    match answer {
        Answer::Refused { reason } => reason,
        other => panic!("{other:?} is no refusal"),
    }
}

fn is_at_its_begin(answer: &Answer) -> bool {
    matches!(answer, Answer::Following { epoch: 0, batch: 0, .. })
}

/// A store and the same run in memory, in step with each other.
struct Pair {
    run: Run,
    ours: ShardedEngine,
    theirs: ShardedEngine,
}

impl Pair {
    fn new(run: Run, ours: ShardedEngine) -> Self {
        let theirs = run.oracle();
        Self { run, ours, theirs }
    }

    fn steps(&mut self, steps: std::ops::Range<u64>) {
        for step in steps {
            let own = self.run.step(&mut self.ours, step).unwrap();
            assert!(own == self.run.step(&mut self.theirs, step).unwrap(), "step {step}");
        }
    }

    fn check_rows(&mut self) {
        let (own, other) = (self.run.records(&mut self.ours), self.run.records(&mut self.theirs));
        assert!(own.unwrap() == other.unwrap(), "rows");
    }

    fn checkpoint(&mut self, steps: u64) {
        self.run.checkpoint(&mut self.ours, steps).unwrap();
    }

    /// Opens the store of the pair again.
    fn reopen(self, folder: &Arc<dyn Folder>, config: &OrderConfig) -> Self {
        let Self { run, ours, theirs } = self;
        drop(ours);
        let ours = run.open(Some(Arc::clone(folder)), config).unwrap();
        Self { run, ours, theirs }
    }
}

fn names(folder: &Arc<dyn Folder>) -> Vec<String> {
    folder.list().unwrap()
}

fn is_of_window(name: &str) -> bool {
    name.ends_with(".rows") && name != "forward.rows" || name.ends_with(".pages")
}

#[test]
fn rows_come_to_a_plan_with_their_bits_steps_and_attachments() {
    for (at, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        // The first has room for an array over all rows, the next is answered part by part.
        let mut run = Run::pooled(optimizer);
        if at % 2 == 1 {
            run.budget_bytes = 4 << 20;
            run.tables[2].1 = 250_000;
        }
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let config = run.config(Order::Auto, None);
        let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
        let mut pair = Pair::new(run, ours);
        pair.steps(0..BEFORE);
        pair.checkpoint(BEFORE);
        if at == 0 {
            // Its own session, or a later one.
            pair = pair.reopen(&folder, &config);
        }
        let before = pair.ours.engine().last_checkpoint().unwrap().clone();
        let answer = plan(&pair.run, &mut pair.ours);
        assert!(is_at_its_begin(&answer), "{answer:?}");
        let after = pair.ours.engine().last_checkpoint().unwrap().clone();
        assert!(after.number > before.number && after.name == before.name);
        assert_eq!(pair.run.steps_done(&mut pair.ours).unwrap(), BEFORE);
        assert!(!names(&folder).iter().any(|name| is_of_window(name)), "{:?}", names(&folder));
        pair.check_rows();
        // The plan begins an epoch.
        let batches = pair.run.batches;
        pair.steps(0..batches + 5);
        pair.check_rows();
        pair.checkpoint(BEFORE + batches + 5);
        let mut pair = pair.reopen(&folder, &config);
        assert!(matches!(plan(&pair.run, &mut pair.ours), Answer::Following { batch: 5, .. }));
        pair.steps(5..batches);
        pair.check_rows();
        pair.ours.verify().unwrap();
    }
}

#[test]
fn rows_that_were_only_written_come_to_a_plan_that_is_insisted_on() {
    let run = Run::pooled(OptimizerKind::Adam);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let config = run.config(Order::Forward, None);
    let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
    let mut pair = Pair::new(run, ours);
    for engine in [&mut pair.ours, &mut pair.theirs] {
        for (table, first, rows) in [(0, 40, 900), (3, 0, 300)] {
            let dim = pair.run.tables[table as usize].0 as usize;
            let weights: Vec<f32> = (0..rows * dim).map(|at| at as f32 * 1e-3).collect();
            let table = tierbed_core::TableId(table);
            let own = engine.writable().unwrap().rows_of(table, Access::Write).unwrap();
            let rows = NewRows { weights: &weights, state: None, use_counts: None };
            own.engine.write_rows(own.table, first, rows).unwrap();
            own.engine.set_steps_done(own.table, 7).unwrap();
        }
    }
    let layout = pair.run.plan(&pair.ours);
    let refused = pair.ours.writable().unwrap().follow(&layout, &request()).unwrap_err();
    assert!(refused.to_string().contains("store.checkpoint"), "{refused}");
    let refused = pair.run.step(&mut pair.ours, 0).unwrap_err();
    assert!(refused.to_string().contains("insists"), "{refused}");
    pair.checkpoint(0);
    let mut pair = pair.reopen(&folder, &config);
    assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
    let batches = pair.run.batches;
    pair.steps(0..batches + 3);
    pair.check_rows();
}

#[test]
fn rows_that_changed_since_the_checkpoint_stay_until_there_is_one() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let ours = run.open(Some(folder), &run.config(Order::Auto, None)).unwrap();
    let mut pair = Pair::new(run, ours);
    pair.steps(0..3);
    assert!(reason(&plan(&pair.run, &mut pair.ours)).contains("store.checkpoint"));
    pair.checkpoint(3);
    pair.steps(3..4);
    assert!(reason(&plan(&pair.run, &mut pair.ours)).contains("store.checkpoint"));
    let layout = pair.run.plan(&pair.ours);
    let error = pair.ours.writable().unwrap().start_plan(&layout, &request()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    pair.steps(4..6);
    pair.checkpoint(6);
    assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
    pair.steps(0..5);
    pair.check_rows();
}

#[test]
fn rows_that_do_not_fit_a_plan_are_trained_without_it() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let config = run.config(Order::Auto, None);
    let mut pair = {
        let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
        Pair::new(run, ours)
    };
    // Twice, so that pages have both of their slots.
    for checkpoint in 1..=2 {
        pair.steps(0..pair.run.batches);
        pair.checkpoint(checkpoint * pair.run.batches);
    }
    let small = OrderConfig { dram_budget_bytes: 1 << 20, ..config.clone() };
    let disk_bytes = pair.ours.engine_mut().stats().unwrap()["disk_bytes"].as_u64().unwrap();
    let narrow = OrderConfig { disk_quota_bytes: Some(disk_bytes * 5 / 4), ..config.clone() };
    let mut done = 2 * pair.run.batches;
    for (config, what) in [(small, "budget"), (narrow, "quota")] {
        pair = pair.reopen(&folder, &config);
        let answer = plan(&pair.run, &mut pair.ours);
        assert!(reason(&answer).contains(what), "{answer:?}");
        assert!(!names(&folder).contains(&"forward.rows".to_owned()));
        pair.steps(done..done + 6);
        done += 6;
        pair.checkpoint(done);
        pair.check_rows();
    }
    let mut pair = pair.reopen(&folder, &config);
    assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
    pair.check_rows();
}

/// A store that left its plan: its rows are in a folder inside.
fn left(path: &Path, answer: OnMismatch) -> Pair {
    let run = Run::pooled(OptimizerKind::RowWiseAdagrad);
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(path).unwrap());
    let config = OrderConfig { on_mismatch: Some(answer), ..run.config(Order::Auto, None) };
    let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
    let mut pair = Pair::new(run, ours);
    assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
    pair.steps(0..4);
    pair.checkpoint(4);
    // Not the next batch.
    pair.steps(9..12);
    pair.checkpoint(7);
    let why = plan(&pair.run, &mut pair.ours);
    assert!(reason(&why).contains("not the planned one"), "{why:?}");
    // Nor in another session, unless a plan is insisted on.
    let mut pair = pair.reopen(&folder, &config);
    let why = plan(&pair.run, &mut pair.ours);
    assert!(reason(&why).contains("order=\"forward\""), "{why:?}");
    let config = pair.run.config(Order::Forward, None);
    pair.reopen(&folder, &config)
}

#[test]
fn rows_that_left_a_plan_come_back_to_one_that_is_insisted_on() {
    for answer in [OnMismatch::Fallback, OnMismatch::FallbackCold] {
        let scratch = tempfile::tempdir().unwrap();
        let mut pair = left(scratch.path(), answer);
        let copy = tempfile::tempdir().unwrap();
        copy_files(&scratch.path().join("window"), copy.path());
        assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
        assert_eq!(pair.run.steps_done(&mut pair.ours).unwrap(), 7);
        let inside: Arc<dyn Folder> =
            Arc::new(FsFolder::open(scratch.path().join("window")).unwrap());
        assert_eq!(names(&inside), ["CURRENT"]);
        pair.check_rows();
        pair.steps(0..6);
        pair.checkpoint(13);
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::open(scratch.path()).unwrap());
        let config = pair.run.config(Order::Auto, None);
        let mut pair = pair.reopen(&folder, &config);
        assert!(matches!(plan(&pair.run, &mut pair.ours), Answer::Following { batch: 6, .. }));
        pair.steps(6..20);
        pair.check_rows();
        // A kill before the rows inside are given up: they are in force still.
        let Pair { run, ours, .. } = pair;
        drop(ours);
        let config = run.config(Order::Forward, None);
        copy_files(copy.path(), &scratch.path().join("window"));
        let mut ours = run.open(Some(folder), &config).unwrap();
        assert_eq!(run.steps_done(&mut ours).unwrap(), 7);
        let mut pair = Pair::new(run, ours);
        for step in (0..4).chain(9..12) {
            pair.run.step(&mut pair.theirs, step).unwrap();
        }
        pair.check_rows();
        assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
        pair.steps(0..6);
        pair.check_rows();
    }
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn checkpoints_kept_before_a_plan_come_back_without_it() {
    let (run, scratch) = (Run::pooled(OptimizerKind::Adagrad), tempfile::tempdir().unwrap());
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let config = run.config(Order::Auto, None);
    let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
    let mut pair = Pair::new(run, ours);
    pair.steps(0..5);
    let bytes = 5u64.to_le_bytes();
    let attached = [tierbed_core::store::Attachment { name: "steps", bytes: &bytes }];
    pair.ours.single().unwrap().keep_checkpoint("five", &attached).unwrap();
    let five = pair.run.records(&mut pair.theirs).unwrap();
    assert!(is_at_its_begin(&plan(&pair.run, &mut pair.ours)));
    pair.steps(0..9);
    pair.checkpoint(14);
    pair.ours.single().unwrap().keep_checkpoint("fourteen", &[]).unwrap();
    let fourteen = pair.run.records(&mut pair.theirs).unwrap();
    let run = pair.run;
    drop(pair.ours);
    let kept = kept_checkpoints(scratch.path()).unwrap();
    assert_eq!(
        kept.iter().map(|kept| kept.name.as_str()).collect::<Vec<_>>(),
        ["five", "fourteen"]
    );
    for (name, rows) in [("five", &five), ("fourteen", &fourteen), ("five", &five)] {
        restore_checkpoint(scratch.path(), name).unwrap();
        let mut engine = run.open(Some(Arc::clone(&folder)), &config).unwrap();
        assert!(run.records(&mut engine).unwrap() == *rows, "{name}");
        engine.verify().unwrap();
        assert_eq!(names(&folder).contains(&"forward.rows".to_owned()), name == "fourteen");
    }
    let mut engine = run.open(Some(folder), &config).unwrap();
    assert!(is_at_its_begin(&plan(&run, &mut engine)));
    assert!(run.records(&mut engine).unwrap() == five);
}

#[test]
fn all_shards_come_to_a_plan_or_none_does() {
    for (shards, optimizer) in [(2, OptimizerKind::Adam), (3, OptimizerKind::RowWiseAdagrad)] {
        let run = Run { budget_bytes: 24 << 20, ..Run::pooled(optimizer) };
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let config = run.config(Order::Auto, Some(shards));
        let ours = run.open(Some(Arc::clone(&folder)), &config).unwrap();
        let mut pair = Pair::new(run, ours);
        pair.steps(0..BEFORE);
        assert!(reason(&plan(&pair.run, &mut pair.ours)).contains("store.checkpoint"));
        pair.checkpoint(BEFORE);
        // Too little memory for all shards, then for some of them, then for none.
        let mut refusal_count = 0;
        for dram_budget_bytes in (2_400_000..9_000_000).step_by(50_000) {
            pair = pair.reopen(&folder, &OrderConfig { dram_budget_bytes, ..config.clone() });
            let answer = plan(&pair.run, &mut pair.ours);
            if is_at_its_begin(&answer) {
                break;
            }
            assert!(reason(&answer).contains("dram_budget"), "{answer:?}");
            let done = BEFORE + refusal_count;
            pair.steps(done..done + 1);
            pair.checkpoint(done + 1);
            refusal_count += 1;
        }
        assert!(refusal_count > 1, "no shard was short of memory");
        pair.check_rows();
        let names = names(&folder);
        assert!(!names.iter().any(|name| name.ends_with(".pages")), "{names:?}");
        pair.steps(0..pair.run.batches + 4);
        pair.check_rows();
        pair.ours.verify().unwrap();
    }
}

#[test]
fn stores_whose_rows_stay_say_why() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let lsm = OrderConfig { backend: Some(Backend::Lsm), ..run.config(Order::Auto, None) };
    let mut engine = run.open(Some(Arc::clone(&folder)), &lsm).unwrap();
    run.step(&mut engine, 0).unwrap();
    run.checkpoint(&mut engine, 1).unwrap();
    assert!(reason(&plan(&run, &mut engine)).contains("backend"));
    drop(engine);
    let mut engine = run.open(Some(folder), &run.config(Order::Auto, None)).unwrap();
    assert!(reason(&plan(&run, &mut engine)).contains("backend"));
}
