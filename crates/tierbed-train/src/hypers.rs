//! Hyperparameters of every table, and the steps that each did.

#![expect(clippy::indexing_slicing, reason = "every table of the schema has hyperparameters")]

use serde::{Deserialize, Serialize};
use tierbed_core::{Result, Schema, TableId};
use tierbed_kernels::Hyper;

/// One per table, in the schema's order; `step` is the number of steps done. JSON of these names
/// in every checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Hypers(Vec<Own>);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Own(#[serde(with = "Named")] Hyper);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Hyper")]
struct Named {
    step: u64,
    lr: f64,
    eps: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

impl Hypers {
    /// Returns those of `table_count` tables that did no step.
    pub(crate) fn fresh(table_count: usize) -> Self {
        let mut hypers = Self::default();
        hypers.grow(table_count);
        hypers
    }

    /// Adds tables that did no step, up to `table_count`.
    pub(crate) fn grow(&mut self, table_count: usize) {
        assert!(self.0.len() <= table_count, "{table_count} tables are fewer than before");
        self.0.resize(table_count, Own(Hyper { step: 0, ..Hyper::default() }));
    }

    /// Returns the number of tables.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns those of `table`, which is known.
    pub(crate) fn of(&self, table: TableId) -> &Hyper {
        &self.0[table.0 as usize].0
    }

    /// Returns those of `table`, which is known, to count steps.
    pub(crate) fn of_mut(&mut self, table: TableId) -> &mut Hyper {
        &mut self.0[table.0 as usize].0
    }

    /// Returns those of `table` of `schema`.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub(crate) fn get(&self, schema: &Schema, table: TableId) -> Result<Hyper> {
        schema.table(table)?;
        Ok(*self.of(table))
    }

    /// Sets those of `table` of `schema`; steps stay those done.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub(crate) fn set(&mut self, schema: &Schema, table: TableId, hyper: Hyper) -> Result<()> {
        let name = &schema.table(table)?.name;
        hyper.check().map_err(|error| error.with("table", name))?;
        let own = self.of_mut(table);
        *own = Hyper { step: own.step, ..hyper };
        Ok(())
    }

    /// Visits every table's.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TableId, &Hyper)> {
        (0..).map(TableId).zip(self.0.iter().map(|own| &own.0))
    }
}
