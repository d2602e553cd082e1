//! Rows that a snapshot keeps in memory, for Python.

use std::sync::Arc;

use pyo3::prelude::*;
use tierbed_core::{Error, Result, TableId};
use tierbed_snapshot::{HeadRows, ResidentTable, Tail};

use crate::codec::NativeCodec;
use crate::errors::run;
use crate::tensors::Tensor;

/// What of a table is in memory as long as a snapshot is open.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeResident {
    table: Arc<ResidentTable>,
}

impl NativeResident {
    pub(crate) fn table(&self) -> Arc<ResidentTable> {
        Arc::clone(&self.table)
    }
}

type Given<'py> = Option<(PyRef<'py, NativeCodec>, Bound<'py, PyAny>)>;
type GivenHead<'py> = Option<(PyRef<'py, NativeCodec>, Bound<'py, PyAny>, Bound<'py, PyAny>)>;

#[pymethods]
impl NativeResident {
    #[new]
    #[pyo3(signature = (table, row_count, head, tail, default_row))]
    #[expect(clippy::too_many_arguments, reason = "one argument per part, as in Python")]
    fn new(
        py: Python<'_>,
        table: u32,
        row_count: u64,
        head: GivenHead<'_>,
        tail: Given<'_>,
        default_row: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let head = match head {
            Some((codec, rows, codes)) => {
                let rows = Tensor::<i64>::import(&rows, "head rows")?;
                let codes = Tensor::<u8>::import(&codes, "head codes")?.view().to_vec();
                let dim = codec.dim();
                let codec = codec.codec().clone();
                let rows = rows.view().to_vec();
                Some(run(py, || HeadRows::new(codec, row_count, dim, &row_ids(&rows)?, codes))?)
            }
            None => None,
        };
        let tail = match tail {
            Some((codec, codes)) => {
                let codes = Tensor::<u8>::import(&codes, "tail codes")?.view().to_vec();
                Some(Tail { codec: codec.codec().clone(), codes })
            }
            None => None,
        };
        let default_row = default_row.map(|row| Tensor::<f32>::import(row, "default row"));
        let default_row = default_row.transpose()?.map(|row| row.view().to_vec());
        let table = ResidentTable { table: TableId(table), head, tail, default_row };
        Ok(Self { table: Arc::new(table) })
    }
}

fn row_ids(rows: &[i64]) -> Result<Vec<u64>> {
    rows.iter().map(|&row| u64::try_from(row).map_err(|_| refuse(row))).collect()
}

fn refuse(row: i64) -> Error {
    Error::invalid("row is out of range").with("row", row)
}
