//! Whatever the disk does, the rows that a reopened engine knows to have changed are all that did.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/changes.rs"]
mod changes;
#[path = "common/window.rs"]
mod common;

use std::cell::{Cell, OnceCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use changes::is_tracked;
use common::Job;
use tierbed_core::store::Attachment;
use tierbed_core::{OptimizerKind, Result};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_sim::job::{check_power_loss, check_repeated_power_loss, SimJob};
use tierbed_sim::SimFolder;
use tierbed_snapshot::PageLayout;
use tierbed_train::window::{FeatureLayout, Pooling, Published, WindowConfig, WindowEngine};

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2, 3, 4])
}

/// Steps between checkpoints, and between publishes: the first is before the first checkpoint.
const STRIDE: u64 = 3;
const STEPS_PER_PUBLISH: u64 = 4;
const FIRST_PUBLISH: u64 = 1;

/// A job of an engine that publishes.
struct Case {
    job: Job,
    steps: u64,
    /// Snapshots by the step they were published after, from a run on a healthy disk.
    bases: OnceCell<BTreeMap<u64, Arc<dyn Folder>>>,
    tracked: Cell<u64>,
    compared: Cell<u64>,
}

impl Case {
    fn new(seed: u64, steps: u64) -> Self {
        let job = Job {
            seed,
            tables: vec![(9, 400), (64, 60)],
            features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
            batch_size: 4,
            ..Job::pooled(OptimizerKind::ALL[seed as usize % 5], seed)
        };
        let (tracked, compared) = (Cell::default(), Cell::default());
        Self { job, steps, bases: OnceCell::new(), tracked, compared }
    }

    fn bases(&self) -> &BTreeMap<u64, Arc<dyn Folder>> {
        self.bases.get_or_init(|| {
            let (mut engine, plan) = self.open(&SimFolder::default()).unwrap();
            let mut bases = BTreeMap::new();
            for step in 0..self.steps {
                self.job.step(&mut engine, &plan, step).unwrap();
                if step % STEPS_PER_PUBLISH == FIRST_PUBLISH {
                    bases.insert(step, changes::full(&mut engine).0);
                }
            }
            bases
        })
    }
}

/// As training goes on: rows in memory are copied, and not written to the store.
fn publish_beside(engine: &mut WindowEngine, out: Arc<dyn Folder>) -> Result<()> {
    engine.begin_publish(out, Published::Whole(PageLayout::default()), &[])?;
    loop {
        if let Some(rows) = engine.copy_published(100, &mut |_, _| true)? {
            let finished = rows.finish(&mut |_, _| true)?;
            engine.end_publish(Some(&finished));
            return Ok(());
        }
    }
}

impl SimJob for Case {
    type Store = (WindowEngine, FeatureLayout);

    fn open(&self, folder: &SimFolder) -> Result<Self::Store> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let config = WindowConfig { io_engine: "inline".into(), ..WindowConfig::new(1 << 20) };
        let mut engine = WindowEngine::open_in(Some(folder), &config)?;
        let plan = self.job.set_up(&mut engine)?;
        Ok((engine, plan))
    }

    fn position(&self, (engine, _): &mut Self::Store) -> Result<u64> {
        let bytes = engine.attachment("position")?;
        Ok(bytes.map_or(0, |bytes| String::from_utf8(bytes).unwrap().parse().unwrap()))
    }

    fn step(&self, (engine, plan): &mut Self::Store, step: u64) -> Result<()> {
        self.job.step(engine, plan, step)?;
        if step % STEPS_PER_PUBLISH == FIRST_PUBLISH {
            let out = Arc::new(MemoryFolder::new());
            if (step / STEPS_PER_PUBLISH).is_multiple_of(2) {
                engine.publish(out, PageLayout::default(), &[], &mut |_, _| true)?;
            } else {
                publish_beside(engine, out)?;
            }
        }
        Ok(())
    }

    fn commit(&self, (engine, _): &mut Self::Store, position: u64) -> Result<()> {
        let text = position.to_string();
        engine.checkpoint("s", &[Attachment { name: "position", bytes: text.as_bytes() }])?;
        Ok(())
    }

    fn verify(&self, (engine, _): &mut Self::Store) -> Result<()> {
        engine.verify().map(|_| ())
    }

    fn is_right(&self, (engine, _): &mut Self::Store, position: u64) -> Result<bool> {
        let mut is_right = true;
        for (after, base) in self.bases() {
            let is_tracked = is_tracked(engine, base);
            // A base is known when a checkpoint came behind it.
            is_right &= is_tracked == (*after < position);
            let count = if is_tracked { &self.tracked } else { &self.compared };
            count.set(count.get() + 1);
        }
        Ok(is_right)
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + STRIDE
    }
}

#[test]
fn power_loss_at_any_io_loses_no_change() {
    for seed in seeds() {
        let case = Case::new(seed, 12);
        let io_count = check_power_loss(&case, seed, 3);
        assert!(io_count > 20, "{io_count}");
        assert!(case.tracked.get() > 20 && case.compared.get() > 20, "both ways were taken");
    }
}

#[test]
fn repeated_power_loss_and_resume_loses_no_change() {
    for seed in seeds() {
        check_repeated_power_loss(&Case::new(seed, 24), seed, 8, 60);
    }
}
