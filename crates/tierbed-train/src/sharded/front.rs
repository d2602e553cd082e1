//! Every call of an engine, on one shard or on several.

use std::path::Path;

use crate::planned::AnySink;
use crate::window::publish::PublishProgress;
use crate::window::rows::NewRows;
use crate::window::update::Grads;
use crate::window::vocabularies::VocabularyStats;
use serde_json::Value;
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Result, Schema, TableId, TableSchema};
use tierbed_kernels::{FeaturePlan, Hyper};
use tierbed_snapshot::{PlacedTables, Report};

use super::{ShardedEngine, Shards};
use crate::auto::{Answer, PlanRequest};

macro_rules! either {
    ($shards:expr, $engine:ident => $call:expr) => {
        match $shards {
            Shards::One($engine) => $call,
            Shards::Many($engine) => $call,
        }
    };
}

impl ShardedEngine {
    /// See [`AutoEngine::add_table`](crate::AutoEngine::add_table). Tables added behind
    /// the first call that needs rows go to the last shard.
    ///
    /// # Errors
    /// As there.
    pub fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        if self.schema().id_of(&table.name).is_none() {
            self.check_writable()?;
        }
        either!(&mut self.shards, engine => engine.add_table(table))
    }

    /// Returns the tables.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        either!(&self.shards, engine => engine.schema())
    }

    /// See [`AutoEngine::set_hyper`](crate::AutoEngine::set_hyper).
    ///
    /// # Errors
    /// As there.
    pub fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        either!(&mut self.shards, engine => engine.set_hyper(table, hyper))
    }

    /// See [`AutoEngine::lookup`](crate::AutoEngine::lookup).
    ///
    /// # Errors
    /// As there; `Poisoned` when the thread of a shard panicked.
    pub fn lookup(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<()> {
        either!(&mut self.shards, engine => engine.lookup(plan, bags, out, is_training))
    }

    /// See [`AutoEngine::update`](crate::AutoEngine::update). With several shards any
    /// error behind the checks of the batch poisons the store: others have made the step.
    ///
    /// # Errors
    /// As there.
    pub fn update(&mut self, plan: &FeaturePlan, bags: &Bags<'_>, grads: Grads<'_>) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.update(plan, bags, grads))
    }

    /// See [`AutoEngine::pass`](crate::AutoEngine::pass).
    ///
    /// # Errors
    /// As there.
    pub fn pass(&mut self, plan: &FeaturePlan, bags: &Bags<'_>) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.pass(plan, bags))
    }

    /// See [`AutoEngine::pass_to`](crate::AutoEngine::pass_to).
    ///
    /// # Errors
    /// As there.
    pub fn pass_to(&mut self, batch: u64) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.pass_to(batch))
    }

    /// See [`AutoEngine::prefetch`](crate::AutoEngine::prefetch). With several shards the
    /// batches that did not fit must be the first ones announced next.
    ///
    /// # Errors
    /// As there.
    pub fn prefetch(&mut self, plan: &FeaturePlan, batches: &[Bags<'_>]) -> Result<usize> {
        either!(&mut self.shards, engine => engine.prefetch(plan, batches))
    }

    /// Forgets what was announced.
    pub fn end_lookahead(&mut self) {
        either!(&mut self.shards, engine => engine.end_lookahead());
    }

    /// See [`AutoEngine::follow`](crate::AutoEngine::follow).
    ///
    /// # Errors
    /// As there.
    pub fn follow(&mut self, features: &FeaturePlan, request: &PlanRequest) -> Result<Answer> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.follow(features, request))
    }

    /// See [`AutoEngine::start_plan`](crate::AutoEngine::start_plan).
    ///
    /// # Errors
    /// As there; `Invalid` when a shard has no table of these features.
    pub fn start_plan(&mut self, features: &FeaturePlan, request: &PlanRequest) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.start_plan(features, request))
    }

    /// See [`AutoEngine::push_planned`](crate::AutoEngine::push_planned).
    ///
    /// # Errors
    /// As there.
    pub fn push_planned(&mut self, bags: &Bags<'_>) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.push_planned(bags))
    }

    /// See [`AutoEngine::finish_plan`](crate::AutoEngine::finish_plan).
    ///
    /// # Errors
    /// As there.
    pub fn finish_plan(&mut self) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.finish_plan())
    }

    /// Returns epochs and batches of the epoch done; `None` when no plan is followed.
    #[must_use]
    pub fn position(&self) -> Option<(u64, u64)> {
        either!(&self.shards, engine => engine.position())
    }

    /// Notes why the forward order is not followed.
    pub fn note_reason(&mut self, reason: &str) {
        either!(&mut self.shards, engine => engine.note_reason(reason));
    }

    /// See [`AutoEngine::checkpoint`](crate::AutoEngine::checkpoint). It comes into force
    /// for all shards at once; with several any error poisons the store.
    ///
    /// # Errors
    /// As there.
    pub fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.checkpoint(name, attachments))
    }

    /// Returns number and name of the last checkpoint.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&CommitInfo> {
        either!(&self.shards, engine => engine.last_checkpoint())
    }

    /// Reads an attachment of the last checkpoint.
    ///
    /// # Errors
    /// `Corruption` when it fails its checksum, `Io` from the device.
    pub fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        either!(&mut self.shards, engine => engine.attachment(name))
    }

    /// See [`AutoEngine::attachment_names`](crate::AutoEngine::attachment_names).
    ///
    /// # Errors
    /// As there.
    pub fn attachment_names(&self) -> Result<Vec<String>> {
        either!(&self.shards, engine => engine.attachment_names())
    }

    /// See [`AutoEngine::visit_rows`](crate::AutoEngine::visit_rows).
    ///
    /// # Errors
    /// As there.
    pub fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        either!(&mut self.shards, engine => engine.visit_rows(table, first, count, visit))
    }

    /// See [`AutoEngine::gather_rows`](crate::AutoEngine::gather_rows).
    ///
    /// # Errors
    /// As there.
    pub fn gather_rows(&mut self, table: TableId, rows: &[i64], out: &mut [f32]) -> Result<()> {
        either!(&mut self.shards, engine => engine.gather_rows(table, rows, out))
    }

    /// See [`AutoEngine::write_rows`](crate::AutoEngine::write_rows).
    ///
    /// # Errors
    /// As there.
    pub fn write_rows(&mut self, table: TableId, first: u64, rows: NewRows<'_>) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.write_rows(table, first, rows))
    }

    /// See [`AutoEngine::steps_done`](crate::AutoEngine::steps_done).
    ///
    /// # Errors
    /// As there.
    pub fn steps_done(&mut self, table: TableId) -> Result<u64> {
        either!(&mut self.shards, engine => engine.steps_done(table))
    }

    /// See [`AutoEngine::set_steps_done`](crate::AutoEngine::set_steps_done).
    ///
    /// # Errors
    /// As there.
    pub fn set_steps_done(&mut self, table: TableId, steps: u64) -> Result<()> {
        self.check_writable()?;
        either!(&mut self.shards, engine => engine.set_steps_done(table, steps))
    }

    /// See [`AutoEngine::scan_all`](crate::AutoEngine::scan_all).
    ///
    /// # Errors
    /// As there.
    pub fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        either!(&mut self.shards, engine => engine.scan_all(sink))
    }

    /// See [`AutoEngine::publish_placed`](crate::AutoEngine::publish_placed).
    ///
    /// # Errors
    /// As there.
    pub fn publish_placed(
        &mut self,
        path: &Path,
        placed: Vec<PlacedTables>,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        let shards = &mut self.shards;
        either!(shards, engine => engine.publish_placed(path, placed, attachments, progress))
    }

    /// See [`AutoEngine::stats`](crate::AutoEngine::stats). With several shards, the order
    /// of the first, sums of what was counted, and under `shards` what each has counted.
    ///
    /// # Errors
    /// As there.
    pub fn stats(&mut self) -> Result<Value> {
        either!(&mut self.shards, engine => engine.stats())
    }

    /// Returns what open vocabularies hold and read; none along a plan, or with several shards.
    #[must_use]
    pub fn vocabularies(&self) -> VocabularyStats {
        match &self.shards {
            Shards::One(engine) => engine.vocabularies(),
            Shards::Many(_) => VocabularyStats::default(),
        }
    }
}
