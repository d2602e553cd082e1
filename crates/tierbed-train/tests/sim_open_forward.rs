//! Power fails at any I/O of a store whose ids get their rows while plans are made: a reopened
//! store stands at a checkpoint, and trains on to the rows and ids of training in memory.
//!
//! Seeds: two fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{Bags, Error, ErrorKind, OptimizerKind, Result, TableId, TableSchema};
use tierbed_io::Folder;
use tierbed_kernels::{FeatureLayout, Grads, Hyper, Pooling};
use tierbed_sim::batch::{trained_table, Batch};
use tierbed_sim::job::{
    check_failed_calls, check_lie, check_power_loss, check_repeated_power_loss, lie, FailedCalls,
    SimJob, Told,
};
use tierbed_sim::SimFolder;
use tierbed_train::window::{Backend, Policy, Translate};
use tierbed_train::{
    Access, Answer, AutoEngine, Order, OrderConfig, PlanFollower, PlanRequest, TrainEngine,
};

const DAYS: u64 = 2;
const DAY_STEPS: u64 = 8;
/// Steps between two checkpoints; the last of a day ends one.
const STRIDE: u64 = 4;
/// Ids of a day; half of them are those of the day before.
const DAY_IDS: u64 = 120;
const OPEN: TableId = TableId(0);
/// Behind the open table and its index.
const DENSE: TableId = TableId(3);
const DENSE_ROWS: u64 = 60;

/// What is compared: the open rows and the dense ones as bits, and the row of each id.
#[derive(Debug, Clone, PartialEq, Default)]
struct State {
    ids: BTreeMap<i64, u64>,
    open: Vec<Vec<u32>>,
    dense: Vec<Vec<u32>>,
}

struct Case {
    seed: u64,
    /// After each number of steps.
    oracle: Vec<State>,
}

/// The engine, and the day whose plan it follows.
struct Following {
    engine: AutoEngine,
    day: Option<u64>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let case = Self { seed, oracle: Vec::new() };
        let config = OrderConfig { backend: Some(Backend::Memory), ..OrderConfig::new(256 << 20) };
        let mut engine = case.engine(None, &config).unwrap();
        let mut oracle = vec![case.state(&mut engine).unwrap()];
        for step in 0..case.steps() {
            case.train_step(&mut engine, step).unwrap();
            oracle.push(case.state(&mut engine).unwrap());
        }
        Self { oracle, ..case }
    }

    fn engine(&self, folder: Option<Arc<dyn Folder>>, config: &OrderConfig) -> Result<AutoEngine> {
        let mut engine = AutoEngine::open_in(folder, config)?;
        let optimizer = OptimizerKind::ALL[self.seed as usize % 5];
        let hyper = Hyper { lr: 0.05, ..Hyper::default() };
        let table = |at, dim| TableSchema {
            row_count: DENSE_ROWS,
            ..trained_table(at, (dim, DENSE_ROWS), optimizer, 7)
        };
        assert_eq!(engine.add_open_table(table(0, 18), Policy::default())?, OPEN);
        assert_eq!(engine.add_table(table(1, 5))?, DENSE);
        for table in [OPEN, DENSE] {
            engine.set_hyper(table, hyper)?;
        }
        Ok(engine)
    }

    fn layout(engine: &AutoEngine) -> FeatureLayout {
        let features = [(OPEN, Pooling::Sum), (DENSE, Pooling::Sum), (OPEN, Pooling::Mean)];
        FeatureLayout::new(engine.schema(), &features).unwrap()
    }

    fn batch(&self, step: u64) -> Batch {
        let day = step / DAY_STEPS;
        let mut rng = SplitMix64::new(1000 * self.seed + step);
        let mut batch = Batch::draw(&mut rng, [DAY_IDS, DENSE_ROWS, DAY_IDS], 6, false);
        let bounds: Vec<usize> = batch.bags().bounds().map(|bound| bound as usize).collect();
        for range in [bounds[0]..bounds[1], bounds[2]..bounds[3]] {
            for id in &mut batch.indices[range] {
                // Of both signs and far apart.
                *id = (*id + (day * DAY_IDS / 2) as i64 - 40).wrapping_mul(-7_046_029_254_386);
            }
        }
        batch
    }

    fn follow(&self, following: &mut Following, day: u64) -> Result<()> {
        let engine = &mut following.engine;
        let layout = Self::layout(engine);
        let request = PlanRequest { source: format!("day {day}"), window_batches_max: 3 };
        let mut answer = engine.follow(&layout, &request)?;
        if answer == Answer::PlanNeeded {
            engine.start_plan(&layout, &request)?;
            for step in day * DAY_STEPS..(day + 1) * DAY_STEPS {
                engine.push_planned(&self.batch(step).bags(), true)?;
            }
            engine.finish_plan()?;
            answer = engine.follow(&layout, &request)?;
        }
        if answer == Answer::PlanNeeded {
            return Err(Error::corruption("the plan that was made cannot be read"));
        }
        assert!(matches!(answer, Answer::Following { .. }), "{answer:?}");
        following.day = Some(day);
        Ok(())
    }

    fn train_step(&self, engine: &mut AutoEngine, step: u64) -> Result<()> {
        let (layout, batch) = (Self::layout(engine), self.batch(step));
        let ids = batch.bags();
        let mut rows = vec![0; ids.indices.len()];
        engine.translate(&layout, &ids, Translate::Train { now: 0 }, &mut rows)?;
        let bags = Bags { indices: &rows, ..ids };
        let mut output = vec![f32::NAN; layout.output_len(&bags)];
        let token = engine.lookup(&layout, &bags, &mut output, true)?;
        let grad: Vec<f32> = output.iter().map(|value| value * 0.3 + 0.01).collect();
        engine.update(&layout, &bags, Grads { output: &grad, weights: None }, token)
    }

    fn state(&self, engine: &mut AutoEngine) -> Result<State> {
        let mut state = State::default();
        engine.visit_ids(OPEN, &mut |id, row| {
            state.ids.insert(id, row);
            Ok(())
        })?;
        let open_count = 1 + state.ids.values().copied().max().unwrap_or(0);
        for (table, count, rows) in
            [(OPEN, open_count, &mut state.open), (DENSE, DENSE_ROWS, &mut state.dense)]
        {
            rows.resize(count as usize, Vec::new());
            let own = engine.rows_of(table, Access::Read)?;
            own.engine.visit_rows(own.table, 0, count as usize, &mut |row, record| {
                rows[row] = record.iter().map(|word| word.to_bits()).collect();
            })?;
        }
        Ok(state)
    }
}

impl SimJob for Case {
    type Store = Following;

    fn open(&self, folder: &SimFolder) -> Result<Following> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let config = OrderConfig {
            order: Order::Forward,
            io_engine: "inline".to_owned(),
            ..OrderConfig::new(4 << 20)
        };
        let engine = self.engine(Some(folder), &config)?;
        Ok(Following { engine, day: None })
    }

    fn position(&self, following: &mut Following) -> Result<u64> {
        let steps = following.engine.attachment("steps")?;
        Ok(steps.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap())))
    }

    fn step(&self, following: &mut Following, step: u64) -> Result<()> {
        let day = step / DAY_STEPS;
        if following.day != Some(day) {
            self.follow(following, day)?;
            let stands = following.engine.position().unwrap();
            assert_eq!(stands.1, step % DAY_STEPS, "the plan goes on where the rows stand");
        }
        self.train_step(&mut following.engine, step)
    }

    fn commit(&self, following: &mut Following, position: u64) -> Result<()> {
        let bytes = position.to_le_bytes();
        let attachments = [Attachment { name: "steps", bytes: &bytes }];
        following.engine.checkpoint("c", &attachments).map(drop)
    }

    fn verify(&self, following: &mut Following) -> Result<()> {
        following.engine.verify().map(drop)
    }

    fn is_right(&self, following: &mut Following, position: u64) -> Result<bool> {
        if position == 0 {
            // Nothing was committed: reading rows would decide the order.
            return Ok(following.engine.position().is_none());
        }
        Ok(self.state(&mut following.engine)? == self.oracle[position as usize])
    }

    fn steps(&self) -> u64 {
        DAYS * DAY_STEPS
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + STRIDE
    }

    fn tells_of_damage(&self, error: &Error) -> bool {
        let begins = ["CURRENT", "plan was never finished"];
        let tells = |begin| error.message().starts_with(begin);
        error.kind() == ErrorKind::Corruption || begins.into_iter().any(tells)
    }
}

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2])
}

#[test]
fn power_loss_at_any_io_recovers_rows_and_ids_of_one_checkpoint() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::new(seed), seed, 2);
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        check_repeated_power_loss(&Case::new(seed), seed, 8, 60);
    }
}

#[test]
fn failed_syncs_writes_and_reads_lose_nothing() {
    for seed in seeds() {
        let calls = FailedCalls { count: 24, write_stride: 4, read_stride: 4 };
        let failure_count = check_failed_calls(&Case::new(seed), seed, calls);
        assert!(failure_count > 20, "{failure_count}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for base in seeds() {
        let case = Case::new(base);
        for luck in 0..64 {
            let told = check_lie(&case, lie(luck % 4, luck / 4 * 4, 1000 * base + luck));
            found += u64::from(told != Told::Never);
        }
    }
    assert!(found > 10, "lies found: {found}");
}
