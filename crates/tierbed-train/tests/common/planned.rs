//! A small seeded training job along a plan, run against the forward engine and its oracle.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result, Schema, TableId, TableSchema};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_kernels::{FeatureLayout, Hyper, Pooling};
use tierbed_sim::batch::trained_table;
pub(crate) use tierbed_sim::batch::Batch;
use tierbed_train::planned::{
    EpochPlan, Grads, Pipeline, PlanBuilder, PlanOptions, PlanShape, PlannedConfig, PlannedEngine,
};
use tierbed_train::window::{WindowConfig, WindowEngine};
use tierbed_train::TableRows;

/// Shape of a job: tables (dim, rows), features (table, pooling).
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) seed: u64,
    /// Which batches: another day has other ones.
    pub(crate) day: u64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) tables: Vec<(u32, u64)>,
    pub(crate) features: Vec<(usize, Pooling)>,
    pub(crate) batch_size: usize,
    pub(crate) batches: u64,
}

/// What a step leaves outside the store: output and gradient of the weights, as bits.
pub(crate) type Trace = (Vec<u32>, Vec<u32>);

impl Job {
    /// All dims the papers use and the odd ones, shared tables, mean and sum.
    pub(crate) fn pooled(optimizer: OptimizerKind, seed: u64) -> Self {
        Self {
            seed,
            day: 0,
            optimizer,
            tables: vec![(9, 2000), (36, 500), (1, 40), (100, 600), (18, 300), (64, 90)],
            features: vec![
                (0, Pooling::Sum),
                (1, Pooling::Mean),
                (0, Pooling::Mean),
                (2, Pooling::Sum),
                (3, Pooling::Sum),
                (4, Pooling::Sum),
                (5, Pooling::Mean),
            ],
            batch_size: 8,
            batches: 40,
        }
    }

    pub(crate) fn unpooled(optimizer: OptimizerKind, seed: u64) -> Self {
        Self {
            tables: vec![(18, 3000), (18, 100)],
            features: vec![(0, Pooling::None), (1, Pooling::None), (0, Pooling::None)],
            ..Self::pooled(optimizer, seed)
        }
    }

    pub(crate) fn table(&self, at: usize) -> TableSchema {
        trained_table(at, self.tables[at], self.optimizer, self.seed + at as u64)
    }

    pub(crate) fn schema(&self) -> Schema {
        Schema::new((0..self.tables.len()).map(|at| self.table(at)).collect()).unwrap()
    }

    pub(crate) fn hyper(&self, at: usize) -> Hyper {
        let weight_decay = if at == 1 { 0.01 } else { 0.0 };
        Hyper { lr: 0.05, weight_decay, ..Hyper::default() }
    }

    pub(crate) fn features(&self) -> FeatureLayout {
        let features: Vec<_> =
            self.features.iter().map(|&(at, pooling)| (TableId(at as u32), pooling)).collect();
        FeatureLayout::new(&self.schema(), &features).unwrap()
    }

    /// The batch of step `step`, the same in every epoch: skewed ids, duplicates, empty bags.
    pub(crate) fn batch(&self, step: u64) -> Batch {
        let seed = self.seed ^ ((step % self.batches) << 20) ^ self.day << 40;
        let mut rng = SplitMix64::new(seed);
        let row_counts = self.features.iter().map(|&(table, _)| self.tables[table].1);
        let is_weighted = self.seed.is_multiple_of(2) && self.features[0].1 != Pooling::None;
        Batch::draw(&mut rng, row_counts, self.batch_size, is_weighted)
    }

    pub(crate) fn shape(&self) -> PlanShape {
        let tables: Vec<_> =
            self.features.iter().map(|&(table, _)| TableId(table as u32)).collect();
        PlanShape::new(&self.schema(), &tables).unwrap()
    }

    /// The plan of the job, in memory, with windows of at most `window` batches.
    pub(crate) fn plan(&self, window: u32) -> EpochPlan {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let options = PlanOptions { window_batches_max: window, ..PlanOptions::default() };
        let mut builder =
            PlanBuilder::new(folder.clone(), "plan", self.shape(), &self.source(), options)
                .unwrap();
        for step in 0..self.batches {
            builder.push(&self.batch(step).bags()).unwrap();
        }
        builder.finish().unwrap();
        EpochPlan::open(&*folder, "plan").unwrap()
    }

    fn source(&self) -> String {
        format!("job {} {}", self.seed, self.day)
    }

    /// The same tables on another day: other batches, some rows in common.
    pub(crate) fn on_day(&self, day: u64, batches: u64) -> Self {
        Self { day, batches, ..self.clone() }
    }

    pub(crate) fn open(
        &self,
        folder: Arc<dyn Folder>,
        plan: &EpochPlan,
        config: &PlannedConfig,
    ) -> Result<PlannedEngine> {
        let mut engine = PlannedEngine::open_in(folder, self.schema(), plan.clone(), config)?;
        if engine.last_checkpoint().is_none() {
            for at in 0..self.tables.len() {
                engine.set_hyper(TableId(at as u32), self.hyper(at))?;
            }
        }
        Ok(engine)
    }

    pub(crate) fn step(
        &self,
        engine: &mut PlannedEngine,
        plan: &FeatureLayout,
        step: u64,
    ) -> Result<Trace> {
        let batch = self.batch(step);
        let bags = batch.bags();
        let mut output = vec![f32::NAN; plan.output_len(&bags)];
        let token = engine.lookup(plan, &bags, &mut output)?;
        let (grad, mut weights_grad) = (gradient(&output), vec![0.0; batch.indices.len()]);
        let weights = batch.weights.is_some().then_some(weights_grad.as_mut_slice());
        // An update may have the token of the lookup, or check the batch itself.
        let token = (step % 4 != 3).then_some(token);
        engine.update(plan, &bags, Grads { output: &grad, weights }, token)?;
        Ok((bits(&output), bits(&weights_grad)))
    }

    pub(crate) fn open_oracle(&self) -> WindowEngine {
        let config = WindowConfig {
            backend: tierbed_train::window::Backend::Memory,
            ..WindowConfig::new(1 << 30)
        };
        let mut engine = WindowEngine::open(None, &config).unwrap();
        for at in 0..self.tables.len() {
            let id = engine.add_table(self.table(at)).unwrap();
            engine.set_hyper(id, self.hyper(at)).unwrap();
        }
        engine
    }

    pub(crate) fn oracle_step(
        &self,
        engine: &mut WindowEngine,
        plan: &FeatureLayout,
        step: u64,
    ) -> Trace {
        let batch = self.batch(step);
        let bags = batch.bags();
        let mut output = vec![f32::NAN; plan.output_len(&bags)];
        engine.lookup(plan, &bags, &mut output).unwrap();
        let (grad, mut weights_grad) = (gradient(&output), vec![0.0; batch.indices.len()]);
        let weights = batch.weights.is_some().then_some(weights_grad.as_mut_slice());
        let grads = tierbed_train::window::update::Grads { output: &grad, weights };
        engine.update(plan, &bags, grads).unwrap();
        (bits(&output), bits(&weights_grad))
    }

    /// All records of all tables, as bits.
    pub(crate) fn records(&self, engine: &mut PlannedEngine) -> Result<Vec<u32>> {
        let mut words = Vec::new();
        for (at, (_, rows)) in self.tables.iter().enumerate() {
            let mut of_table = vec![Vec::new(); *rows as usize];
            // A row that was used is visited twice: the last visit counts.
            engine.visit_rows(TableId(at as u32), 0, *rows as usize, &mut |row, record| {
                of_table[row] = record.iter().map(|word| word.to_bits()).collect();
            })?;
            words.extend(of_table.concat());
        }
        Ok(words)
    }

    pub(crate) fn oracle_records(&self, engine: &mut WindowEngine) -> Vec<u32> {
        let mut words = Vec::new();
        for (at, (_, rows)) in self.tables.iter().enumerate() {
            let mut visit = |_: usize, record: &[f32]| {
                words.extend(record.iter().map(|word| word.to_bits()));
            };
            engine.visit_rows(TableId(at as u32), 0, *rows as usize, &mut visit).unwrap();
        }
        words
    }
}

// A gradient that depends on the output: any difference spreads.
fn gradient(output: &[f32]) -> Vec<f32> {
    let values = output.iter().enumerate();
    values.map(|(at, value)| value * 0.3 + (at % 7) as f32 * 0.01).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Whether `error` says that the disk lied: a CURRENT that was never written looks like that of
/// another program.
pub(crate) fn tells_of_damage(error: &Error) -> bool {
    error.kind() == ErrorKind::Corruption || error.message().starts_with("CURRENT")
}

pub(crate) fn memory_folder() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::new())
}

/// Options with the smallest budget in which the job opens; jobs with an odd seed do storage
/// work on a thread of its own; in every other pair of seeds each window has a bucket of its own.
pub(crate) fn smallest_config(job: &Job, plan: &EpochPlan) -> PlannedConfig {
    smallest_with(job, plan, (job.seed % 4 > 1).then_some(0))
}

/// The same with this choice of `span_windows`.
pub(crate) fn smallest_with(
    job: &Job,
    plan: &EpochPlan,
    span_windows: Option<usize>,
) -> PlannedConfig {
    let mut config = PlannedConfig {
        io_engine: "inline".into(),
        pipeline: if job.seed % 2 == 1 { Pipeline::On } else { Pipeline::Off },
        extent_bytes: 16 << 10,
        span_windows,
        ..PlannedConfig::new(1000)
    };
    // The first budget that is named works.
    for _ in 0..2 {
        match job.open(memory_folder(), plan, &config) {
            Ok(_) => return config,
            Err(error) => {
                let minimum = error.context().iter().find(|(key, _)| *key == "minimum_bytes");
                let minimum = minimum.unwrap_or_else(|| panic!("{error}")).1.parse().unwrap();
                assert!(minimum > config.dram_budget_bytes, "{error}");
                config.dram_budget_bytes = minimum;
            }
        }
    }
    panic!("the minimum named by the error does not do");
}
