//! Tables and hyperparameters of a store that no engine has yet.

use tierbed_core::{Result, Schema, TableId, TableSchema};
use tierbed_kernels::Hyper;

use crate::hypers::Hypers;
use crate::planned::{grown, EpochPlan};

/// Tables, and what training knows of each besides its rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tables {
    pub(crate) schema: Schema,
    pub(crate) hypers: Hypers,
}

impl Tables {
    /// Adds a table, or finds the identical one.
    ///
    /// # Errors
    /// `Invalid` when the table of that name differs.
    pub(crate) fn add(&mut self, table: TableSchema) -> Result<TableId> {
        let id = self.schema.add(table)?;
        self.hypers.grow(self.schema.tables().len());
        Ok(id)
    }

    /// Returns the tables with as many rows as `plan` is for.
    ///
    /// # Errors
    /// `Invalid` when the plan is for other or smaller tables.
    pub(crate) fn grown(&self, plan: &EpochPlan) -> Result<Self> {
        Ok(Self { schema: grown(&self.schema, plan)?, hypers: self.hypers.clone() })
    }

    /// Returns the hyperparameters of `table`.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub(crate) fn hyper(&self, table: TableId) -> Result<Hyper> {
        self.hypers.get(&self.schema, table)
    }

    /// Sets the hyperparameters of `table`; steps stay those done.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub(crate) fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        self.hypers.set(&self.schema, table, hyper)
    }

    /// Returns every table with its hyperparameters.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TableId, &TableSchema, Hyper)> {
        assert_eq!(self.hypers.len(), self.schema.tables().len(), "hyperparameters per table");
        let tables = self.schema.tables().iter().zip(self.hypers.iter());
        tables.map(|(table, (id, hyper))| (id, table, *hyper))
    }
}
