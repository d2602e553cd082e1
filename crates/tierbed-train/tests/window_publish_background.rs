//! A publish beside training holds the rows of the step at which it began, to the bit, whatever is
//! trained, checkpointed or fails meanwhile; and training does not notice.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::sync::Arc;

use common::{all_records, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_io::{Folder, FsFolder, MemoryFolder};
use tierbed_sim::{FaultPlan, SimFolder};
use tierbed_snapshot::PageLayout;
use tierbed_train::window::{
    Backend, DeltaBase, FeatureLayout, FindBy, Finished, Published, WindowConfig, WindowEngine,
};

type Shared = Arc<dyn Folder>;

const MODEL: [Attachment<'static>; 1] = [Attachment { name: "model", bytes: b"dense" }];

fn folder() -> Shared {
    Arc::new(MemoryFolder::new())
}

fn files(folder: &Shared) -> Vec<(String, Vec<u8>)> {
    let names = folder.list().unwrap().into_iter();
    names.map(|name| (name.clone(), folder.read(&name).unwrap().unwrap())).collect()
}

fn config(backend: Backend) -> WindowConfig {
    tierbed_compare::register_stores();
    // Less than the rows need, where a backend takes that.
    let budget = if backend == Backend::File { 1 << 20 } else { 16 << 20 };
    WindowConfig { backend, io_engine: "inline".into(), ..WindowConfig::new(budget) }
}

/// A store in training.
struct Trainer {
    job: Job,
    engine: WindowEngine,
    plan: FeatureLayout,
    step: u64,
}

impl Trainer {
    fn open(store: &Shared, config: &WindowConfig, job: &Job) -> Self {
        let mut engine = WindowEngine::open_in(Some(store.clone()), config).unwrap();
        let plan = job.set_up(&mut engine).unwrap();
        Self { job: job.clone(), engine, plan, step: 0 }
    }

    fn train(&mut self, steps: u64) {
        for _ in 0..steps {
            self.job.step(&mut self.engine, &self.plan, self.step).unwrap();
            self.step += 1;
        }
    }

    /// Publishes while training stands still.
    fn publish(&mut self, base: Option<&Shared>) -> Shared {
        let (out, progress) = (folder(), &mut |_, _| true);
        match base {
            None => self.engine.publish(out.clone(), PageLayout::default(), &MODEL, progress),
            Some(base) => self.engine.publish_delta(out.clone(), since(base), &MODEL, progress),
        }
        .unwrap();
        out
    }

    fn begin(&mut self, out: &Shared, base: Option<&Shared>) {
        let published = match base {
            None => Published::Whole(PageLayout::default()),
            Some(base) => Published::Delta(since(base)),
        };
        self.engine.begin_publish(out.clone(), published, &MODEL).unwrap();
    }

    /// Copies and trains by turns, until all rows are copied.
    fn copy_and_train(&mut self, row_count: usize) -> Result<Finished> {
        loop {
            let rows = self.engine.copy_published(row_count, &mut |_, _| true)?;
            if let Some(rows) = rows {
                // Training goes on while the snapshot is written.
                self.train(1);
                let finished = rows.finish(&mut |_, _| true);
                self.engine.end_publish(finished.as_ref().ok());
                return finished;
            }
            self.train(1);
        }
    }
}

/// Deltas are made of the rows that were noted.
fn since(base: &Shared) -> DeltaBase {
    DeltaBase { folder: base.clone(), deltas: Vec::new(), find_by: FindBy::Tracked }
}

fn check_a_life(store: &Shared, config: &WindowConfig, job: &Job) {
    let case = format!("{:?}, {:?}", config.backend, job.optimizer);
    let mut trainer = Trainer::open(store, config, job);
    // The same steps in memory, where training stands still and all is written first.
    let mut twin = Trainer::open(&folder(), &common::memory_config(), job);
    let mut still = |base: Option<&Shared>, step: u64| {
        twin.train(step - twin.step);
        twin.engine.checkpoint("c", &[]).unwrap();
        twin.publish(base)
    };
    trainer.train(4);
    let whole = still(None, trainer.step);
    let out = folder();
    trainer.begin(&out, None);
    trainer.copy_and_train(97).unwrap();
    assert!(files(&out) == files(&whole), "{case}: a whole version mixes steps");

    // What changed from its beginning on is known as changes since it; some of it is in memory.
    let base = out;
    for (is_beside, steps) in [(true, 0), (false, 2), (true, 1)] {
        trainer.train(steps);
        let done = still(Some(&base), trainer.step);
        let out = match is_beside {
            false => trainer.publish(Some(&base)),
            true => {
                let out = folder();
                trainer.begin(&out, Some(&base));
                trainer.copy_and_train(67).unwrap();
                out
            }
        };
        assert!(files(&out) == files(&done), "{case}: a delta mixes steps");
    }
    assert_eq!(trainer.engine.stats().changes.deltas_tracked, 3, "{case}");

    let budget = trainer.engine.budget().report();
    assert!(budget.peak_bytes <= budget.limit_bytes, "{case}");
    let mut alone = Trainer::open(&folder(), &common::memory_config(), job);
    alone.train(trainer.step);
    assert!(
        all_records(&mut trainer.engine) == all_records(&mut alone.engine),
        "{case}: training noticed"
    );
}

#[test]
fn a_publish_beside_training_is_that_of_the_step_at_which_it_began() {
    let backends = [
        Backend::File,
        Backend::Memory,
        Backend::Lsm,
        Backend::Cold,
        Backend::HashDb,
        Backend::Mmap,
    ];
    for (at, backend) in (0..).zip(backends) {
        let scratch = tempfile::tempdir().unwrap();
        let store: Shared = match backend {
            Backend::Memory => folder(),
            _ => Arc::new(FsFolder::create(scratch.path()).unwrap()),
        };
        let optimizer = OptimizerKind::ALL[at as usize % OptimizerKind::ALL.len()];
        check_a_life(&store, &config(backend), &Job::pooled(optimizer, at));
    }
}

#[test]
fn a_checkpoint_meanwhile_knows_changes_since_the_version_before() {
    // Room for another publish at the same time.
    let config = WindowConfig { dram_budget_bytes: 4 << 20, ..config(Backend::File) };
    let (store, job) = (folder(), Job::pooled(OptimizerKind::Adagrad, 2));
    let mut trainer = Trainer::open(&store, &config, &job);
    trainer.train(3);
    let base = trainer.publish(None);
    trainer.train(2);
    // What is only in memory is copied at once.
    trainer.engine.checkpoint("b", &[]).unwrap();
    trainer.train(1);
    trainer.begin(&folder(), Some(&base));
    trainer.train(2);
    assert!(trainer.engine.copy_published(5, &mut |_, _| true).unwrap().is_none());
    trainer.engine.checkpoint("c", &[]).unwrap();
    let still = trainer.publish(Some(&base));
    drop(trainer);

    let mut reopened = Trainer::open(&store, &config, &job);
    assert_eq!(reopened.engine.stats().changes.base_count, 1, "the other has no name");
    let error = reopened.engine.copy_published(5, &mut |_, _| true).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(files(&reopened.publish(Some(&base))) == files(&still), "changes were lost");
    let out = folder();
    reopened.begin(&out, Some(&base));
    reopened.copy_and_train(1000).unwrap();
    assert!(files(&out) == files(&still), "begun again");
}

#[test]
fn a_full_disk_ends_the_publish_and_not_the_training() {
    let job = Job::pooled(OptimizerKind::Adam, 7);
    let mut trainer = Trainer::open(&folder(), &config(Backend::Memory), &job);
    trainer.train(3);
    let base = trainer.publish(None);
    trainer.train(1);
    let mut refused = 0;
    for kib in [8, 16, 64, 128, 256] {
        let plan = FaultPlan { enospc_after_bytes: Some(kib << 10), ..FaultPlan::default() };
        let out: Shared = Arc::new(SimFolder::new(plan));
        let whole = Published::Whole(PageLayout::default());
        let begun = trainer.engine.begin_publish(out, whole, &MODEL);
        if let Err(error) = begun.and_then(|()| trainer.copy_and_train(500)) {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            refused += 1;
        }
    }
    assert!(refused > 2, "only {refused} were refused");
    let still = trainer.publish(Some(&base));
    let out = folder();
    trainer.begin(&out, Some(&base));
    trainer.copy_and_train(50).unwrap();
    assert!(files(&out) == files(&still), "changes since the last good version were lost");
}

#[test]
fn one_at_a_time_and_stopped_when_told_to() {
    let job = Job::pooled(OptimizerKind::Sgd, 1);
    let mut trainer = Trainer::open(&folder(), &config(Backend::Memory), &job);
    trainer.train(2);
    trainer.begin(&folder(), None);
    let whole = || Published::Whole(PageLayout::default());
    let error = trainer.engine.begin_publish(folder(), whole(), &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let stopped = trainer.engine.copy_published(10, &mut |_, _| false).err().unwrap();
    assert_eq!(stopped.kind(), ErrorKind::Closed);
    // Neither knows a base any more than before.
    assert_eq!(trainer.engine.stats().changes.base_count, 0);
    let error = trainer.engine.begin_publish(folder(), Published::Delta(since(&folder())), &[]);
    assert!(error.is_err(), "an empty folder is no base");
    trainer.begin(&folder(), None);
    trainer.copy_and_train(1000).unwrap();
    assert_eq!(trainer.engine.stats().changes.base_count, 1);
}

#[test]
fn a_delta_whose_changes_are_not_known_needs_training_to_stand_still() {
    let job = Job::pooled(OptimizerKind::Sgd, 4);
    let mut other = Trainer::open(&folder(), &config(Backend::Memory), &job);
    other.train(1);
    let base = other.publish(None);
    let mut trainer = Trainer::open(&folder(), &config(Backend::Memory), &job);
    trainer.train(2);
    let given = |find_by| DeltaBase { find_by, ..since(&base) };
    for (find_by, kind) in
        [(FindBy::Auto, ErrorKind::Invalid), (FindBy::Compared, ErrorKind::Unsupported)]
    {
        let begun = trainer.engine.begin_publish(folder(), Published::Delta(given(find_by)), &[]);
        assert_eq!(begun.unwrap_err().kind(), kind, "{find_by:?}");
    }
    trainer.train(1);
    let whole = given(FindBy::Compared);
    trainer.engine.publish_delta(folder(), whole, &MODEL, &mut |_, _| true).unwrap();
    trainer.begin(&folder(), None);
}
