//! Rows that a scan hands to Python, some at a time.

use dlpark::DlpackElement;
use pyo3::prelude::*;
use tierbed_core::{Error, Result, RowId, TableId};

use crate::ending::attached;
use crate::tensors::{matrix, vector};

/// Rows of one table on their way to Python, which gets them as they lie: ids, and as many values
/// of each.
pub(crate) struct Chunk<T> {
    pub(crate) rows: Vec<i64>,
    values: Vec<T>,
    /// What the chunk before this one had.
    before: (usize, usize),
}

impl<T> Default for Chunk<T> {
    fn default() -> Self {
        Self { rows: Vec::new(), values: Vec::new(), before: (0, 0) }
    }
}

impl<T: DlpackElement + Copy + Send> Chunk<T> {
    pub(crate) fn push(&mut self, row: RowId, values: &[T]) {
        if self.rows.is_empty() {
            self.rows.reserve_exact(self.before.0);
            self.values.reserve_exact(self.before.1);
        }
        self.rows.push(row.0.cast_signed());
        self.values.extend_from_slice(values);
    }

    // Calls `visit(table, rows, values)`; what it raises goes to `raised`.
    pub(crate) fn hand_out(
        &mut self,
        table: TableId,
        visit: &Py<PyAny>,
        raised: &mut Option<PyErr>,
    ) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        self.before = (self.rows.len(), self.values.len());
        let (rows, values) = (std::mem::take(&mut self.rows), std::mem::take(&mut self.values));
        let called = attached(|py| {
            py.check_signals()?;
            let count = rows.len();
            let given = (table.0, vector(py, rows)?, matrix(py, values, count)?);
            visit.call1(py, given).map(drop)
        });
        called.map_err(|error| {
            *raised = Some(error);
            Error::invalid("visitor raised")
        })
    }
}

/// Hands out the rows of all tables, which have a chunk each, or none if nobody asks for them.
pub(crate) fn hand_out_all(
    chunks: &mut [Option<Chunk<f32>>],
    visit: &Py<PyAny>,
    raised: &mut Option<PyErr>,
) -> Result<()> {
    for (table, chunk) in (0..).map(TableId).zip(chunks) {
        if let Some(chunk) = chunk {
            chunk.hand_out(table, visit, raised)?;
        }
    }
    Ok(())
}
