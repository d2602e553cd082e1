//! Shards, for Python: which rows are divided how, and where each row of a divided model lies.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Error, Result, TableId};
use tierbed_placement::partition::BisectionOptions;
use tierbed_placement::{count_shard_reads, divide_rows, ShardingOptions};
use tierbed_snapshot::shards::{DivideBy, PlacedShards, RowShards, ShardPlan};
use tierbed_snapshot::ShardMap;

use crate::ending::detached;
use crate::errors::{run, to_python};
use crate::placement::NativeQueryLog;
use crate::plain::Plain;
use crate::tensors::{check_disjoint, Tensor};

/// Adds this module's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeRowShards>()?;
    module.add_class::<NativeShardMap>()
}

/// How a publish is divided: `Shards` of Python, with tables by their ids.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GivenShards {
    count: u32,
    replicas: u32,
    by: String,
    placed: Vec<(Vec<u32>, PathBuf)>,
    everywhere_bytes: u64,
}

impl GivenShards {
    /// Reads the shards of the placements.
    pub(crate) fn plan(self) -> Result<ShardPlan> {
        let by = match self.by.as_str() {
            "hash" => DivideBy::Hash,
            "rows" => DivideBy::Rows,
            other => {
                return Err(Error::invalid("rows are divided by hash or by rows")
                    .with("found", other)
                    .with("allowed", "hash, rows"))
            }
        };
        let read = |(tables, path): (Vec<u32>, PathBuf)| {
            let shards = RowShards::read(&RowShards::path_beside(&path))?;
            Ok(PlacedShards { tables: tables.into_iter().map(TableId).collect(), shards })
        };
        Ok(ShardPlan {
            shard_count: self.count,
            replicas: self.replicas,
            by,
            placed: self.placed.into_iter().map(read).collect::<Result<_>>()?,
            everywhere_bytes: self.everywhere_bytes,
        })
    }
}

/// `ShardOptions` of Python.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenSharding {
    shards: u32,
    tolerance: f64,
    iterations: u32,
    seed: u64,
    threads: usize,
}

/// The shard of each row of a placement.
#[pyclass(frozen, module = "tierbed._native")]
struct NativeRowShards {
    shards: RowShards,
}

#[pymethods]
impl NativeRowShards {
    #[staticmethod]
    fn divide(
        py: Python<'_>,
        log: &Bound<'_, NativeQueryLog>,
        options: Plain<GivenSharding>,
    ) -> PyResult<Self> {
        let log = Arc::clone(&log.get().log);
        let Plain(given) = options;
        let options = ShardingOptions {
            tolerance: given.tolerance,
            bisection: BisectionOptions {
                iteration_count: given.iterations,
                seed: given.seed,
                thread_count: given.threads,
                ..BisectionOptions::new(1)
            },
            ..ShardingOptions::new(given.shards)
        };
        run(py, || Ok(Self { shards: divide_rows(&log, &options)? }))
    }

    #[staticmethod]
    fn by_hash(py: Python<'_>, shard_count: u32, row_count: u32) -> PyResult<Self> {
        run(py, || Ok(Self { shards: RowShards::by_hash(shard_count, row_count)? }))
    }

    #[staticmethod]
    fn by_rows(py: Python<'_>, shard_count: u32, row_count: u32) -> PyResult<Self> {
        run(py, || Ok(Self { shards: RowShards::by_rows(shard_count, row_count)? }))
    }

    #[staticmethod]
    fn read(py: Python<'_>, placement: PathBuf) -> PyResult<Self> {
        run(py, || Ok(Self { shards: RowShards::read(&RowShards::path_beside(&placement))? }))
    }

    fn write(&self, py: Python<'_>, placement: PathBuf) -> PyResult<()> {
        run(py, || self.shards.write(&RowShards::path_beside(&placement)))
    }

    #[getter]
    fn shard_count(&self) -> u32 {
        self.shards.shard_count()
    }

    #[getter]
    fn row_count(&self) -> usize {
        self.shards.shards().len()
    }

    /// The shard of each row, i16 one after the other.
    fn shards<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = detached(py, || {
            self.shards.shards().iter().flat_map(|shard| shard.to_le_bytes()).collect()
        });
        PyBytes::new(py, &bytes)
    }

    fn reads(&self, py: Python<'_>, log: &Bound<'_, NativeQueryLog>) -> PyResult<Plain<Value>> {
        let log = Arc::clone(&log.get().log);
        run(py, || {
            let reads = count_shard_reads(&self.shards, &log)?;
            Ok(Plain(json!({
                "query_count": reads.query_count,
                "shard_sum": reads.shard_sum,
                "queries": reads.queries,
                "rows": reads.rows,
            })))
        })
    }
}

/// Where each row of a divided model lies.
#[pyclass(frozen, module = "tierbed._native")]
struct NativeShardMap {
    map: ShardMap,
}

#[pymethods]
impl NativeShardMap {
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        run(py, || Ok(Self { map: ShardMap::open(path)? }))
    }

    fn info(&self) -> Plain<Value> {
        let map = &self.map;
        let shards: Vec<Value> = map
            .shards()
            .iter()
            .map(|shard| {
                json!({
                    "folder": shard.folder,
                    "identity": shard.identity,
                    "file_bytes": shard.file_bytes,
                })
            })
            .collect();
        let tables: Vec<Value> = map
            .tables()
            .iter()
            .map(|table| {
                json!({
                    "name": table.name,
                    "row_count": table.row_count,
                    "dim": table.dim,
                    "divided_by": table.divided.word(),
                })
            })
            .collect();
        Plain(json!({
            "publish": map.publish(),
            "replicas": map.replicas(),
            "memory_bytes": map.memory_bytes(),
            "shards": shards,
            "tables": tables,
        }))
    }

    /// Writes the shard of each id, -1 for any, and its row there.
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn locate(
        &self,
        py: Python<'_>,
        table: &str,
        ids: &Bound<'_, PyAny>,
        shards: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ids = Tensor::<i64>::import(ids, "ids")?;
        let mut shards = Tensor::<i64>::import(shards, "shards")?;
        let mut rows = Tensor::<i64>::import(rows, "rows")?;
        check_disjoint(&[shards.place(), rows.place()], &[ids.place()])
            .map_err(|error| to_python(py, &error))?;
        let shards = shards.view_mut().map_err(|error| to_python(py, &error))?;
        let rows = rows.view_mut().map_err(|error| to_python(py, &error))?;
        let ids = ids.view();
        run(py, || {
            let id = self.table(table)?;
            let mut found = Vec::with_capacity(ids.len());
            self.map.locate(id, ids, &mut found)?;
            if shards.len() != found.len() || rows.len() != found.len() {
                return Err(Error::invalid("shards and rows need a place for each id"));
            }
            for ((located, shard), row) in found.iter().zip(shards).zip(rows) {
                (*shard, *row) = (located.shard.map_or(-1, i64::from), located.row as i64);
            }
            Ok(())
        })
    }

    fn rows_of(&self, py: Python<'_>, table: &str, shard: u32) -> PyResult<u64> {
        run(py, || self.map.rows_of(self.table(table)?, shard))
    }

    fn global_of(
        &self,
        py: Python<'_>,
        table: &str,
        shard: u32,
        row: u64,
    ) -> PyResult<Option<u64>> {
        run(py, || self.map.global_of(self.table(table)?, shard, row))
    }
}

impl NativeShardMap {
    fn table(&self, name: &str) -> Result<TableId> {
        self.map.table_id(name).ok_or_else(|| {
            let names = self.map.tables().iter().map(|table| table.name.as_str());
            Error::invalid("no such table")
                .with("table", name)
                .with("known", names.collect::<Vec<_>>().join(", "))
        })
    }
}
