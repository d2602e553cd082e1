//! One small training run, on one shard or several, and the same run in memory.

#![allow(dead_code, reason = "not every test needs all of it")]

use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{Error, OptimizerKind, Result, TableId, TableSchema};
use tierbed_io::Folder;
use tierbed_kernels::{FeatureLayout, Hyper, Pooling};
use tierbed_sim::batch::trained_table;
pub(crate) use tierbed_sim::batch::Batch;
use tierbed_train::window::update::Grads;
use tierbed_train::window::Backend;
use tierbed_train::{Access, Answer, Order, OrderConfig, PlanRequest, ShardedEngine};

/// Tables, features and batches.
pub(crate) struct Run {
    /// Dim and rows.
    pub(crate) tables: Vec<(u32, u64)>,
    /// Table and pooling.
    pub(crate) features: Vec<(u32, Pooling)>,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) samples: usize,
    /// Batches of an epoch.
    pub(crate) batches: u64,
    pub(crate) is_weighted: bool,
    pub(crate) budget_bytes: u64,
}

impl Run {
    /// Six features over five tables of odd shapes; two read one table, two are means.
    pub(crate) fn pooled(optimizer: OptimizerKind) -> Self {
        let features = [
            (0, Pooling::Sum),
            (3, Pooling::Mean),
            (1, Pooling::Sum),
            (4, Pooling::Sum),
            (0, Pooling::Mean),
            (2, Pooling::Sum),
        ];
        Self {
            tables: vec![(9, 3000), (36, 900), (1, 97), (64, 300), (18, 2000)],
            features: features.to_vec(),
            optimizer,
            samples: 16,
            batches: 12,
            is_weighted: true,
            budget_bytes: 12 << 20,
        }
    }

    /// Sequences of four features, dim 8.
    pub(crate) fn unpooled() -> Self {
        let features = [0, 2, 1, 0].map(|table| (table, Pooling::None));
        Self {
            tables: vec![(8, 2000), (8, 500), (8, 900)],
            features: features.to_vec(),
            is_weighted: false,
            ..Self::pooled(OptimizerKind::Adagrad)
        }
    }

    fn table(&self, at: usize) -> TableSchema {
        trained_table(at, self.tables[at], self.optimizer, 7)
    }

    pub(crate) fn batch(&self, step: u64) -> Batch {
        let mut rng = SplitMix64::new(step % self.batches);
        let row_counts = self.features.iter().map(|&(table, _)| self.tables[table as usize].1);
        Batch::draw(&mut rng, row_counts, self.samples, self.is_weighted)
    }

    pub(crate) fn config(&self, order: Order, shards: Option<u32>) -> OrderConfig {
        let io_engine = "inline".to_owned();
        OrderConfig { order, shards, io_engine, ..OrderConfig::new(self.budget_bytes) }
    }

    /// Opens a store with the tables of this run.
    pub(crate) fn open(
        &self,
        folder: Option<Arc<dyn Folder>>,
        config: &OrderConfig,
    ) -> Result<ShardedEngine> {
        let mut engine = ShardedEngine::open_in(folder, config)?;
        for at in 0..self.tables.len() {
            let id = engine.add_table(self.table(at))?;
            assert_eq!(id, TableId(at as u32));
            engine.engine_mut().set_hyper(id, Hyper { lr: 0.05, ..Hyper::default() })?;
        }
        Ok(engine)
    }

    /// Opens a store in memory, of one shard.
    pub(crate) fn oracle(&self) -> ShardedEngine {
        let config = OrderConfig { backend: Some(Backend::Memory), ..OrderConfig::new(256 << 20) };
        self.open(None, &config).unwrap()
    }

    pub(crate) fn plan(&self, engine: &ShardedEngine) -> FeatureLayout {
        let features: Vec<_> =
            self.features.iter().map(|&(table, pooling)| (TableId(table), pooling)).collect();
        FeatureLayout::new(engine.engine().schema(), &features).unwrap()
    }

    /// Makes `engine` follow the plan of an epoch, which is made if there is none.
    pub(crate) fn follow(&self, engine: &mut ShardedEngine) -> Result<()> {
        let plan = self.plan(engine);
        let request = PlanRequest { source: "epoch".to_owned(), window_batches_max: 3 };
        if engine.writable()?.follow(&plan, &request)? == Answer::PlanNeeded {
            engine.writable()?.start_plan(&plan, &request)?;
            for step in 0..self.batches {
                engine.writable()?.push_planned(&self.batch(step).bags(), true)?;
            }
            engine.writable()?.finish_plan()?;
            let answer = engine.writable()?.follow(&plan, &request)?;
            if answer == Answer::PlanNeeded {
                return Err(Error::corruption("a plan is damaged as soon as it is made"));
            }
            assert!(matches!(answer, Answer::Following { .. }), "{answer:?}");
        }
        Ok(())
    }

    /// Looks up and steps batch `step`; returns the bits of the output and of the gradient of
    /// weights.
    pub(crate) fn step(&self, engine: &mut ShardedEngine, step: u64) -> Result<Vec<u32>> {
        let (plan, batch) = (self.plan(engine), self.batch(step));
        let bags = batch.bags();
        let mut output = vec![f32::NAN; plan.output_len(&bags)];
        let token = engine.engine_mut().lookup(&plan, &bags, &mut output, true)?;
        // An update may have the token of the lookup, or check the batch itself.
        let token = token.filter(|_| step % 4 != 3);
        // A gradient that depends on the output: any difference spreads.
        let grad: Vec<f32> = output.iter().map(|value| value * 0.3 + 0.01).collect();
        let mut weights = vec![0.0; if self.is_weighted { bags.indices.len() } else { 0 }];
        let weights_grad = self.is_weighted.then_some(weights.as_mut_slice());
        let grads = Grads { output: &grad, weights: weights_grad };
        engine.writable()?.update(&plan, &bags, grads, token)?;
        Ok(output.iter().chain(&weights).map(|value| value.to_bits()).collect())
    }

    /// Returns the bits of every record of every table.
    pub(crate) fn records(&self, engine: &mut ShardedEngine) -> Result<Vec<Vec<u32>>> {
        let mut records = Vec::new();
        for (at, &(_, row_count)) in self.tables.iter().enumerate() {
            let mut of_table = vec![Vec::new(); row_count as usize];
            // Along a plan a row may be visited twice; the last visit counts.
            let own = engine.engine_mut().rows_of(TableId(at as u32), Access::Read)?;
            own.engine.visit_rows(own.table, 0, row_count as usize, &mut |row, record| {
                of_table[row] = record.iter().map(|word| word.to_bits()).collect();
            })?;
            records.append(&mut of_table);
        }
        Ok(records)
    }

    pub(crate) fn checkpoint(&self, engine: &mut ShardedEngine, steps: u64) -> Result<()> {
        let bytes = steps.to_le_bytes();
        engine.writable()?.checkpoint("c", &[Attachment { name: "steps", bytes: &bytes }]).map(drop)
    }

    pub(crate) fn steps_done(&self, engine: &mut ShardedEngine) -> Result<u64> {
        let steps = engine.engine_mut().attachment("steps")?;
        Ok(steps.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap())))
    }
}
