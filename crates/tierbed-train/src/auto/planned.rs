//! Training along a plan, and what else a training run asks meanwhile.

use std::sync::Arc;

use crate::planned::{Plan, PlannedEngine};
use tierbed_core::store::{out_of_range, Attachment};
use tierbed_core::{Bags, Budget, Error, Result, RowKey, Schema, TableId, TableSchema};
use tierbed_io::Folder;
use tierbed_kernels::{init_record, FeaturePlan, Hyper, Kernels};

use crate::auto::options::OrderConfig;
use crate::auto::part_bags::PartBags;
use crate::auto::unplanned::UnplannedRows;

/// The forward engine, and memory kept aside for rows that were not planned.
pub(crate) struct Planned {
    pub(crate) engine: PlannedEngine,
    pub(crate) unplanned: UnplannedRows,
    pub(crate) aside: Budget,
    pub(crate) source: String,
    /// The last checkpoint is where training stands.
    pub(crate) is_durable: bool,
    /// Passes over everything for rows that were not planned.
    pub(crate) scan_count: u64,
    /// All of the plan was read since it was made or the store was opened.
    pub(crate) is_checked: bool,
    /// Why only the rows of the plan are there, if so.
    pub(crate) plan_damage: Option<String>,
}

impl Planned {
    /// Starts training along `plan` in a folder whose lock is shared.
    pub(crate) fn open(
        folder: Arc<dyn Folder>,
        (schema, hypers): (Schema, &[Hyper]),
        plan: Plan,
        config: &OrderConfig,
    ) -> Result<Self> {
        let mut planned = Self::start(folder, schema, plan, config)?;
        for (table, hyper) in (0u32..).map(TableId).zip(hypers) {
            planned.engine.set_hyper(table, *hyper)?;
        }
        Ok(planned)
    }

    /// Opens the store in a folder that nobody has locked, at its last checkpoint if it has one.
    pub(crate) fn start(
        folder: Arc<dyn Folder>,
        schema: Schema,
        plan: Plan,
        config: &OrderConfig,
    ) -> Result<Self> {
        let source = plan.source().to_owned();
        let engine = PlannedEngine::open_in(folder, schema, plan, &config.forward())
            .map_err(|error| name_least(error, config))?;
        let aside = Budget::new(config.dram_budget_bytes - config.forward_bytes());
        Ok(Self {
            is_durable: engine.last_checkpoint().is_some(),
            unplanned: UnplannedRows::new(&aside)?,
            engine,
            aside,
            source,
            scan_count: 0,
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
    pub(crate) fn replan(mut self, plan: Plan, config: &OrderConfig) -> Result<Self> {
        self.unplanned.clear();
        let source = plan.source().to_owned();
        let mut kept = Vec::new();
        for name in self.engine.attachment_names() {
            kept.push((self.engine.attachment(&name)?.unwrap_or_default(), name));
        }
        let attachments: Vec<_> =
            kept.iter().map(|(bytes, name)| Attachment { name, bytes }).collect();
        let name = self.engine.last_checkpoint().map_or_else(String::new, |info| info.name.clone());
        let engine = self.engine.replan(plan, &name, &attachments);
        let engine = engine.map_err(|error| name_least(error, config))?;
        Ok(Self { engine, source, is_durable: true, is_checked: true, plan_damage: None, ..self })
    }

    pub(crate) fn dims(&self) -> Vec<usize> {
        self.engine.schema().tables().iter().map(|table| table.dim as usize).collect()
    }

    /// Visits rows by number in one pass: first with their initial values, then as they are.
    pub(crate) fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let shape = self.engine.schema().table(table)?.clone();
        let end = first.checked_add(count as u64).filter(|&end| end <= shape.row_count);
        if end.is_none() {
            let range = format_args!("{first}..{}", first.saturating_add(count as u64)).to_string();
            return Err(out_of_range(&shape, range));
        }
        let mut record = vec![0.0; shape.record_words()];
        for (at, row) in (0..count).zip(first..) {
            init_record(&shape, row, &mut record);
            visit(at, &record);
        }
        self.scan_count += 1;
        self.engine.scan(table, &mut |row, record| {
            let at = row.0.wrapping_sub(first);
            if at < count as u64 {
                visit(at as usize, record);
            }
            Ok(())
        })
    }

    /// Looks up any batch: the planned one where it is, others by one pass over everything.
    pub(crate) fn lookup_any(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        plan.check(self.engine.schema(), bags, out.len())?;
        let has_all = self.unplanned.has_rows() && self.unplanned.has_all(plan, bags);
        if !has_all && self.engine.is_next(plan, bags)? {
            return self.engine.lookup(plan, bags, out);
        }
        self.lookup_aside(plan, bags, out)
    }

    // One pass brings the rows aside; a batch whose rows do not fit is looked up by halves.
    fn lookup_aside(&mut self, plan: &FeaturePlan, bags: &Bags<'_>, out: &mut [f32]) -> Result<()> {
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
        let middle = sample_count / 2;
        let (first, second) = out.split_at_mut(out.len() / sample_count * middle);
        let first_half = PartBags::of_samples(bags, 0..middle);
        self.lookup_aside(plan, &first_half.bags()?, first)?;
        let second_half = PartBags::of_samples(bags, middle..sample_count);
        self.lookup_aside(plan, &second_half.bags()?, second)
    }

    /// Copies the rows of `batches` aside in one pass; returns how many of the batches fit.
    pub(crate) fn bring(&mut self, plan: &FeaturePlan, batches: &[Bags<'_>]) -> Result<usize> {
        for bags in batches {
            plan.check(self.engine.schema(), bags, plan.output_len(bags))?;
        }
        let (fitted, is_new) = self.unplanned.place(self.engine.schema(), plan, batches)?;
        if is_new {
            self.scan_count += 1;
            let dims = self.dims();
            let unplanned = &mut self.unplanned;
            let filled = self.engine.scan_all(&mut |table, row, record| {
                let dim = dims.get(table.0 as usize).copied().unwrap_or(0);
                unplanned.fill(RowKey::new(table, row), record.get(..dim).unwrap_or(&[]));
                Ok(())
            });
            if filled.is_err() {
                self.unplanned.clear();
            }
            filled?;
        }
        Ok(fitted)
    }
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
fn name_least(error: Error, config: &OrderConfig) -> Error {
    const NAME: &str = "minimum_bytes";
    let named = error.context().iter().find(|(name, _)| *name == NAME);
    let Some(own_bytes) = named.and_then(|(_, bytes)| bytes.parse::<u64>().ok()) else {
        return error;
    };
    let least_bytes = config.least_bytes(own_bytes);
    Error::new(error.kind(), error.message())
        .with(NAME, least_bytes)
        .with("dram_budget_bytes", config.dram_budget_bytes)
        .with(
            "remedy",
            format_args!(
                "raise dram_budget to at least {least_bytes} bytes, or shorten the window"
            ),
        )
}
