//! An open vocabulary in a small budget is the same model, bit for bit, as dense tables in memory
//! whose ids somebody translated before: through restarts, look-ahead, admission and eviction.
//! After power loss at any operation, ids and rows are those of one checkpoint.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::bits;
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{Bags, ErrorKind, InitSpec, OptimizerKind, Result, TableId, TableSchema};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_sim::{FaultPlan, SimFolder};
use tierbed_snapshot::PageLayout;
use tierbed_snapshot::PublishedIds;
use tierbed_snapshot::{Snapshot, SnapshotOptions};
use tierbed_train::window::update::Grads;
use tierbed_train::window::vocabulary_parts::IndexPart;
use tierbed_train::window::{
    Backend, Eviction, FeatureLayout, Hyper, IdEntry, Policy, Pooling, WindowConfig, WindowEngine,
};
use tierbed_train::window::{Translate, SHARED_ROW};
use tierbed_train::TableRows;

const OPEN: [&str; 2] = ["item", "user"];
const DENSE_ROWS: u64 = 50;

fn table(name: &str, row_count: u64, optimizer: OptimizerKind) -> TableSchema {
    TableSchema {
        name: name.into(),
        row_count,
        dim: if name == "user" { 36 } else { 9 },
        optimizer,
        state_init: 0.1,
        init: InitSpec::Uniform { low: -0.5, high: 0.5 },
        seed: name.len() as u64,
    }
}

fn policy(seed: u64) -> Policy {
    let eviction = match seed % 3 {
        0 => Eviction::Never,
        1 => Eviction::Age { ttl: 4 },
        _ => Eviction::Count { threshold: 1.5, decay_rate: 0.5 },
    };
    Policy { admit_after: 1 + (seed / 3 % 3) as u32, eviction }
}

/// A dense table between two open ones: table numbers shift.
struct Setup {
    plan: FeatureLayout,
    tables: Vec<TableId>,
}

fn set_up(engine: &mut WindowEngine, seed: u64, is_open: bool) -> Result<Setup> {
    let optimizer = OptimizerKind::ALL[seed as usize % 5];
    let mut tables = Vec::new();
    for name in ["item", "dense", "user"] {
        let id = match (name, is_open) {
            ("dense", _) => engine.add_table(table(name, DENSE_ROWS, optimizer))?,
            (_, true) => engine.add_open_table(table(name, 7, optimizer), policy(seed))?,
            (_, false) => engine.add_table(table(name, 20_000, optimizer))?,
        };
        engine.set_hyper(id, Hyper { lr: 0.05, ..Hyper::default() })?;
        tables.push(id);
    }
    let features = [
        (tables[0], Pooling::Sum),
        (tables[1], Pooling::Sum),
        (tables[2], Pooling::Mean),
        (tables[0], Pooling::Mean),
    ];
    Ok(Setup { plan: FeatureLayout::new(engine.schema(), &features)?, tables })
}

/// Ids of a batch whose vocabulary drifts, with the extremes among them.
fn batch(seed: u64, step: u64, size: usize) -> (Vec<i64>, Vec<i64>) {
    let mut rng = SplitMix64::new(seed ^ (step << 17));
    let (mut ids, mut offsets) = (Vec::new(), vec![0]);
    for feature in 0..4 {
        for _ in 0..size {
            for _ in 0..rng.below(5) {
                let span = if rng.below(3) == 0 { 400 } else { 30 };
                let raw = step * 10 + rng.below(span);
                ids.push(match (feature, rng.below(40)) {
                    (1, _) => (raw % DENSE_ROWS) as i64,
                    (_, 0) => -1,
                    (_, 1) => i64::MIN,
                    (_, 2) => i64::MAX,
                    _ => (raw as i64).wrapping_mul(-7_046_029_254_386_353_131),
                });
            }
            offsets.push(ids.len() as i64);
        }
    }
    (ids, offsets)
}

fn run_step(
    engine: &mut WindowEngine,
    plan: &FeatureLayout,
    (rows, offsets): (&[i64], &[i64]),
) -> Result<Vec<f32>> {
    let bags = Bags::new(rows, offsets, None, 4)?;
    let mut output = vec![f32::NAN; plan.output_len(&bags)];
    engine.lookup(plan, &bags, &mut output)?;
    let grad: Vec<f32> =
        output.iter().enumerate().map(|(at, x)| x * 0.3 + (at % 7) as f32 * 0.01).collect();
    engine.update(plan, &bags, Grads { output: &grad, weights: None })?;
    Ok(output)
}

/// One step from raw ids; returns output and rows.
fn open_step(
    engine: &mut WindowEngine,
    setup: &Setup,
    (seed, step, size): (u64, u64, usize),
) -> Result<(Vec<f32>, Vec<i64>)> {
    let (ids, offsets) = batch(seed, step, size);
    let bags = Bags::new(&ids, &offsets, None, 4)?;
    let mut rows = vec![0; ids.len()];
    engine.translate(&setup.plan, &bags, Translate::Train { now: step as u32 }, &mut rows)?;
    let output = run_step(engine, &setup.plan, (&rows, &offsets))?;
    Ok((output, rows))
}

/// Every row of a table as bits, up to `row_count`.
fn rows_of(engine: &mut WindowEngine, table: TableId, row_count: u64) -> Vec<u32> {
    let mut all = Vec::new();
    engine
        .visit_rows(table, 0, row_count as usize, &mut |_, record| {
            all.extend(record.iter().map(|word| word.to_bits()));
        })
        .unwrap();
    all
}

fn ids_of(engine: &mut WindowEngine, table: TableId) -> HashMap<i64, u64> {
    let mut ids = HashMap::new();
    engine
        .visit_ids(table, &mut |id, row| {
            assert!(ids.insert(id, row).is_none(), "id {id} twice");
            Ok(())
        })
        .unwrap();
    ids
}

/// A naive vocabulary: who appeared how often, who has which row.
#[derive(Default)]
struct Naive {
    ids: HashMap<i64, (Option<u64>, f32, u32)>,
    free: Vec<u64>,
    next_row: u64,
}

impl Naive {
    fn train(&mut self, policy: Policy, ids: &[i64], now: u32) -> Vec<i64> {
        let mut seen = std::collections::HashSet::new();
        for &id in ids.iter().filter(|id| seen.insert(**id)) {
            let entry = self.ids.entry(id).or_insert((None, 0.0, 0));
            if entry.0.is_none() || policy.eviction != Eviction::Never {
                (entry.1, entry.2) = (entry.1 + 1.0, now);
            }
            if entry.0.is_none() && entry.1 >= policy.admit_after as f32 {
                entry.0 = Some(self.free.pop().unwrap_or_else(|| {
                    self.next_row += 1;
                    self.next_row
                }));
            }
        }
        ids.iter().map(|id| self.ids[id].0.unwrap_or(SHARED_ROW) as i64).collect()
    }

    fn evict(&mut self, policy: Policy, now: u32) -> Vec<u64> {
        let judge = |entry: &mut (Option<u64>, f32, u32)| match policy.eviction {
            Eviction::Age { ttl } => now.saturating_sub(entry.2) > ttl,
            Eviction::Count { threshold, decay_rate } => {
                entry.1 *= decay_rate;
                entry.1 < threshold
            }
            _ => false,
        };
        let mut gone = Vec::new();
        for (&id, entry) in &mut self.ids {
            if judge(entry) {
                gone.push((tierbed_vocab::mix(id), entry.0, id));
            }
        }
        gone.sort_unstable();
        for (_, _, id) in &gone {
            self.ids.remove(id);
        }
        let rows: Vec<u64> = gone.iter().filter_map(|gone| gone.1).collect();
        self.free.extend(&rows);
        rows
    }
}

/// Dense tables in memory, ids translated by the naive vocabulary.
struct Oracle {
    engine: WindowEngine,
    setup: Setup,
    naive: [Naive; 2],
    policy: Policy,
}

impl Oracle {
    fn new(seed: u64) -> Self {
        let mut engine = WindowEngine::open_in(None, &common::memory_config()).unwrap();
        let setup = set_up(&mut engine, seed, false).unwrap();
        Self { engine, setup, naive: Default::default(), policy: policy(seed) }
    }

    fn step(&mut self, seed: u64, step: u64, size: usize) -> (Vec<f32>, Vec<i64>) {
        let (ids, offsets) = batch(seed, step, size);
        let bound = |feature: usize| offsets[feature * size] as usize;
        let mut rows = ids.clone();
        // Table by table; the two features of `item` are one batch of it.
        let item: Vec<i64> = [&ids[..bound(1)], &ids[bound(3)..]].concat();
        let item = self.naive[0].train(self.policy, &item, step as u32);
        rows[..bound(1)].copy_from_slice(&item[..bound(1)]);
        rows[bound(3)..].copy_from_slice(&item[bound(1)..]);
        let user = self.naive[1].train(self.policy, &ids[bound(2)..bound(3)], step as u32);
        rows[bound(2)..bound(3)].copy_from_slice(&user);
        let output = run_step(&mut self.engine, &self.setup.plan, (&rows, &offsets)).unwrap();
        (output, rows)
    }

    fn evict(&mut self, now: u32) -> u64 {
        let mut count = 0;
        for (naive, at) in self.naive.iter_mut().zip([0, 2]) {
            let table = self.setup.tables[at];
            let shape = self.engine.schema().table(table).unwrap().clone();
            for row in naive.evict(self.policy, now) {
                let mut record = vec![0.0; shape.record_words()];
                tierbed_kernels::init_record(&shape, row, &mut record);
                self.engine.write_records(table, row, &record).unwrap();
                count += 1;
            }
        }
        count
    }

    fn check(&mut self, engine: &mut WindowEngine, setup: &Setup) {
        for at in 0..3 {
            let count = engine.schema().table(setup.tables[at]).unwrap().row_count.min(20_000);
            let found = rows_of(engine, setup.tables[at], count);
            assert!(found == rows_of(&mut self.engine, self.setup.tables[at], count), "table {at}");
        }
        for (at, table) in [(0, setup.tables[0]), (1, setup.tables[2])] {
            let with_row =
                |(&id, entry): (&i64, &(Option<u64>, f32, u32))| entry.0.map(|r| (id, r));
            let expected: HashMap<i64, u64> =
                self.naive[at].ids.iter().filter_map(with_row).collect();
            assert!(ids_of(engine, table) == expected, "{}", OPEN[at]);
        }
    }
}

fn small(backend: Backend) -> WindowConfig {
    let budget = if backend == Backend::File { 320 << 10 } else { 32 << 20 };
    WindowConfig { backend, io_engine: "inline".into(), ..WindowConfig::new(budget) }
}

fn evict_all(engine: &mut WindowEngine, setup: &Setup, now: u32) -> u64 {
    let tables = [setup.tables[0], setup.tables[2]];
    tables.iter().map(|table| engine.evict(*table, now).unwrap().id_count).sum()
}

/// Trains `steps` steps against the oracle, with restarts, evictions and look-ahead by seed.
fn compare(seed: u64, backend: Backend, is_ahead: bool, steps: u64) -> u64 {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let config = small(backend);
    let open = || {
        let mut engine = WindowEngine::open_in(Some(folder.clone()), &config).unwrap();
        let setup = set_up(&mut engine, seed, true).unwrap();
        (engine, setup)
    };
    let (mut engine, mut setup) = open();
    let mut oracle = Oracle::new(seed);
    let mut evicted = 0;
    for step in 0..steps {
        if is_ahead {
            for next in 0..2 {
                let (ids, offsets) = batch(seed, step + next, 12);
                let bags = Bags::new(&ids, &offsets, None, 4).unwrap();
                let mut rows = vec![0; ids.len()];
                engine.translate(&setup.plan, &bags, Translate::Find, &mut rows).unwrap();
                let bags = Bags::new(&rows, &offsets, None, 4).unwrap();
                engine.prefetch(&setup.plan, &[bags]).unwrap();
            }
        }
        let (output, rows) = open_step(&mut engine, &setup, (seed, step, 12)).unwrap();
        let (expected, expected_rows) = oracle.step(seed, step, 12);
        assert_eq!(rows, expected_rows, "rows of step {step}, seed {seed}");
        assert_eq!(bits(&output), bits(&expected), "step {step}, seed {seed}");
        if step % 5 == 4 {
            let now = step as u32;
            let count = evict_all(&mut engine, &setup, now);
            assert_eq!(count, oracle.evict(now), "step {step}, seed {seed}");
            evicted += count;
        }
        if step % 7 == 6 {
            engine.checkpoint("restart", &[]).unwrap();
            engine.verify().unwrap();
            drop(engine);
            (engine, setup) = open();
        }
    }
    oracle.check(&mut engine, &setup);
    let report = engine.budget().report();
    assert!(report.peak_bytes <= report.limit_bytes);
    evicted
}

#[test]
fn equals_dense_tables_in_memory_with_ids_translated_before() {
    let evicted: u64 = (0..9).map(|seed| compare(seed, Backend::File, false, 36)).sum();
    assert!(evicted > 500, "{evicted}");
}

#[test]
fn looking_ahead_changes_nothing() {
    for seed in 0..9 {
        compare(seed, Backend::File, true, 20);
    }
}

#[test]
fn every_backend_gives_the_same_rows() {
    for backend in [Backend::Memory, Backend::Lsm, Backend::LsmPlain] {
        compare(4, backend, true, 20);
        compare(5, backend, false, 20);
    }
}

#[test]
fn an_evicted_id_that_comes_back_starts_anew() {
    let mut engine = WindowEngine::open_in(None, &common::memory_config()).unwrap();
    let policy = Policy { admit_after: 1, eviction: Eviction::Age { ttl: 0 } };
    let shape = table("item", 1, OptimizerKind::Adagrad);
    let id = engine.add_open_table(shape.clone(), policy).unwrap();
    let plan = FeatureLayout::new(engine.schema(), &[(id, Pooling::Sum)]).unwrap();
    let train = |engine: &mut WindowEngine, raw: &[i64], now| {
        let mut rows = raw.to_vec();
        engine.translate_ids(id, Translate::Train { now }, &mut rows).unwrap();
        let offsets = [0, rows.len() as i64];
        let bags = Bags::new(&rows, &offsets, None, 1).unwrap();
        let mut output = [0.0; 9];
        engine.lookup(&plan, &bags, &mut output).unwrap();
        engine.update(&plan, &bags, Grads { output: &output, weights: None }).unwrap();
        rows
    };
    assert_eq!(train(&mut engine, &[-1, 7], 0), [1, 2]);
    assert_eq!(train(&mut engine, &[7], 1), [2]);
    assert_eq!(engine.evict(id, 1).unwrap().id_count, 1);
    let mut unknown = [-1];
    engine.translate_ids(id, Translate::Find, &mut unknown).unwrap();
    assert_eq!(unknown, [SHARED_ROW as i64]);
    let mut fresh = vec![0.0; shape.record_words()];
    tierbed_kernels::init_record(&shape, 1, &mut fresh);
    let record = |engine: &mut WindowEngine, row| {
        let mut words = Vec::new();
        engine.visit_rows(id, row, 1, &mut |_, record| words = record.to_vec()).unwrap();
        bits(&words)
    };
    assert_eq!(record(&mut engine, 1), bits(&fresh), "weights, state and use count of nobody");
    // Another id gets the row, and the old id another row when it returns.
    assert_eq!(train(&mut engine, &[99], 2), [1]);
    assert_eq!(train(&mut engine, &[-1], 2), [3]);
    assert_eq!(engine.vocabulary(id).unwrap().id_count, 3);
    assert!(engine.vocabulary(TableId(77)).is_none());
}

#[test]
fn open_and_dense_tables_are_not_mistaken_for_each_other() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let open = || WindowEngine::open_in(Some(folder.clone()), &small(Backend::File)).unwrap();
    let mut engine = open();
    let shape = table("item", 1, OptimizerKind::Sgd);
    engine.add_open_table(shape.clone(), Policy::default()).unwrap();
    engine.add_table(table("dense", 5, OptimizerKind::Sgd)).unwrap();
    engine.checkpoint("a", &[]).unwrap();
    drop(engine);
    let mut engine = open();
    let kind = |result: Result<TableId>| result.unwrap_err().kind();
    assert_eq!(kind(engine.add_table(shape.clone())), ErrorKind::Invalid);
    assert_eq!(
        kind(engine.add_table(table("_ids.b.x", 5, OptimizerKind::Sgd))),
        ErrorKind::Invalid
    );
    let dense = table("dense", 5, OptimizerKind::Sgd);
    assert_eq!(kind(engine.add_open_table(dense, Policy::default())), ErrorKind::Invalid);
    let other = TableSchema { dim: 77, ..shape.clone() };
    assert_eq!(kind(engine.add_open_table(other, Policy::default())), ErrorKind::Invalid);
    engine.add_open_table(shape, Policy::default()).unwrap();
    assert!(engine.evict(TableId(3), 0).is_err(), "a dense table evicts nobody");
}

#[test]
fn a_snapshot_answers_raw_ids_and_gives_unknown_ones_the_shared_row() {
    let seed = 4;
    let mut engine = WindowEngine::open_in(None, &common::memory_config()).unwrap();
    let setup = set_up(&mut engine, seed, true).unwrap();
    for step in 0..30 {
        open_step(&mut engine, &setup, (seed, step, 40)).unwrap();
        if step % 10 == 9 {
            evict_all(&mut engine, &setup, step as u32);
        }
    }
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    engine.publish(folder.clone(), PageLayout::default(), &[], &mut |_, _| true).unwrap();
    let options = SnapshotOptions { dram_budget_bytes: 4 << 20, ..SnapshotOptions::default() };
    let snapshot = Snapshot::open(folder, &options).unwrap();
    snapshot.verify().unwrap();
    let published = PublishedIds::open(&snapshot.view()).unwrap();
    for step in 25..40 {
        // Later steps bring ids that training never saw.
        let (ids, offsets) = batch(seed, step, 40);
        let bags = Bags::new(&ids, &offsets, None, 4).unwrap();
        let mut expected_rows = vec![0; ids.len()];
        engine.translate(&setup.plan, &bags, Translate::Find, &mut expected_rows).unwrap();
        let mut rows = vec![0; ids.len()];
        published.translate(&snapshot.view(), &setup.plan, &bags, &mut rows).unwrap();
        assert_eq!(rows, expected_rows);
        let bags = Bags::new(&rows, &offsets, None, 4).unwrap();
        let mut expected = vec![0.0; setup.plan.output_len(&bags)];
        let mut output = expected.clone();
        engine.lookup(&setup.plan, &bags, &mut expected).unwrap();
        snapshot.lookup(&setup.plan, &bags, &mut output).unwrap();
        assert_eq!(bits(&output), bits(&expected));
    }
    let bags = Bags::new(&[5], &[0, 1], None, 1).unwrap();
    let refused = published.translate(&snapshot.view(), &setup.plan, &bags, &mut [0]);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
}

/// Trains on a faulty disk; returns the last acknowledged step, and why it ended.
fn train_on(folder: &SimFolder, seed: u64, steps: u64) -> (u64, Result<()>) {
    let mut acknowledged = 0;
    let result = (|| {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let mut engine = WindowEngine::open_in(Some(folder), &small(Backend::File))?;
        let setup = set_up(&mut engine, seed, true)?;
        for step in 0..steps {
            open_step(&mut engine, &setup, (seed, step, 5))?;
            if step % 3 == 2 {
                for table in [setup.tables[0], setup.tables[2]] {
                    engine.evict(table, step as u32)?;
                }
                let text = (step + 1).to_string();
                let at = Attachment { name: "step", bytes: text.as_bytes() };
                engine.checkpoint("sim", &[at])?;
                acknowledged = step + 1;
            }
        }
        Ok(())
    })();
    (acknowledged, result)
}

#[test]
fn after_power_loss_ids_and_rows_are_of_one_checkpoint() {
    for seed in [1, 5] {
        let clean = SimFolder::default();
        train_on(&clean, seed, 9).1.unwrap();
        let io_count = clean.io_count();
        let mut rng = SplitMix64::new(seed);
        for point in 0..io_count {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, _) = train_on(&folder, seed, 9);
            let image = if point % 2 == 0 {
                folder.crash(rng.next_u64())
            } else {
                folder.crash_to_synced()
            };
            let image: Arc<dyn Folder> = Arc::new(image);
            let mut engine = WindowEngine::open_in(Some(image), &small(Backend::File)).unwrap();
            let step = engine.attachment("step").unwrap();
            let step = step.map_or(0, |text| String::from_utf8(text).unwrap().parse().unwrap());
            assert!(step >= acknowledged, "io {point}");
            let setup = set_up(&mut engine, seed, true).unwrap();
            let mut oracle = Oracle::new(seed);
            for done in 0..step {
                oracle.step(seed, done, 5);
                if done % 3 == 2 {
                    oracle.evict(done as u32);
                }
            }
            oracle.check(&mut engine, &setup);
            // And on it goes as if nothing had happened.
            let (output, rows) = open_step(&mut engine, &setup, (seed, step, 5)).unwrap();
            let expected = oracle.step(seed, step, 5);
            assert_eq!((bits(&output), rows), (bits(&expected.0), expected.1), "io {point}");
        }
    }
}

/// Returns all that an index knows.
fn index_of(engine: &mut WindowEngine, table: TableId) -> (Vec<IdEntry>, Vec<u64>) {
    let (mut entries, mut free) = (Vec::new(), Vec::new());
    let mut keep = |entry| {
        entries.push(entry);
        Ok(())
    };
    engine.visit_entries(table, &mut keep).unwrap();
    let mut keep = |row| {
        free.push(row);
        Ok(())
    };
    engine.visit_free_rows(table, &mut keep).unwrap();
    (entries, free)
}

#[test]
fn a_copy_of_an_index_is_committed_with_its_rows() {
    let config = small(Backend::File);
    let mut engine = WindowEngine::open_in(Some(Arc::new(MemoryFolder::new())), &config).unwrap();
    let setup = set_up(&mut engine, 2, true).unwrap();
    for step in 0..9 {
        open_step(&mut engine, &setup, (2, step, 40)).unwrap();
    }
    let table = setup.tables[0];
    engine.evict(table, 9).unwrap();
    let (entries, free) = index_of(&mut engine, table);
    assert!(entries.len() > 20 && !free.is_empty(), "{} ids, {free:?}", entries.len());
    let next_row = engine.vocabulary(table).unwrap().next_row;

    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let mut other = WindowEngine::open_in(Some(folder.clone()), &config).unwrap();
    let tables = set_up(&mut other, 2, true).unwrap().tables;
    other.grow_open_table(tables[0], next_row).unwrap();
    other.copy_index(tables[0], IndexPart::NextRow(next_row)).unwrap();
    for some in entries.chunks(7) {
        other.copy_index(tables[0], IndexPart::Entries(some)).unwrap();
    }
    other.copy_index(tables[0], IndexPart::Free(&free)).unwrap();
    other.copy_index(tables[0], IndexPart::End).unwrap();
    assert!(other.copy_index(tables[0], IndexPart::NextRow(next_row)).is_err());
    other.checkpoint("copy", &[]).unwrap();
    drop(other);
    let mut other = WindowEngine::open_in(Some(folder), &config).unwrap();
    assert_eq!(index_of(&mut other, tables[0]), (entries, free));
    assert_eq!(other.vocabulary(tables[0]), engine.vocabulary(table));
}

#[test]
fn rows_that_others_name_have_room_and_start_again() {
    let mut engine = WindowEngine::open_in(None, &common::memory_config()).unwrap();
    let setup = set_up(&mut engine, 0, true).unwrap();
    let (open, dense) = (setup.tables[0], setup.tables[1]);
    for step in 0..4 {
        open_step(&mut engine, &setup, (0, step, 40)).unwrap();
    }
    let before = rows_of(&mut engine, open, 4);
    engine.grow_open_table(open, 5_000).unwrap();
    assert!(engine.schema().table(open).unwrap().row_count >= 5_000);
    assert_eq!(rows_of(&mut engine, open, 4), before, "rows stay where they are");
    assert_eq!(engine.grow_open_table(dense, 5_000).unwrap_err().kind(), ErrorKind::Invalid);

    let fresh = {
        let mut other = WindowEngine::open_in(None, &common::memory_config()).unwrap();
        let setup = set_up(&mut other, 0, true).unwrap();
        rows_of(&mut other, setup.tables[0], 4)
    };
    assert_ne!(before, fresh);
    engine.reset_rows(open, &[3, 0, 2, 1]).unwrap();
    assert_eq!(rows_of(&mut engine, open, 4), fresh);
    assert!(engine.reset_rows(open, &[1 << 40]).is_err());
}
