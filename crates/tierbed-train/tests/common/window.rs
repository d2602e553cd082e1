//! A small seeded training job, run against any engine.

#![allow(dead_code, reason = "each test binary uses its part")]

use tierbed_core::env::SplitMix64;
use tierbed_core::{OptimizerKind, Result, TableId, TableSchema};
use tierbed_sim::batch::trained_table;
pub(crate) use tierbed_sim::batch::Batch;
use tierbed_train::window::update::Grads;
use tierbed_train::window::{FeatureLayout, Hyper, Pooling, WindowConfig, WindowEngine};
use tierbed_train::TableRows;

/// Shape of a job: tables (dim, rows), features (table, pooling).
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) seed: u64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) tables: Vec<(u32, u64)>,
    pub(crate) features: Vec<(usize, Pooling)>,
    pub(crate) batch_size: usize,
    pub(crate) is_weighted: bool,
}

impl Job {
    pub(crate) fn pooled(optimizer: OptimizerKind, seed: u64) -> Self {
        Self {
            seed,
            optimizer,
            tables: vec![(9, 3000), (36, 500), (1, 40), (100, 900)],
            features: vec![
                (0, Pooling::Sum),
                (1, Pooling::Mean),
                (0, Pooling::Mean),
                (2, Pooling::Sum),
                (3, Pooling::Sum),
            ],
            batch_size: 16,
            is_weighted: seed.is_multiple_of(2),
        }
    }

    pub(crate) fn unpooled(optimizer: OptimizerKind, seed: u64) -> Self {
        Self {
            tables: vec![(18, 3000), (18, 100)],
            features: vec![(0, Pooling::None), (1, Pooling::None), (0, Pooling::None)],
            is_weighted: false,
            ..Self::pooled(optimizer, seed)
        }
    }

    pub(crate) fn table(&self, at: usize) -> TableSchema {
        trained_table(at, self.tables[at], self.optimizer, self.seed + at as u64)
    }

    pub(crate) fn set_up(&self, engine: &mut WindowEngine) -> Result<FeatureLayout> {
        for at in 0..self.tables.len() {
            let id = engine.add_table(self.table(at))?;
            let hyper = Hyper {
                lr: 0.05,
                weight_decay: if at == 1 { 0.01 } else { 0.0 },
                ..Hyper::default()
            };
            engine.set_hyper(id, hyper)?;
        }
        let features: Vec<_> =
            self.features.iter().map(|&(at, pooling)| (TableId(at as u32), pooling)).collect();
        FeatureLayout::new(engine.schema(), &features)
    }

    /// The batch of step `step`: skewed ids, duplicates, empty bags.
    pub(crate) fn batch(&self, step: u64) -> Batch {
        let mut rng = SplitMix64::new(self.seed ^ (step << 20));
        let row_counts = self.features.iter().map(|&(table, _)| self.tables[table].1);
        Batch::draw(&mut rng, row_counts, self.batch_size, self.is_weighted)
    }

    /// Runs step `step`; returns the output and the gradient of the weights.
    pub(crate) fn step(
        &self,
        engine: &mut WindowEngine,
        plan: &FeatureLayout,
        step: u64,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let batch = self.batch(step);
        let bags = batch.bags();
        let mut output = vec![f32::NAN; plan.output_rows(&bags) * plan.output_dim()];
        engine.lookup(plan, &bags, &mut output)?;
        // A gradient that depends on the output: any difference spreads.
        let grad: Vec<f32> = output
            .iter()
            .enumerate()
            .map(|(at, value)| value * 0.3 + (at % 7) as f32 * 0.01)
            .collect();
        let mut weights_grad = vec![0.0; batch.indices.len()];
        let weights = batch.weights.is_some().then_some(weights_grad.as_mut_slice());
        engine.update(plan, &bags, Grads { output: &grad, weights })?;
        Ok((output, weights_grad))
    }
}

/// All records of all tables, as bits.
pub(crate) fn all_records(engine: &mut WindowEngine) -> Vec<u32> {
    let tables: Vec<_> = engine.schema().tables().iter().map(|table| table.row_count).collect();
    let mut bits = Vec::new();
    for (at, rows) in tables.into_iter().enumerate() {
        engine
            .visit_rows(TableId(at as u32), 0, rows as usize, &mut |_, record| {
                bits.extend(record.iter().map(|word| word.to_bits()));
            })
            .unwrap();
    }
    bits
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

pub(crate) fn memory_config() -> WindowConfig {
    WindowConfig { backend: tierbed_train::window::Backend::Memory, ..WindowConfig::new(1 << 30) }
}

/// The smallest round budget these jobs run in.
pub(crate) fn small_config() -> WindowConfig {
    WindowConfig::new(256 << 10)
}
