//! Tables and hyperparameters of a store that no engine has yet.

#![expect(clippy::indexing_slicing, reason = "every table of the schema has hyperparameters")]

use tierbed_core::{Result, Schema, TableId, TableSchema};
use tierbed_kernels::Hyper;

/// Tables, and what training knows of each besides its rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tables {
    pub(crate) schema: Schema,
    /// One per table; `step` is the number of steps done.
    pub(crate) hypers: Vec<Hyper>,
}

impl Tables {
    /// Adds a table, or finds the identical one.
    ///
    /// # Errors
    /// `Invalid` when the table of that name differs.
    pub(crate) fn add(&mut self, table: TableSchema) -> Result<TableId> {
        let id = self.schema.add(table)?;
        let fresh = Hyper { step: 0, ..Hyper::default() };
        self.hypers.resize(self.schema.tables().len(), fresh);
        Ok(id)
    }

    /// Returns the hyperparameters of `table`.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub(crate) fn hyper(&self, table: TableId) -> Result<Hyper> {
        self.schema.table(table)?;
        Ok(self.hypers[table.0 as usize])
    }

    /// Sets the hyperparameters of `table`; steps stay those done.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub(crate) fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        let name = &self.schema.table(table)?.name;
        hyper.check().map_err(|error| error.with("table", name))?;
        let own = &mut self.hypers[table.0 as usize];
        *own = Hyper { step: own.step, ..hyper };
        Ok(())
    }

    /// Returns every table with its hyperparameters.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TableId, &TableSchema, Hyper)> {
        assert_eq!(self.hypers.len(), self.schema.tables().len(), "hyperparameters per table");
        let tables = (0..).map(TableId).zip(self.schema.tables());
        tables.zip(&self.hypers).map(|((id, table), hyper)| (id, table, *hyper))
    }
}
