//! Replays of query logs through cache policies, for Python.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tierbed_bench::generated_log;
use tierbed_bench::samples::SampleQueries;
use tierbed_cache::{AdmissionRule, PolicyKind, ReplayCache, ReplayCounts, RowClass, TierOptions};
use tierbed_core::Result;
use tierbed_lab::bounds::{farthest_next_use, perfect_hits, Requests};
use tierbed_lab::{GeneratorOptions, Replays};
use tierbed_placement::{read_log, QueryLog, QuerySource, ReadOptions, TextQueries};

use crate::errors::run;
use crate::placement::NativeQueryLog;
use crate::plain::Plain;
use crate::progress::Progress;

/// Adds this module's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cache_policies, module)?)?;
    module.add_class::<CacheLog>()?;
    module.add_class::<GeneratedLog>()
}

/// Returns the names of the eviction policies.
#[pyfunction]
fn cache_policies() -> Vec<&'static str> {
    PolicyKind::registered().iter().map(|kind| kind.name()).collect()
}

/// Groups, perfect hits, rows and hits.
type Counts = (u64, u64, u64, u64);

/// Queries of a held log that go through all caches before the next ones do.
const PIECE: usize = 1 << 16;

/// A query log in memory, its rows numbered densely in the order of appearance.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct CacheLog {
    offsets: Vec<u64>,
    rows: Vec<u32>,
    /// Table of each row, `[distinct rows]`.
    tables: Arc<[u16]>,
}

impl CacheLog {
    /// Numbers the rows of a log anew; `table_of` tells the table of one.
    fn numbered(log: QueryLog, table_of: impl Fn(u32) -> u16) -> Self {
        let (offsets, mut rows) = log.into_parts();
        let mut numbers: HashMap<u32, u32> = HashMap::new();
        let mut tables = Vec::new();
        for row in &mut rows {
            *row = *numbers.entry(*row).or_insert_with(|| {
                tables.push(table_of(*row));
                tables.len() as u32 - 1
            });
        }
        Self { offsets, rows, tables: tables.into() }
    }

    fn requests(&self) -> Result<Requests<'_>> {
        Requests::new(&self.offsets, &self.rows, self.tables.len())
    }
}

#[pymethods]
impl CacheLog {
    /// Reads `path`: samples in Criteo's layout, or one query per line.
    #[new]
    #[expect(clippy::indexing_slicing, reason = "the source knows the column of each of its rows")]
    fn new(py: Python<'_>, path: PathBuf, query_count_max: Option<u64>) -> PyResult<Self> {
        run(py, || {
            let options = ReadOptions { query_count_max, ..ReadOptions::default() };
            let read =
                |source: &mut dyn QuerySource| read_log(source, &options, &mut |_, _| Ok(()));
            if SampleQueries::is_layout_of(&path)? {
                let mut source = SampleQueries::open(&path)?;
                let log = read(&mut source)?;
                let columns = source.column_of_rows();
                Ok(Self::numbered(log, |row| columns[row as usize]))
            } else {
                Ok(Self::numbered(read(&mut TextQueries::open(&path)?)?, |_| 0))
            }
        })
    }

    /// Copies the queries of a log that is in memory. Its rows are those of tables of
    /// `table_rows`, one after the other; those beyond are of one more.
    #[staticmethod]
    fn of(py: Python<'_>, log: &NativeQueryLog, table_rows: Vec<u64>) -> PyResult<Self> {
        run(py, || {
            let ends = table_rows.iter().scan(0u64, |end, rows| {
                *end = end.saturating_add(*rows);
                Some(*end)
            });
            let ends: Vec<u64> = ends.collect();
            let table_of = |row: u32| ends.partition_point(|&end| end <= u64::from(row)) as u16;
            Ok(Self::numbered(QueryLog::clone(&log.log), table_of))
        })
    }

    /// Queries, rows asked for, distinct rows.
    fn sizes(&self) -> (usize, usize, usize) {
        (self.offsets.len() - 1, self.rows.len(), self.tables.len())
    }

    /// Replays the log from an empty cache; counts from query `first` on. `threshold` is that of
    /// the admission bitmap, 0 admits always.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python method")]
    fn replay(
        &self,
        py: Python<'_>,
        policy: &str,
        capacity_rows: usize,
        first: usize,
        threshold: u8,
    ) -> PyResult<Counts> {
        run(py, || {
            let kind = PolicyKind::from_name(policy)?;
            let admission = match threshold {
                0 => AdmissionRule::Always,
                threshold => AdmissionRule::Bitmap { threshold, age_after: 0 },
            };
            let cache = ReplayCache::new(kind, self.tables.len(), capacity_rows)?;
            let mut cache =
                cache.with_tables(Arc::clone(&self.tables))?.with_admission(admission)?;
            let mut before = ReplayCounts::default();
            for (at, rows) in self.requests()?.iter().enumerate() {
                if at == first {
                    before = cache.counts();
                }
                cache.ask(rows)?;
            }
            Ok(tuple(cache.counts().since(before)))
        })
    }

    /// Replays the log through every cache of a policy and so many rows, from empty caches; counts
    /// from query `first` on.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python method")]
    fn replay_each(
        &self,
        py: Python<'_>,
        caches: Vec<(String, usize)>,
        first: u64,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Counts>> {
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let mut replays = Replays::new(&kinds_of(&caches)?, &self.tables, first)?;
            let groups: Vec<&[u32]> = self.requests()?.iter().collect();
            let mut done = 0;
            for piece in groups.chunks(PIECE) {
                replays.ask(piece, threads)?;
                done += piece.len();
                told.tell(done as u64, groups.len() as u64)?;
            }
            Ok(replays.counts())
        });
        Ok(told.finish(result)?.into_iter().map(tuple).collect())
    }

    /// Replays the log with the eviction of the row needed last.
    fn replay_farthest(&self, py: Python<'_>, capacity_rows: usize) -> PyResult<Counts> {
        run(py, || Ok(tuple(farthest_next_use(&self.requests()?, capacity_rows))))
    }

    /// Brackets perfect hits: a greedy schedule, the bound by area, queries with a new row.
    fn perfect_bounds(&self, py: Python<'_>, capacity_rows: usize) -> PyResult<(u64, u64, u64)> {
        run(py, || {
            let bounds = perfect_hits(&self.requests()?, capacity_rows);
            Ok((bounds.greedy, bounds.upper, bounds.first_seen))
        })
    }

    /// Sends the log to a simulated SSD; options and result are JSON.
    fn replay_ssd(&self, py: Python<'_>, options: &str) -> PyResult<String> {
        run(py, || Ok(tierbed_bench::ssd::replay(&self.requests()?, options)?.to_string()))
    }

    /// Returns the rows of `row_bytes`, of `row_count` there are, that a tier of `capacity_bytes`
    /// holds, all metadata included.
    #[staticmethod]
    fn rows_within(
        py: Python<'_>,
        policy: &str,
        row_bytes: usize,
        row_count: u64,
        capacity_bytes: u64,
    ) -> PyResult<u64> {
        run(py, || {
            let row_words = row_bytes.div_ceil(size_of::<f32>());
            let classes = vec![RowClass { row_words, row_count }];
            let policy = PolicyKind::from_name(policy)?;
            let tables = vec![row_count];
            TierOptions { capacity_bytes, classes, tables, policy }.rows_max()
        })
    }

    /// Returns the bytes of `policy` per cached row.
    #[staticmethod]
    fn policy_bytes(py: Python<'_>, policy: &str) -> PyResult<usize> {
        run(py, || Ok(PolicyKind::from_name(policy)?.build().bytes_per_slot()))
    }
}

/// Generated samples, made anew for each pass of replays.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct GeneratedLog {
    log: generated_log::GeneratedLog,
}

#[pymethods]
impl GeneratedLog {
    /// Numbers the rows of `sample_count` samples; `options` is as of `Generator`.
    #[new]
    fn new(
        py: Python<'_>,
        options: Plain<GeneratorOptions>,
        sample_count: u64,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let tell = &mut |done, total| told.tell(done, total);
            generated_log::GeneratedLog::new(options.0, sample_count, threads, tell)
        });
        Ok(Self { log: told.finish(result)? })
    }

    /// Queries, rows asked for, distinct rows.
    fn sizes(&self) -> (u64, u64, usize) {
        self.log.sizes()
    }

    /// Replays the samples through every cache; as of `CacheLog`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python method")]
    fn replay_each(
        &self,
        py: Python<'_>,
        caches: Vec<(String, usize)>,
        first: u64,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Counts>> {
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let tell = &mut |done, total| told.tell(done, total);
            self.log.replay_each(&kinds_of(&caches)?, first, threads, tell)
        });
        Ok(told.finish(result)?.into_iter().map(tuple).collect())
    }
}

fn kinds_of(caches: &[(String, usize)]) -> Result<Vec<(PolicyKind, usize)>> {
    caches.iter().map(|(name, rows)| Ok((PolicyKind::from_name(name)?, *rows))).collect()
}

fn tuple(counts: ReplayCounts) -> Counts {
    (counts.groups, counts.perfect_hits, counts.rows, counts.hits)
}
