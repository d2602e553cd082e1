//! The index of an open table whose rows are divided over ranks, for Python.

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyTuple};
use tierbed_core::{Error, Result, TableId};
use tierbed_exchange::{Distinct, RowSet};
use tierbed_train::window::vocabulary_parts::IndexPart;
use tierbed_train::window::{IdEntry, WindowEngine};

use crate::ending::attached;
use crate::errors::to_python;
use crate::store::NativeStore;
use crate::tensors::Tensor;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(distinct, module)?)?;
    module.add_class::<NativeIndex>()
}

/// Lists distinct ids in `found`, and the place of each id there in `numbers`; returns how many
/// are new in each of the features, whose ids end at `ends`.
#[pyfunction]
fn distinct(
    ids: &Bound<'_, PyAny>,
    ends: Vec<usize>,
    found: &Bound<'_, PyAny>,
    numbers: &Bound<'_, PyAny>,
) -> PyResult<Vec<usize>> {
    let py = ids.py();
    let ids = Tensor::<i64>::import(ids, "ids")?;
    let mut found = Tensor::<i64>::import(found, "found")?;
    let mut numbers = Tensor::<i64>::import(numbers, "numbers")?;
    let listed = found.view_mut().and_then(|found| {
        let numbers = numbers.view_mut()?;
        tierbed_exchange::distinct(ids.view(), &ends, Distinct { ids: found, numbers })
    });
    listed.map_err(|error| to_python(py, &error))
}

/// The open table of a rank that holds some of its rows, or its index.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeIndex {
    store: Py<NativeStore>,
    table: TableId,
}

impl NativeIndex {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut WindowEngine, TableId) -> Result<T> + Send,
    ) -> PyResult<T> {
        let table = self.table;
        self.store.bind(py).get().with(py, |engine| work(engine.single()?.by_number()?, table))
    }

    fn change<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut WindowEngine, TableId) -> Result<T> + Send,
    ) -> PyResult<T> {
        let table = self.table;
        self.store.bind(py).get().with(py, |engine| {
            engine.check_writable()?;
            work(engine.single()?.by_number()?, table)
        })
    }
}

#[pymethods]
impl NativeIndex {
    #[new]
    fn new(store: Py<NativeStore>, table: u32) -> Self {
        Self { store, table: TableId(table) }
    }

    /// Makes room for rows that another rank gives to ids.
    fn grow(&self, py: Python<'_>, row_count: u64) -> PyResult<()> {
        self.change(py, |engine, table| engine.grow_open_table(table, row_count))
    }

    /// Takes the rows of ids that the policy judges; only those that this rank holds start again.
    /// Returns ids with a row, ids without, and the freed rows as bytes of i64.
    fn evict(
        &self,
        py: Python<'_>,
        now: u32,
        block: Option<(u64, u64, u64)>,
    ) -> PyResult<(u64, u64, Py<PyByteArray>)> {
        let held = block.map(|(rank, ranks, block_rows)| RowSet::Blocks {
            rank,
            ranks,
            block_rows,
            end: u64::MAX,
        });
        let holds = move |row: u64| held.is_none_or(|held| held.contains(row as i64));
        let (evicted, rows) =
            self.change(py, |engine, table| engine.evict_rows(table, now, &holds))?;
        let rows = PyByteArray::new(py, bytemuck::cast_slice(&rows)).unbind();
        Ok((evicted.id_count, evicted.waiting_count, rows))
    }

    /// Gives rows that another rank freed their initial values.
    fn reset(&self, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = rows.py();
        let rows = rows_of(rows)?;
        self.change(py, |engine, table| engine.reset_rows(table, &rows))
    }

    /// Calls `visit(ids, rows, counts, seen)` with bytes of i64, i64 (-1: none), f32 and i64.
    fn entries(&self, py: Python<'_>, chunk_ids: usize, visit: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut chunk: Vec<IdEntry> = Vec::new();
        self.visited(py, visit, |engine, table, hand_out| {
            engine.visit_entries(table, &mut |entry| {
                chunk.push(entry);
                match chunk.len() >= chunk_ids.max(1) {
                    true => hand_out(&entry_bytes(&std::mem::take(&mut chunk))),
                    false => Ok(()),
                }
            })?;
            hand_out(&entry_bytes(&chunk))
        })
    }

    /// Calls `visit(rows)` with bytes of i64; the last row is given first.
    fn free_rows(
        &self,
        py: Python<'_>,
        chunk_rows: usize,
        visit: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut chunk: Vec<u64> = Vec::new();
        self.visited(py, visit, |engine, table, hand_out| {
            engine.visit_free_rows(table, &mut |row| {
                chunk.push(row);
                match chunk.len() >= chunk_rows.max(1) {
                    true => {
                        let full = std::mem::take(&mut chunk);
                        hand_out(&[bytemuck::cast_slice(&full).to_vec()])
                    }
                    false => Ok(()),
                }
            })?;
            hand_out(&[bytemuck::cast_slice(&chunk).to_vec()])
        })
    }

    /// Begins to take over the index of another rank, which has given rows below `next_row`.
    fn begin_copy(&self, py: Python<'_>, next_row: u64) -> PyResult<()> {
        self.change(py, |engine, table| engine.copy_index(table, IndexPart::NextRow(next_row)))
    }

    /// Takes over ids, as `entries` gave them.
    fn copy_entries(
        &self,
        ids: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        seen: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = ids.py();
        let (ids, rows) =
            (Tensor::<i64>::import(ids, "ids")?, Tensor::<i64>::import(rows, "rows")?);
        let counts = Tensor::<f32>::import(counts, "counts")?;
        let seen = Tensor::<i64>::import(seen, "seen")?;
        let lengths = [ids.view().len(), rows.view().len(), seen.view().len()];
        if lengths.iter().any(|&length| length != counts.view().len()) {
            let error = Error::corruption("ids of an index come with a row, a count and a time");
            return Err(to_python(py, &error));
        }
        let numbers = ids.view().iter().zip(rows.view()).zip(counts.view()).zip(seen.view());
        let entry = |(((&id, &row), &count), &seen): (((&i64, &i64), &f32), &i64)| {
            let row = (row >= 0).then_some(row as u64);
            let seen = u32::try_from(seen)
                .map_err(|_| Error::corruption("id of an index was trained at no time"))?;
            Ok(IdEntry { id, row, count, seen })
        };
        let entries = numbers.map(entry).collect::<Result<Vec<_>>>();
        let entries = entries.map_err(|error| to_python(py, &error))?;
        self.change(py, |engine, table| engine.copy_index(table, IndexPart::Entries(&entries)))
    }

    /// Takes over rows that are free, as `free_rows` gave them.
    fn copy_free(&self, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = rows.py();
        let rows = rows_of(rows)?;
        self.change(py, |engine, table| engine.copy_index(table, IndexPart::Free(&rows)))
    }

    /// Ends what `begin_copy` began.
    fn end_copy(&self, py: Python<'_>) -> PyResult<()> {
        self.change(py, |engine, table| engine.copy_index(table, IndexPart::End))
    }
}

/// Hands parts to Python, each as bytes.
type HandOut<'a> = dyn FnMut(&[Vec<u8>]) -> Result<()> + Send + 'a;

impl NativeIndex {
    // Runs `work`, whose parts go to `visit`; what that raises is raised.
    fn visited(
        &self,
        py: Python<'_>,
        visit: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut WindowEngine, TableId, &mut HandOut<'_>) -> Result<()> + Send,
    ) -> PyResult<()> {
        let visit = visit.clone().unbind();
        let mut raised = None;
        let mut hand_out = |parts: &[Vec<u8>]| {
            if parts.iter().all(Vec::is_empty) {
                return Ok(());
            }
            let called = attached(|py| {
                py.check_signals()?;
                let arguments = parts.iter().map(|part| PyByteArray::new(py, part));
                visit.call1(py, PyTuple::new(py, arguments)?).map(drop)
            });
            called.map_err(|error| {
                raised = Some(error);
                Error::invalid("visitor raised")
            })
        };
        let result = self.with(py, |engine, table| work(engine, table, &mut hand_out));
        raised.map_or(result, Err)
    }
}

fn entry_bytes(entries: &[IdEntry]) -> [Vec<u8>; 4] {
    let row = |entry: &IdEntry| entry.row.map_or(-1, |row| row as i64);
    [
        entries.iter().flat_map(|entry| entry.id.to_le_bytes()).collect(),
        entries.iter().flat_map(|entry| row(entry).to_le_bytes()).collect(),
        entries.iter().flat_map(|entry| entry.count.to_le_bytes()).collect(),
        entries.iter().flat_map(|entry| i64::from(entry.seen).to_le_bytes()).collect(),
    ]
}

fn rows_of(rows: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = rows.py();
    let rows = Tensor::<i64>::import(rows, "rows")?;
    let row =
        |&row: &i64| u64::try_from(row).map_err(|_| Error::invalid("no such row").with("row", row));
    let rows = rows.view().iter().map(row).collect::<Result<Vec<_>>>();
    rows.map_err(|error| to_python(py, &error))
}
