//! Query logs and placements, for Python.
//!
//! Logs stay on this side; what crosses are options and reports, and queries of readers that are
//! written in Python.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_cache::PolicyKind;
use tierbed_core::{Error, Result};
use tierbed_io::process::ForkMutex;
use tierbed_placement::partition::BisectionOptions;
use tierbed_placement::{
    build_each, connectivity_sum, count_page_reads, decode_packed, encode_packed, index_by_use,
    miss_stream, read_log, read_mapping, write_mapping, write_packed, BuildInput, BuildReport,
    CacheInFront, Method, PackedQueries, Placement, QueryLog, QueryLogBuilder, QuerySource,
    ReadOptions, TextQueries,
};
use tierbed_snapshot::index::PageIndex;
use tierbed_snapshot::placement::{read_placement, write_placement};
use tierbed_snapshot::select::Selection;

use crate::ending::detached;
use crate::errors::run;
use crate::plain::Plain;
use crate::progress::Progress;
use crate::tensors::Tensor;

/// Adds this module's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeQueryLog>()?;
    module.add_class::<NativeQueryLogBuilder>()?;
    module.add_class::<NativePlacement>()?;
    module.add_function(wrap_pyfunction!(placement_methods, module)?)
}

/// Returns the names of the methods there are, the simplest first, and whether each makes replicas.
#[pyfunction]
fn placement_methods() -> Vec<(&'static str, bool)> {
    Method::ALL.into_iter().map(|method| (method.name(), method.replicates())).collect()
}

/// A query log in memory.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeQueryLog {
    pub(crate) log: Arc<QueryLog>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenRead {
    row_count: Option<u32>,
    sample: f64,
    seed: u64,
    query_count_max: Option<u64>,
    query_rows_max: Option<usize>,
}

impl From<GivenRead> for ReadOptions {
    fn from(given: GivenRead) -> Self {
        let GivenRead { row_count, sample, seed, query_count_max, query_rows_max } = given;
        Self { row_count, sample, seed, query_count_max, query_rows_max }
    }
}

impl NativeQueryLog {
    fn new(log: QueryLog) -> Self {
        Self { log: Arc::new(log) }
    }
}

#[pymethods]
impl NativeQueryLog {
    #[staticmethod]
    fn read(
        py: Python<'_>,
        path: PathBuf,
        log_format: &str,
        options: Plain<GivenRead>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let mut source: Box<dyn QuerySource> = match log_format {
                "text" => Box::new(TextQueries::open(&path)?),
                "maxembed-text" => Box::new(TextQueries::open_with_header(&path)?),
                "maxembed" => Box::new(PackedQueries::open(&path)?),
                _ => {
                    return Err(Error::invalid("unknown format of a query log")
                        .with("found", log_format)
                        .with("allowed", "text, maxembed-text, maxembed"))
                }
            };
            read_log(&mut *source, &options.0.into(), &mut |done, total| told.tell(done, total))
        });
        told.finish(result).map(Self::new)
    }

    /// The bytes of MaxEmbed's binary log.
    fn pack<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = detached(py, || encode_packed(&self.log));
        PyBytes::new(py, &bytes)
    }

    #[staticmethod]
    fn unpack(py: Python<'_>, packed: &[u8]) -> PyResult<Self> {
        run(py, || decode_packed(packed).map(Self::new))
    }

    #[getter]
    fn row_count(&self) -> u32 {
        self.log.row_count()
    }

    #[getter]
    fn query_count(&self) -> usize {
        self.log.query_count()
    }

    #[getter]
    fn pin_count(&self) -> usize {
        self.log.pin_count()
    }

    fn query(&self, at: usize) -> Option<Vec<u32>> {
        self.log.query(at).map(<[u32]>::to_vec)
    }

    fn split(&self, py: Python<'_>, share: f64) -> PyResult<(Self, Self)> {
        let (earlier, later) = run(py, || self.log.split_by_share(share))?;
        Ok((Self::new(earlier), Self::new(later)))
    }

    fn sample(&self, py: Python<'_>, query_count: usize, seed: u64) -> PyResult<Self> {
        run(py, || Ok(Self::new(self.log.sample(query_count, seed))))
    }

    fn shuffled(&self, py: Python<'_>, seed: u64) -> PyResult<Self> {
        run(py, || Ok(Self::new(self.log.shuffled(seed))))
    }

    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        run(py, || write_packed(&self.log, &path))
    }

    /// What misses a cache that `earlier` warmed, how many queries it is of, and the hit ratio.
    #[expect(clippy::too_many_arguments, reason = "one per argument of the Python method")]
    fn misses(
        &self,
        py: Python<'_>,
        earlier: &Bound<'_, Self>,
        share: f64,
        policy: &str,
        batch_queries: usize,
    ) -> PyResult<(Self, u64, f64)> {
        let earlier = Arc::clone(&earlier.get().log);
        run(py, || {
            let cache = CacheInFront { share, policy: PolicyKind::from_name(policy)? };
            let stream = miss_stream(&earlier, &self.log, cache, batch_queries)?;
            let (query_count, hit_ratio) = (stream.query_count, stream.hit_ratio());
            Ok((Self::new(stream.log), query_count, hit_ratio))
        })
    }
}

/// Collects the queries of readers written in Python.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeQueryLogBuilder {
    builder: ForkMutex<Option<QueryLogBuilder>>,
}

#[pymethods]
impl NativeQueryLogBuilder {
    #[new]
    fn new(row_count: u32) -> Self {
        Self { builder: ForkMutex::new(Some(QueryLog::builder(row_count))) }
    }

    /// Adds the queries `values[offsets[q]..offsets[q + 1]]`.
    fn push(
        &self,
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let values = Tensor::<i64>::import(values, "values")?;
        let offsets = Tensor::<i64>::import(offsets, "offsets")?;
        let (values, offsets) = (values.view(), offsets.view());
        run(py, || {
            let mut builder = self.builder.lock()?;
            let builder = builder.as_mut().ok_or_else(finished)?;
            let mut rows = Vec::new();
            for bounds in offsets.windows(2) {
                rows.clear();
                let query = query_of(values, bounds).ok_or_else(|| {
                    Error::invalid("offsets must ascend within the values")
                        .with("query", builder.query_count())
                })?;
                for id in query {
                    rows.push(u32::try_from(*id).map_err(|_| {
                        Error::invalid("row ids are whole numbers below 2^32")
                            .with("found", id)
                            .with("query", builder.query_count())
                    })?);
                }
                builder.push(&rows)?;
            }
            Ok(())
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<NativeQueryLog> {
        run(py, || {
            let builder = self.builder.lock()?.take();
            Ok(NativeQueryLog::new(builder.ok_or_else(finished)?.finish()))
        })
    }
}

fn finished() -> Error {
    Error::invalid("this query log is finished").with("remedy", "make another builder")
}

fn query_of<'a>(values: &'a [i64], bounds: &[i64]) -> Option<&'a [i64]> {
    let &[begin, end] = bounds else { return None };
    values.get(usize::try_from(begin).ok()?..usize::try_from(end).ok()?)
}

/// A placement, and the pages of each row in the order in which they are tried.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativePlacement {
    pub(crate) placement: Arc<Placement>,
    index: Arc<PageIndex>,
}

/// `PlaceOptions` of Python.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GivenPlace {
    method: String,
    rows_per_page: u32,
    seed: u64,
    threads: usize,
    iterations: u32,
}

impl GivenPlace {
    /// What a bisection is told of it.
    pub(crate) fn bisection(&self) -> BisectionOptions {
        BisectionOptions {
            iteration_count: self.iterations,
            seed: self.seed,
            thread_count: self.threads,
            ..BisectionOptions::new(self.rows_per_page)
        }
    }
}

fn selection(name: &str) -> Result<Selection> {
    match name {
        "one_pass" => Ok(Selection::OnePass),
        "greedy" => Ok(Selection::Greedy),
        other => Err(Error::invalid("unknown page selection")
            .with("found", other)
            .with("allowed", "one_pass, greedy")),
    }
}

impl NativePlacement {
    pub(crate) fn in_page_order(placement: Placement) -> Result<Self> {
        let index = PageIndex::new(placement.row_count(), placement.pages())?;
        Ok(Self { placement: Arc::new(placement), index: Arc::new(index) })
    }
}

#[pymethods]
impl NativePlacement {
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "one per argument of the Python function")]
    fn build(
        py: Python<'_>,
        log: &Bound<'_, NativeQueryLog>,
        misses: Option<&Bound<'_, NativeQueryLog>>,
        options: Plain<GivenPlace>,
        ratios: Vec<f64>,
        homes: Option<&Bound<'_, Self>>,
        kept: Option<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Self>> {
        let log = Arc::clone(&log.get().log);
        let misses = misses.map(|misses| Arc::clone(&misses.get().log));
        let homes = homes.map(|homes| Arc::clone(&homes.get().placement));
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let Plain(given) = options;
            let (options, method) = (given.bisection(), Method::from_name(&given.method)?);
            let input = BuildInput {
                log: &log,
                misses: misses.as_deref(),
                homes: homes.as_deref(),
                resume_dir: kept.as_deref(),
            };
            let mut report = |report: BuildReport| told.tell(report.done, report.total);
            let placements = build_each(input, method, &options, &ratios, &mut report)?;
            placements.into_iter().map(Self::in_page_order).collect()
        });
        told.finish(result)
    }

    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let (placement, index) = run(py, || read_placement(&path))?;
        Ok(Self { placement: Arc::new(placement), index: Arc::new(index) })
    }

    #[staticmethod]
    fn read_mapping(py: Python<'_>, path: PathBuf, rows_per_page: u32) -> PyResult<Self> {
        run(py, || Self::in_page_order(read_mapping(&path, rows_per_page)?))
    }

    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        run(py, || write_placement(&self.placement, &self.index, &path))
    }

    fn write_mapping(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        run(py, || write_mapping(&self.placement, &path))
    }

    /// The same pages; those that served the queries of `log` most come first for each row.
    fn ordered_by_use(&self, py: Python<'_>, log: &Bound<'_, NativeQueryLog>) -> PyResult<Self> {
        let log = Arc::clone(&log.get().log);
        run(py, || {
            let index = Arc::new(index_by_use(&self.placement, &log)?);
            Ok(Self { placement: Arc::clone(&self.placement), index })
        })
    }

    fn page(&self, at: u32) -> Option<Vec<u32>> {
        self.placement.page(at).map(<[u32]>::to_vec)
    }

    fn pages_of(&self, row: u32) -> Vec<u32> {
        self.index.pages_of(row).to_vec()
    }

    fn info(&self) -> Plain<Value> {
        let placement = &self.placement;
        let mut pages_by_rows = vec![0_u64; placement.rows_per_page() as usize + 1];
        placement.pages().for_each(|page| count(&mut pages_by_rows, page.len()));
        let mut rows_by_pages = Vec::new();
        self.index.forward().iter().for_each(|pages| count(&mut rows_by_pages, pages.len()));
        Plain(json!({
            "row_count": placement.row_count(),
            "rows_per_page": placement.rows_per_page(),
            "page_count": placement.page_count(),
            "home_page_count": placement.home_page_count(),
            "replica_count": placement.replica_count(),
            "index_bytes": self.index.served_bytes(),
            "pages_by_rows": pages_by_rows,
            "rows_by_pages": rows_by_pages,
        }))
    }

    #[expect(clippy::too_many_arguments, reason = "one per argument of the Python method")]
    fn page_reads(
        &self,
        py: Python<'_>,
        log: &Bound<'_, NativeQueryLog>,
        select: &str,
        index_limit: Option<u32>,
        threads: usize,
    ) -> PyResult<Plain<Value>> {
        let log = Arc::clone(&log.get().log);
        run(py, || {
            let limited = index_limit.map(|limit| (*self.index).clone().limited(Some(limit)));
            let index = limited.as_ref().unwrap_or(&self.index);
            let reads = count_page_reads(index, &log, selection(select)?, threads)?;
            Ok(Plain(json!({
                "pages": reads.page_count(),
                "rows": reads.row_count(),
                "absent_rows": reads.absent_rows,
                "reads_by_useful_rows": reads.reads_by_useful_rows,
                "index_bytes": index.served_bytes(),
            })))
        })
    }

    fn connectivity_sum(&self, py: Python<'_>, log: &Bound<'_, NativeQueryLog>) -> PyResult<u64> {
        let log = Arc::clone(&log.get().log);
        run(py, || Ok(connectivity_sum(&self.placement, &log)))
    }
}

/// Adds one to the count of `at`.
fn count(counts: &mut Vec<u64>, at: usize) {
    if counts.len() <= at {
        counts.resize(at + 1, 0);
    }
    if let Some(count) = counts.get_mut(at) {
        *count += 1;
    }
}
