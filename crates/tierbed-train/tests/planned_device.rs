//! Windows on a device: rows are where the engine says they are, whoever steps them.
//!
//! The device here is memory of the test. It adds a number to the rows of a batch and counts the
//! step; the host steps other batches. A map of rows knows what they must be.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use common::{memory_folder, smallest_config, Batch, Job};
use proptest::prelude::*;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result, Schema, TableId};
use tierbed_kernels::{init_record, FeatureLayout, Grads, Hyper};
use tierbed_train::planned::device::{DeviceWindows, HostWindow, WindowChange, WindowTable};
use tierbed_train::planned::{EpochPlan, PlannedConfig, PlannedEngine};

const ADDED: f32 = 0.25;

#[derive(Debug, Default)]
struct Held {
    words: Vec<f32>,
    tables: Vec<WindowTable>,
    stepped: u64,
    opened: usize,
    uploads: usize,
    advances: usize,
    fails: bool,
}

impl Held {
    fn start(tables: &[WindowTable], entry: u32) -> (usize, usize) {
        let is_its = |table: &&WindowTable| {
            (table.first_entry..table.first_entry + table.entry_count).contains(&entry)
        };
        let table = tables.iter().find(is_its).unwrap();
        let offset = (entry - table.first_entry) as usize * table.record_words;
        (table.first_word + offset, table.record_words)
    }

    fn give_back(&mut self, words: &mut [f32]) -> Result<u64> {
        if std::mem::take(&mut self.fails) {
            return Err(Error::invalid("the device is gone"));
        }
        words.copy_from_slice(&self.words);
        Ok(std::mem::take(&mut self.stepped))
    }
}

#[derive(Debug, Default)]
struct TestDevice(Mutex<Held>);

impl TestDevice {
    /// Steps each row of a batch once.
    fn step(&self, plan: &FeatureLayout, batch: &Batch, entries: &[u32]) {
        let mut held = self.0.lock().unwrap();
        let mut rows = BTreeSet::new();
        for (at, feature) in plan.features().iter().enumerate() {
            let table = held.tables[feature.table.0 as usize];
            rows.extend(entries[plan.range(&batch.bags(), at)].iter().map(|entry| {
                (table.first_word + *entry as usize * table.record_words, table.record_words)
            }));
        }
        held.stepped += rows.len() as u64;
        for (start, words) in rows {
            held.words[start] += ADDED;
            let count = &mut held.words[start + words - 1];
            *count = f32::from_bits(count.to_bits() + 1);
        }
    }
}

impl DeviceWindows for TestDevice {
    fn open(&self, _windows: [&[f32]; 2]) -> Result<()> {
        self.0.lock().unwrap().opened += 1;
        Ok(())
    }

    fn upload(&self, window: HostWindow<'_>) -> Result<()> {
        let mut held = self.0.lock().unwrap();
        held.uploads += 1;
        held.words = window.words.to_vec();
        held.tables = window.tables.to_vec();
        Ok(())
    }

    fn download(&self, words: &mut [f32]) -> Result<u64> {
        self.0.lock().unwrap().give_back(words)
    }

    fn advance(&self, change: WindowChange<'_>) -> Result<u64> {
        let WindowChange { ended, begun, carried } = change;
        let mut held = self.0.lock().unwrap();
        held.advances += 1;
        let stepped = held.give_back(ended)?;
        let mut words = begun.words.to_vec();
        for row in carried {
            let (from, len) = Held::start(&held.tables, row.from);
            let (to, to_len) = Held::start(begun.tables, row.to);
            assert_eq!(len, to_len, "a row became longer");
            words[to..to + len].copy_from_slice(&ended[from..from + len]);
        }
        held.words = words;
        held.tables = begun.tables.to_vec();
        Ok(stepped)
    }

    fn close(&self) {
        self.0.lock().unwrap().opened -= 1;
    }
}

/// What the rows must be.
struct Model {
    schema: Schema,
    rows: BTreeMap<(u32, u64), Vec<f32>>,
}

impl Model {
    fn step(&mut self, plan: &FeatureLayout, batch: &Batch, added: f32) -> u64 {
        let mut rows = BTreeSet::new();
        for (at, feature) in plan.features().iter().enumerate() {
            let ids = &batch.indices[plan.range(&batch.bags(), at)];
            rows.extend(ids.iter().map(|&id| (feature.table.0, id as u64)));
        }
        for (table, row) in &rows {
            let shape = self.schema.table(TableId(*table)).unwrap();
            let record = self.rows.entry((*table, *row)).or_insert_with(|| {
                let mut record = vec![0.0; shape.record_words()];
                init_record(shape, *row, &mut record);
                record
            });
            record[0] += added;
            let count = record.last_mut().unwrap();
            *count = f32::from_bits(count.to_bits() + 1);
        }
        rows.len() as u64
    }

    /// Compares all rows that were ever stepped.
    fn check(&self, engine: &mut PlannedEngine) {
        let mut found = BTreeMap::new();
        let mut visit = |table: TableId, row: tierbed_core::RowId, record: &[f32]| {
            let before = found.insert((table.0, row.0), record.to_vec());
            assert!(before.is_none(), "a row is there twice");
            Ok(())
        };
        engine.scan_all(&mut visit).unwrap();
        for (row, record) in &self.rows {
            assert_eq!(Some(record), found.get(row), "row {row:?}");
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Act {
    /// Looks up and steps on the device.
    Device,
    /// Steps on the host, by a gradient of zeros.
    Host,
    /// Only looks up, there or here, and passes the batch.
    Pass(bool),
    /// Makes a checkpoint before the batch.
    Checkpoint,
    /// Makes a checkpoint, and opens the store again.
    Reopen,
    /// Compares all rows.
    Scan,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        6 => Just(Act::Device),
        2 => Just(Act::Host),
        1 => any::<bool>().prop_map(Act::Pass),
        1 => Just(Act::Checkpoint),
        1 => Just(Act::Reopen),
        1 => Just(Act::Scan),
    ];
    prop::collection::vec(act, 40..120)
}

/// A store whose windows are on a device, and what its rows must be.
struct Run {
    job: Job,
    plan: EpochPlan,
    config: PlannedConfig,
    folder: Arc<dyn tierbed_io::Folder>,
    layout: FeatureLayout,
    device: Arc<TestDevice>,
    model: Model,
    stepped: u64,
}

impl Run {
    fn new(seed: u64, window: u32) -> (Self, PlannedEngine) {
        let mut job = Job::pooled(OptimizerKind::Sgd, seed);
        job.batches = 17;
        let (plan, device) = (job.plan(window), Arc::new(TestDevice::default()));
        let mut config = smallest_config(&job, &plan);
        config.device = Some(Arc::clone(&device) as Arc<dyn DeviceWindows>);
        let (folder, layout) = (memory_folder(), job.features());
        let model = Model { schema: job.schema(), rows: BTreeMap::new() };
        let mut engine = job.open(Arc::clone(&folder), &plan, &config).unwrap();
        // A step by zeros changes no weight then.
        for at in 0..job.tables.len() {
            let hyper = Hyper { weight_decay: 0.0, ..job.hyper(at) };
            engine.set_hyper(TableId(at as u32), hyper).unwrap();
        }
        (Self { job, plan, config, folder, layout, device, model, stepped: 0 }, engine)
    }

    fn position(&self, engine: &PlannedEngine) -> u64 {
        let position = engine.position();
        position.epoch * self.job.batches + position.batch
    }

    fn step_on_device(&mut self, engine: &mut PlannedEngine) {
        let batch = self.job.batch(self.position(engine));
        let mut entries = vec![u32::MAX; batch.indices.len()];
        let bags = batch.bags();
        let token = engine.lookup_on_device(&self.layout, &bags, &mut entries).unwrap();
        let hypers = engine.step_on_device(&self.layout, &bags, token).unwrap();
        assert_eq!(hypers.len(), self.layout.features().len());
        self.device.step(&self.layout, &batch, &entries);
        self.stepped += self.model.step(&self.layout, &batch, ADDED);
    }

    fn act(&mut self, mut engine: PlannedEngine, act: Act) -> PlannedEngine {
        let batch = self.job.batch(self.position(&engine));
        let bags = batch.bags();
        match act {
            Act::Device => self.step_on_device(&mut engine),
            Act::Host => {
                let grads = vec![0.0; self.layout.output_len(&bags)];
                let grads = Grads { output: &grads, weights: None };
                engine.update(&self.layout, &bags, grads, None).unwrap();
                self.stepped += self.model.step(&self.layout, &batch, 0.0);
            }
            Act::Pass(true) => {
                let mut entries = vec![0; batch.indices.len()];
                engine.lookup_on_device(&self.layout, &bags, &mut entries).unwrap();
                engine.pass(&self.layout, &bags).unwrap();
            }
            Act::Pass(false) => {
                let mut out = vec![f32::NAN; self.layout.output_len(&bags)];
                engine.lookup(&self.layout, &bags, &mut out).unwrap();
                assert!(out.iter().all(|value| value.is_finite()));
                engine.pass(&self.layout, &bags).unwrap();
            }
            Act::Checkpoint => {
                engine.checkpoint("now", &[]).unwrap();
            }
            Act::Reopen => {
                engine.checkpoint("now", &[]).unwrap();
                drop(engine);
                assert_eq!(self.device.0.lock().unwrap().opened, 0, "the device was not closed");
                self.stepped = 0;
                let folder = Arc::clone(&self.folder);
                engine = self.job.open(folder, &self.plan, &self.config).unwrap();
            }
            Act::Scan => self.model.check(&mut engine),
        }
        engine
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn rows_are_those_of_the_map(acts in acts(), seed in 0u64..8, window in 1u32..6) {
        let (mut run, mut engine) = Run::new(seed, window);
        for act in acts {
            engine = run.act(engine, act);
        }
        run.model.check(&mut engine);
        prop_assert_eq!(engine.stats().row_update_count, run.stepped);
    }
}

#[test]
fn a_window_goes_up_once_and_on_by_itself() {
    let (mut run, mut engine) = Run::new(3, 4);
    for _ in 0..2 * run.job.batches {
        run.step_on_device(&mut engine);
    }
    let held = run.device.0.lock().unwrap();
    assert_eq!(held.uploads, 1, "rows of later windows come by changes of window");
    assert_eq!(held.advances as u64, engine.stats().window_count);
}

#[test]
fn rows_that_do_not_come_back_are_in_no_checkpoint() {
    let (mut run, mut engine) = Run::new(3, 4);
    run.step_on_device(&mut engine);
    run.device.0.lock().unwrap().fails = true;
    let error = engine.checkpoint("lost", &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(engine.last_checkpoint().is_none());
    // The device is back, with its rows.
    engine.checkpoint("kept", &[]).unwrap();
    run.model.check(&mut engine);
}

#[test]
fn a_change_of_window_that_fails_poisons_the_engine() {
    let (mut run, mut engine) = Run::new(3, 1);
    run.step_on_device(&mut engine);
    run.device.0.lock().unwrap().fails = true;
    let batch = run.job.batch(1);
    let mut entries = vec![0; batch.indices.len()];
    let layout = &run.layout;
    engine.lookup_on_device(layout, &batch.bags(), &mut entries).unwrap_err();
    let error = engine.checkpoint("lost", &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
}
