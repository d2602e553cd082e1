//! Tables of codes, for Python.

use std::ops::Range;

use pyo3::prelude::*;
use tierbed_core::{Error, Result, Schema, TableId, TableSchema};
use tierbed_io::process::ForkMutex;
use tierbed_kernels::codec::Codec;
use tierbed_train::CodedTables;

use crate::batch::{run_lookup, FeaturePlan, LookupArguments};
use crate::errors::{run, to_python};
use crate::plain::Plain;
use crate::store::make_plan;
use crate::tensors::Tensor;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeCodedTables>()
}

/// Returns the error of a step on rows that are kept in fewer bytes.
pub(crate) fn no_training() -> Error {
    Error::unsupported("rows of a CodedStore do not train")
        .with("remedy", "call eval() on the collection, or keep these tables in a tierbed.Store")
}

/// Tables kept in memory in fewer bytes a row.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeCodedTables {
    // Plain memory, of which a forked child has a copy of its own.
    tables: ForkMutex<CodedTables>,
}

impl NativeCodedTables {
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut CodedTables) -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, || work(&mut *self.tables.lock()?))
    }
}

#[pymethods]
impl NativeCodedTables {
    #[new]
    fn new() -> Self {
        Self { tables: ForkMutex::new(CodedTables::new()) }
    }

    #[expect(clippy::too_many_arguments, reason = "one argument per value, as in Python")]
    fn add_table(
        &self,
        py: Python<'_>,
        table: Plain<TableSchema>,
        codec: &str,
        first_row: u64,
        end_row: u64,
    ) -> PyResult<u32> {
        self.with(py, |tables| {
            let rows = Range { start: first_row, end: end_row };
            tables.add_table(table.0, Codec::by_name(codec)?, rows).map(|id| id.0)
        })
    }

    fn schema(&self, py: Python<'_>) -> PyResult<Plain<Schema>> {
        self.with(py, |tables| Ok(Plain(tables.schema().clone())))
    }

    /// Codec, first held row, row behind the last one, and bytes of a table.
    fn kept_as(&self, py: Python<'_>, table: u32) -> PyResult<(&'static str, u64, u64, usize)> {
        self.with(py, |tables| {
            let (codec, rows) = tables.kept_as(TableId(table))?;
            Ok((codec.name(), rows.start, rows.end, tables.held_bytes(TableId(table))?))
        })
    }

    fn plan(
        &self,
        py: Python<'_>,
        tables: Vec<u32>,
        poolings: Vec<String>,
    ) -> PyResult<FeaturePlan> {
        self.with(py, |held| make_plan(held.schema(), &tables, &poolings))
    }

    /// Rows do not train, so `is_training` changes nothing.
    #[pyo3(signature = (plan, indices, offsets, weights, out, is_training=false))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn lookup(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        is_training: bool,
    ) -> PyResult<()> {
        let _ = is_training;
        run_lookup(plan, &LookupArguments { indices, offsets, weights, out }, |plan, bags, out| {
            self.tables.lock()?.lookup(plan, bags, out)
        })
    }

    /// Refuses: as a training store's update is called.
    #[pyo3(signature = (plan, indices, offsets, weights, grad, weights_grad, found=None))]
    #[expect(clippy::too_many_arguments, reason = "those of a training store")]
    fn update(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        grad: &Bound<'_, PyAny>,
        weights_grad: Option<&Bound<'_, PyAny>>,
        found: Option<u64>,
    ) -> PyResult<()> {
        let _ = (indices, offsets, weights, grad, weights_grad, found);
        Err(to_python(plan.py(), &no_training()))
    }

    fn read_rows(&self, table: u32, first_row: u64, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let mut out = Tensor::<f32>::import(out, "rows")?;
        let out = out.view_mut().map_err(|error| to_python(py, &error))?;
        self.with(py, |tables| tables.read_rows(TableId(table), first_row, out))
    }

    fn write_rows(&self, table: u32, first_row: u64, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = rows.py();
        let rows = Tensor::<f32>::import(rows, "rows")?;
        let rows = rows.view();
        self.with(py, |tables| tables.write_rows(TableId(table), first_row, rows))
    }

    /// Copies the codes of `row_count` rows to `out`, `[row_count, code_bytes]` u8.
    fn read_codes(
        &self,
        table: u32,
        first_row: u64,
        row_count: usize,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = out.py();
        let mut out = Tensor::<u8>::import(out, "codes")?;
        let out = out.view_mut().map_err(|error| to_python(py, &error))?;
        self.with(py, |tables| {
            let codes = tables.codes(TableId(table), first_row, row_count)?;
            if codes.len() != out.len() {
                return Err(Error::invalid("codes must be [row_count, code_bytes]")
                    .with("expected_bytes", codes.len())
                    .with("found_bytes", out.len()));
            }
            out.copy_from_slice(codes);
            Ok(())
        })
    }

    fn write_codes(&self, table: u32, first_row: u64, codes: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = codes.py();
        let codes = Tensor::<u8>::import(codes, "codes")?;
        let codes = codes.view();
        self.with(py, |tables| tables.write_codes(TableId(table), first_row, codes))
    }
}
