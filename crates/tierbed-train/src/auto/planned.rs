//! Training along a plan, and what else a training run asks meanwhile.

use std::path::Path;
use std::sync::Arc;

use serde_json::{json, Value};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Budget, Error, Result, RowKey, Schema, TableId, TableSchema};
use tierbed_io::Folder;
use tierbed_kernels::{FeatureLayout, Grads, Hyper, Kernels};
use tierbed_snapshot::{PageLayout, Report};

use crate::auto::noting::NotingEngine;
use crate::auto::options::{OrderConfig, ASIDE_MIN_BYTES};
use crate::auto::part_bags::PartBags;
use crate::auto::publish_delta::{publish_all, publish_changes, PublishTarget};
use crate::auto::stats::budget_json;
use crate::auto::tables::Tables;
use crate::auto::unplanned::UnplannedRows;
use crate::batch_token::BatchToken;
use crate::engine::{Access, OwnRows, TrainEngine};
use crate::planned::{AnySink, EpochPlan, Piece, PlannedEngine, Position, UnplannedReads};
use crate::window::changes::{Changes, DeltaCount, Room, Since};
use crate::window::changes_file::{Rows, CHANGES};
use crate::window::publish::PublishProgress;
use crate::window::DeltaBase;

/// The forward engine, and memory kept aside for rows that were not planned.
pub(crate) struct Planned {
    pub(crate) engine: PlannedEngine,
    pub(crate) unplanned: UnplannedRows,
    pub(crate) aside: Budget,
    pub(crate) source: String,
    /// The last checkpoint is where training stands.
    pub(crate) is_durable: bool,
    /// What was read beside the plans before this one.
    pub(crate) earlier_reads: UnplannedReads,
    /// All of the plan was read since it was made or the store was opened.
    pub(crate) is_checked: bool,
    /// Why only the rows of the plan are there, if so.
    pub(crate) plan_damage: Option<String>,
}

impl Planned {
    /// Starts training along `plan` in a folder whose lock is shared.
    pub(crate) fn open(
        folder: Arc<dyn Folder>,
        tables: &Tables,
        plan: EpochPlan,
        config: &OrderConfig,
    ) -> Result<Self> {
        let mut planned = Self::start(folder, tables.schema.clone(), plan, config)?;
        for (table, _, hyper) in tables.iter() {
            planned.engine.set_hyper(table, hyper)?;
        }
        Ok(planned)
    }

    /// Returns the tables and their hyperparameters.
    pub(crate) fn tables(&self) -> Tables {
        let (schema, hypers) = (self.engine.schema().clone(), self.engine.hypers().clone());
        Tables { schema, hypers }
    }

    /// Opens the store in a folder that nobody has locked, at its last checkpoint if it has one.
    pub(crate) fn start(
        folder: Arc<dyn Folder>,
        schema: Schema,
        plan: EpochPlan,
        config: &OrderConfig,
    ) -> Result<Self> {
        let mut engine = PlannedEngine::open_in(folder, schema, plan, &config.forward())
            .map_err(|error| name_least(error, config))?;
        let aside = Budget::new(config.aside_bytes().min(config.dram_budget_bytes));
        let noted = engine.attachment(CHANGES);
        engine.changes = Changes::open(noted, engine.schema(), room_of(&aside))?;
        Self::around(engine, aside)
    }

    /// Wraps an open engine, beside memory for rows that were not planned.
    pub(crate) fn around(engine: PlannedEngine, aside: Budget) -> Result<Self> {
        Ok(Self {
            is_durable: engine.last_checkpoint().is_some(),
            unplanned: UnplannedRows::new(&aside)?,
            source: engine.plan().source().to_owned(),
            engine,
            aside,
            earlier_reads: UnplannedReads::default(),
            is_checked: false,
            plan_damage: None,
        })
    }

    /// Tells whether nothing was trained yet, so that another order may still be chosen.
    pub(crate) fn is_untouched(&self) -> bool {
        let position = self.engine.position();
        (position.epoch, position.batch) == (0, 0) && self.engine.last_checkpoint().is_none()
    }

    /// Goes on along `plan`; the last checkpoint, which is where training stands, is made again
    /// along it, with the same name and attachments.
    pub(crate) fn replan(mut self, plan: EpochPlan, config: &OrderConfig) -> Result<Self> {
        assert!(self.is_durable, "rows would move behind steps that no checkpoint has");
        self.unplanned.clear();
        let source = plan.source().to_owned();
        let mut kept = Vec::new();
        for name in self.engine.attachment_names() {
            let bytes = self.engine.attachment(&name)?;
            let bytes = bytes.ok_or_else(|| Error::corruption("an attachment is missing"));
            kept.push((bytes.map_err(|error| error.with("name", &name))?, name));
        }
        let attachments: Vec<_> =
            kept.iter().map(|(bytes, name)| Attachment { name, bytes }).collect();
        let name = self.engine.last_checkpoint().map_or_else(String::new, |info| info.name.clone());
        let earlier_reads = self.unplanned_reads();
        let engine = self.engine.replan(plan, &name, &attachments);
        let engine = engine.map_err(|error| name_least(error, config))?;
        Ok(Self {
            engine,
            source,
            is_durable: true,
            earlier_reads,
            is_checked: true,
            plan_damage: None,
            ..self
        })
    }

    /// Returns the accounts of its memory.
    pub(crate) fn budgets(&self) -> [&Budget; 2] {
        [self.engine.budget(), &self.aside]
    }

    fn unplanned_reads(&self) -> UnplannedReads {
        let UnplannedReads { scan_count, search_count } = self.engine.unplanned_reads();
        UnplannedReads {
            scan_count: self.earlier_reads.scan_count + scan_count,
            search_count: self.earlier_reads.search_count + search_count,
        }
    }

    pub(crate) fn dims(&self) -> Vec<usize> {
        self.engine.schema().tables().iter().map(|table| table.dim as usize).collect()
    }

    /// Looks up any batch: the planned one where it is, of others each row where it waits, or all
    /// by one pass over everything.
    pub(crate) fn lookup_any(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        plan.check(self.engine.schema(), bags, out.len())?;
        let has_all = self.unplanned.has_rows() && self.unplanned.has_all(plan, bags);
        if !has_all && self.engine.is_next(plan, bags)? {
            return self.engine.lookup(plan, bags, out).map(drop);
        }
        self.lookup_aside(plan, bags, out)
    }

    // One pass brings the rows aside; a batch whose rows do not fit is looked up by halves.
    fn lookup_aside(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        if !self.unplanned.has_all(plan, bags) {
            self.bring(plan, std::slice::from_ref(bags))?;
        }
        if !self.unplanned.has_all(plan, bags) {
            self.unplanned.clear();
            self.bring(plan, std::slice::from_ref(bags))?;
        }
        if self.unplanned.has_all(plan, bags) {
            self.unplanned.pool(Kernels::detect(), plan, bags, out);
            return Ok(());
        }
        let sample_count = bags.batch_size();
        if sample_count < 2 || !plan.is_pooled() {
            return Err(Error::invalid("unplanned batch does not fit the memory kept aside")
                .with("kept_aside_bytes", self.aside.limit_bytes())
                .with("remedy", "look up smaller batches, or raise dram_budget"));
        }
        assert!(out.len().is_multiple_of(sample_count), "every sample has as much of the output");
        let middle = sample_count / 2;
        let (first, second) = out.split_at_mut(out.len() / sample_count * middle);
        let first_half = PartBags::of_samples(bags, 0..middle);
        self.lookup_aside(plan, &first_half.bags()?, first)?;
        let second_half = PartBags::of_samples(bags, middle..sample_count);
        self.lookup_aside(plan, &second_half.bags()?, second)
    }

    /// Steps a piece of the next batch.
    pub(crate) fn update_piece(&mut self, piece: Piece<'_>, grads: Grads<'_>) -> Result<()> {
        self.unplanned.clear();
        self.is_durable = false;
        self.engine.update_piece(piece, grads)
    }

    /// Counts a step that the device makes.
    pub(crate) fn step_on_device(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        found: BatchToken,
    ) -> Result<Vec<Hyper>> {
        self.unplanned.clear();
        let hypers = self.engine.step_on_device(plan, bags, found)?;
        self.is_durable = false;
        Ok(hypers)
    }

    /// Copies the rows of `batches` aside, all at once; returns how many of the batches fit.
    #[expect(clippy::indexing_slicing, reason = "scanned rows are whole records of known tables")]
    pub(crate) fn bring(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        for bags in batches {
            plan.check(self.engine.schema(), bags, plan.output_len(bags))?;
        }
        let words_before = self.unplanned.word_count();
        let (fitted, is_new) = self.unplanned.place(self.engine.schema(), plan, batches)?;
        assert!(fitted <= batches.len(), "{fitted} batches fit of {}", batches.len());
        if is_new {
            let dims = self.dims();
            let few = self.unplanned.rows_from(words_before, self.engine.search_rows_max());
            let unplanned = &mut self.unplanned;
            let mut fill = |table: TableId, row, record: &[f32]| {
                unplanned.fill(RowKey::new(table, row), &record[..dims[table.0 as usize]]);
                Ok(())
            };
            let filled = match few {
                Some(rows) => self.engine.visit_used(&rows, &mut fill),
                None => self.engine.scan_all(&mut fill),
            };
            if filled.is_err() {
                self.unplanned.clear();
            }
            filled?;
        }
        Ok(fitted)
    }
}

impl TrainEngine for Planned {
    fn schema(&self) -> &Schema {
        self.engine.schema()
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        find_table(self.engine.schema(), &table)
    }

    fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        self.engine.set_hyper(table, hyper)
    }

    fn steps_done(&mut self, table: TableId) -> Result<u64> {
        Ok(self.engine.hyper(table)?.step)
    }

    fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<Option<BatchToken>> {
        match is_training {
            true => self.engine.lookup(plan, bags, out).map(Some),
            false => self.lookup_any(plan, bags, out).map(|()| None),
        }
    }

    fn expect(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<Option<BatchToken>> {
        self.engine.prepare(plan, bags).map(Some)
    }

    fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
        found: Option<BatchToken>,
    ) -> Result<()> {
        self.unplanned.clear();
        self.engine.update(plan, bags, grads, found)?;
        self.is_durable = false;
        Ok(())
    }

    fn skip(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<()> {
        self.is_durable = false;
        self.engine.pass(plan, bags)
    }

    fn skip_to(&mut self, batch: u64) -> Result<()> {
        if self.engine.position().batch == batch {
            return Ok(());
        }
        self.is_durable = false;
        self.unplanned.clear();
        self.engine.pass_to(batch)
    }

    fn position(&self) -> Option<(u64, u64)> {
        let Position { epoch, batch } = self.engine.position();
        Some((epoch, batch))
    }

    fn prefetch(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        // Those before were used: the group starts with free memory.
        self.unplanned.clear();
        self.bring(plan, batches)
    }

    fn end_lookahead(&mut self) {
        self.unplanned.clear();
    }

    fn rows_of(&mut self, table: TableId, _access: Access) -> Result<OwnRows<'_>> {
        self.engine.schema().table(table)?;
        Ok(OwnRows { engine: &mut self.engine, table })
    }

    fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.engine.scan_all(sink)
    }

    fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        let number = self.engine.checkpoint(name, attachments)?;
        self.is_durable = true;
        Ok(number)
    }

    fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.engine.last_checkpoint()
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.engine.attachment(name)
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        Ok(self.engine.attachment_names())
    }

    fn verify(&mut self) -> Result<u64> {
        self.engine.verify()
    }

    fn publish_placed(
        &mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.unplanned.clear();
        let memory = self.aside.clone();
        publish_all(self, PublishTarget { path, memory }, layout, attachments, progress)
    }

    fn publish_delta(
        &mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.unplanned.clear();
        let memory = self.aside.clone();
        publish_changes(self, PublishTarget { path, memory }, base, attachments, progress)
    }

    fn stats(&mut self) -> Result<Value> {
        let (stats, Position { epoch, batch }) = (self.engine.stats(), self.engine.position());
        let (plan, reads) = (self.engine.plan_stats(), self.unplanned_reads());
        let order = json!({
            "kind": "forward",
            "epoch": epoch,
            "batch": batch,
            "plan": plan,
            "unplanned_scan_count": reads.scan_count,
            "unplanned_search_count": reads.search_count,
        });
        Ok(json!({
            "order": order,
            "steps": stats.step_count,
            "isa": Kernels::detect().isa().name(),
            "disk_bytes": self.engine.disk_bytes()?,
            "store": stats,
            "buffer": {},
            "changes": self.engine.changes.stats(),
            "budget": budget_json(&self.budgets().map(Budget::report)),
        }))
    }
}

impl NotingEngine for Planned {
    fn noted_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        Ok(self.engine.changes.rows_since(identities))
    }

    // No index leads from a row to its place: everything is read once.
    fn scan_noted(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        self.scan_all(&mut |table, row, record| match rows
            .get(&table.0)
            .is_some_and(|rows| rows.contains(row.0))
        {
            true => sink(table, row, record),
            false => Ok(()),
        })
    }

    fn note_published(&mut self, identity: &str) -> Result<()> {
        self.engine.note_published(identity, room_of(&self.aside));
        Ok(())
    }

    fn count_delta(&mut self, delta: DeltaCount) -> Result<()> {
        self.engine.changes.count_delta(delta);
        Ok(())
    }
}

// Publishing needs the least that is kept aside.
pub(crate) fn room_of(aside: &Budget) -> Room<'_> {
    Room::beside(aside, ASIDE_MIN_BYTES)
}

/// Finds a table; those of a plan are all there are.
pub(crate) fn find_table(schema: &Schema, table: &TableSchema) -> Result<TableId> {
    let Some(id) = schema.id_of(&table.name) else {
        return Err(Error::invalid("tables of a store in forward order are fixed")
            .with("table", &table.name)
            .with("remedy", "add all tables before the first batch is looked ahead"));
    };
    // Adding it to a copy compares it with the one there.
    schema.clone().add(table.clone())?;
    Ok(id)
}

// The forward engine names the least memory of its own; what is kept aside comes on top.
pub(crate) fn name_least(error: Error, config: &OrderConfig) -> Error {
    let Some(own_bytes) = error.minimum_bytes() else { return error };
    let least_bytes = config.least_bytes(own_bytes);
    Error::new(error.kind(), error.message())
        .with_minimum_bytes(least_bytes)
        .with("dram_budget_bytes", config.dram_budget_bytes)
        .with(
            "remedy",
            format_args!(
                "raise dram_budget to at least {least_bytes} bytes, or shorten the window"
            ),
        )
}
