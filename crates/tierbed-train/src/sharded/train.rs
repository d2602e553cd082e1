//! Several shards as one training engine: batches in, steps done by all at the same time.
//!
//! Rows belong to one shard, and so does every sum over rows: no number is added across shards,
//! and the bits are those of one shard. A step changes rows only after every shard has found the
//! batch to be the one it expects.

#![expect(
    clippy::indexing_slicing,
    reason = "shards are counted when the store is opened, tables when they are divided"
)]

use std::path::Path;

use serde_json::Value;
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Budget, Result, Schema, TableId, TableSchema};
use tierbed_kernels::{FeatureLayout, Grads, Hyper};
use tierbed_snapshot::{PageLayout, Report};

use super::part::{Part, Parts};
use super::run_shards::run_shards;
use super::shard_set::ShardSet;
use super::stats::{no_engine_stats, sum_of_shards};
use crate::auto::engine::AutoEngine;
use crate::auto::part_bags::PartBags;
use crate::auto::publish_delta::{publish_all, publish_changes, PublishTarget};
use crate::batch_token::BatchToken;
use crate::engine::{Access, OwnRows, TrainEngine};
use crate::planned::AnySink;
use crate::window::publish::PublishProgress;
use crate::window::DeltaBase;

/// A batch with fewer indices is not worth threads.
const SMALL_BATCH: usize = 4096;

impl ShardSet {
    /// Does `work` for every shard that `parts` names, with its part and its job.
    pub(super) fn each<J: Send, T: Send>(
        &mut self,
        parts: &Parts,
        is_small: bool,
        jobs: Vec<J>,
        work: impl Fn(&mut AutoEngine, &Part, J) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        assert_eq!(jobs.len(), parts.of_shards.len(), "every shard with a part has a job");
        let is_named = |shard: usize| parts.of_shards.iter().any(|(of, _)| *of == shard);
        let engines = self.engines.iter_mut().enumerate();
        let mut engines: Vec<_> =
            engines.filter(|(shard, _)| is_named(*shard)).map(|(_, engine)| engine).collect();
        let jobs = parts.of_shards.iter().map(|(_, part)| part).zip(jobs).collect();
        run_shards(&mut engines, is_small, jobs, |engine, (part, job)| work(engine, part, job))
    }

    // Copies each shard's bags out of the batch, if every shard expects them.
    fn expected(&mut self, parts: &Parts, bags: &Bags<'_>) -> Result<Vec<FoundPart>> {
        let jobs = vec![(); parts.of_shards.len()];
        self.each(parts, is_small(bags), jobs, |engine, part, ()| {
            let own = PartBags::of_features(bags, &part.features);
            let token = engine.expect(&part.plan, &own.bags()?)?;
            Ok(FoundPart { own, token })
        })
    }

    // Keeps the batch that every shard has found to be its next one.
    fn keep_found(&mut self, bags: &Bags<'_>, parts: Vec<FoundPart>) -> Option<BatchToken> {
        if parts.iter().any(|part| part.token.is_none()) {
            return None;
        }
        let token = BatchToken::next();
        self.found = Some(FoundBatch { token, bounds: bags.bounds().collect(), parts });
        Some(token)
    }

    // Checks a batch to train on; along a plan the shards say which ids are right.
    fn check_batch(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        matrix_len: usize,
        is_planned: bool,
    ) -> Result<()> {
        match is_planned {
            true => plan.check_shape(bags, matrix_len),
            false => plan.check(&self.split.schema, bags, matrix_len),
        }
    }
}

/// A batch that every shard has found to be its next one.
pub(super) struct FoundBatch {
    token: BatchToken,
    bounds: Vec<i64>,
    parts: Vec<FoundPart>,
}

impl FoundBatch {
    fn is(&self, bags: &Bags<'_>, token: Option<BatchToken>) -> bool {
        token == Some(self.token) && bags.bounds().eq(self.bounds.iter().copied())
    }
}

/// The bags of one shard, and the token its engine gave for them.
struct FoundPart {
    own: PartBags,
    token: Option<BatchToken>,
}

impl TrainEngine for ShardSet {
    fn schema(&self) -> &Schema {
        &self.split.schema
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let mut schema = self.split.schema.clone();
        let id = schema.add(table.clone())?;
        if schema.tables().len() == self.split.schema.tables().len() {
            return Ok(id);
        }
        if let Some(last) = self.engines.last_mut() {
            last.add_table(table)?;
            self.split.shard_of.push(self.shard_count as u32 - 1);
        }
        self.split.schema = schema;
        self.hypers.push(None);
        let table_count = self.split.schema.tables().len();
        assert_eq!(self.hypers.len(), table_count, "every table has what was set before");
        Ok(id)
    }

    fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        let name = &self.split.schema.table(table)?.name;
        hyper.check().map_err(|error| error.with("table", name))?;
        if self.engines.is_empty() {
            self.hypers[table.0 as usize] = Some(hyper);
            return Ok(());
        }
        let (engine, table) = self.engine_of(table)?;
        engine.set_hyper(table, hyper)
    }

    fn steps_done(&mut self, table: TableId) -> Result<u64> {
        let (engine, own) = self.engine_of(table)?;
        engine.steps_done(own)
    }

    fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<Option<BatchToken>> {
        self.decide()?;
        let is_planned = is_training && self.position().is_some();
        self.check_batch(plan, bags, out.len(), is_planned)?;
        let parts = self.parts(plan)?;
        let places = parts.carve(bags, out);
        let pooled = self.each(&parts, is_small(bags), places, |engine, part, mut places| {
            let own = PartBags::of_features(bags, &part.features);
            let token = engine.lookup_to(&part.plan, &own.bags()?, &mut places, is_training)?;
            Ok(FoundPart { own, token })
        });
        match self.poison.on_doubt(pooled) {
            Ok(found) => Ok(self.keep_found(bags, found)),
            Err(error) => {
                // Which feature of the batch has a bad id, a shard does not know.
                plan.check_ids(&self.split.schema, bags)?;
                Err(error)
            }
        }
    }

    fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
        found: Option<BatchToken>,
    ) -> Result<()> {
        self.decide()?;
        let known = self.found.take().filter(|batch| batch.is(bags, found));
        self.check_batch(plan, bags, grads.output.len(), known.is_some())?;
        grads.check(bags)?;
        self.engines.iter().try_for_each(AutoEngine::check_may_step)?;
        let parts = self.parts(plan)?;
        let own = match known {
            Some(batch) => batch.parts,
            None => self.expected(&parts, bags)?,
        };
        let (output, wants_weights) = (grads.output, grads.weights.is_some());
        let stepped = self.each(&parts, is_small(bags), own, |engine, part, found| {
            let own = found.own.bags()?;
            let output = part.grad(plan, bags, output);
            let mut weights = wants_weights.then(|| vec![0.0; own.indices.len()]);
            let grads = Grads { output: &output, weights: weights.as_deref_mut() };
            engine.update(&part.plan, &own, grads, found.token)?;
            Ok(weights.unwrap_or_default())
        });
        let weights = self.poison.on_any(stepped)?;
        if let Some(into) = grads.weights {
            for ((_, part), own) in parts.of_shards.iter().zip(&weights) {
                part.put_back(plan, bags, own, into);
            }
        }
        Ok(())
    }

    fn skip(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<()> {
        self.decide()?;
        plan.check(&self.split.schema, bags, plan.output_len(bags))?;
        self.found = None;
        let parts = self.parts(plan)?;
        let own = self.expected(&parts, bags)?;
        let passed = self.each(&parts, is_small(bags), own, |engine, part, found| {
            engine.skip(&part.plan, &found.own.bags()?)
        });
        self.poison.on_any(passed).map(drop)
    }

    fn skip_to(&mut self, batch: u64) -> Result<()> {
        self.decide()?;
        self.found = None;
        let jobs = vec![(); self.engines.len()];
        let passed = run_shards(&mut self.engines, false, jobs, |engine, ()| engine.skip_to(batch));
        self.poison.on_any(passed).map(drop)
    }

    fn position(&self) -> Option<(u64, u64)> {
        self.engines.first().and_then(AutoEngine::position)
    }

    fn prefetch(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        self.decide()?;
        let parts = self.parts(plan)?;
        let is_planned = self.position().is_some();
        let jobs: Vec<usize> =
            parts.of_shards.iter().map(|(shard, _)| self.ahead[*shard]).collect();
        let announced = self.each(&parts, false, jobs.clone(), |engine, part, known| {
            let rest = &batches[known.min(batches.len())..];
            let own = rest.iter().map(|bags| PartBags::of_features(bags, &part.features));
            let own: Vec<PartBags> = own.collect();
            let own = own.iter().map(PartBags::bags).collect::<Result<Vec<_>>>()?;
            engine.prefetch(&part.plan, &own)
        });
        let announced = match self.poison.on_doubt(announced) {
            Ok(announced) => announced,
            Err(error) => {
                self.end_lookahead();
                return Err(error);
            }
        };
        let reached: Vec<usize> =
            jobs.iter().zip(&announced).map(|(known, more)| known + more).collect();
        let fitted = reached.iter().copied().min().unwrap_or(0).min(batches.len());
        for ((shard, _), reached) in parts.of_shards.iter().zip(reached) {
            // Along a plan nothing is kept from call to call.
            self.ahead[*shard] = if is_planned { 0 } else { reached - fitted };
        }
        Ok(fitted)
    }

    fn end_lookahead(&mut self) {
        self.engines.iter_mut().for_each(AutoEngine::end_lookahead);
        self.ahead.fill(0);
    }

    fn rows_of(&mut self, table: TableId, access: Access) -> Result<OwnRows<'_>> {
        let (engine, own) = self.engine_of(table)?;
        engine.rows_of(own, access)
    }

    fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.decide()?;
        for (shard, engine) in self.engines.iter_mut().enumerate() {
            let tables: Vec<TableId> = self.split.tables_of(shard).map(|(id, _)| id).collect();
            engine.scan_all(&mut |own, row, record| sink(tables[own.0 as usize], row, record))?;
        }
        Ok(())
    }

    fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.decide()?;
        let shares = std::iter::once(attachments).chain(std::iter::repeat(&[][..]));
        let jobs = self.participants().into_iter().zip(shares).collect();
        let made = run_shards(&mut self.engines, false, jobs, |engine, (_seat, attachments)| {
            engine.checkpoint(name, attachments)
        });
        let numbers = self.poison.on_any(made)?;
        Ok(numbers[0])
    }

    fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.engines.first().and_then(AutoEngine::last_checkpoint)
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.engines.first_mut().map_or(Ok(None), |first| first.attachment(name))
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        self.engines.first().map_or(Ok(Vec::new()), AutoEngine::attachment_names)
    }

    fn verify(&mut self) -> Result<u64> {
        let jobs = vec![(); self.engines.len()];
        let counts = run_shards(&mut self.engines, false, jobs, |engine, ()| engine.verify())?;
        Ok(counts.iter().sum())
    }

    fn publish_placed(
        &mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.decide()?;
        let memory = Budget::new(self.config.aside_bytes());
        publish_all(self, PublishTarget { path, memory }, layout, attachments, progress)
    }

    fn publish_delta(
        &mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.decide()?;
        let memory = Budget::new(self.config.aside_bytes());
        publish_changes(self, PublishTarget { path, memory }, base, attachments, progress)
    }

    fn stats(&mut self) -> Result<Value> {
        if self.engines.is_empty() {
            return Ok(no_engine_stats());
        }
        let stats = self.engines.iter_mut().map(AutoEngine::stats);
        Ok(sum_of_shards(stats.collect::<Result<Vec<_>>>()?))
    }
}

/// Tells whether the work of a batch is not worth threads.
pub(super) fn is_small(bags: &Bags<'_>) -> bool {
    bags.indices.len() < SMALL_BATCH
}
