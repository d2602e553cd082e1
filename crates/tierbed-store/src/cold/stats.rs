//! Counters of the store, those behind its amplifications.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cold::cost::PageRun;

/// Counters since the store was opened.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ColdStats {
    /// Record bytes given to `write`.
    pub user_bytes_written: u64,
    /// Runs written.
    pub run_count: u64,
    /// Bytes of the runs, keys and padding included.
    pub run_bytes: u64,
    /// Base ranges merged.
    pub ranges_merged: u64,
    /// Delta rows that merges merged.
    pub rows_merged: u64,
    /// Bytes merges read.
    pub merge_read_bytes: u64,
    /// Bytes merges wrote.
    pub merge_write_bytes: u64,
    /// Time spent in merges, microseconds.
    pub merge_us: u64,
    /// Ranges merged because the deltas had reached their bound.
    pub urgent_count: u64,
    /// Times the scheduler put merging off.
    pub deferred_count: u64,
    /// Runs given up because most of their rows were outdated.
    pub runs_compacted: u64,
    /// Rows of such runs that were written again.
    pub rows_compacted: u64,
    /// Pages that reads of rows wanted.
    pub pages_wanted: u64,
    /// Pages that they read.
    pub pages_read: u64,
    /// Requests that they made.
    pub request_count: u64,
    /// Requests that read unwanted pages on the way: sweeps rather than probes.
    pub sweep_count: u64,
    /// Rows asked for and never written.
    pub rows_absent: u64,
    /// Rows whose newest version is in a run, now.
    pub delta_rows: u64,
    /// Bytes of the base ranges, now.
    pub base_bytes: u64,
    /// Bytes of the extents that hold runs, now.
    pub delta_bytes: u64,
    /// Microseconds a request is taken to cost, now.
    pub request_us: f64,
    /// Microseconds a byte is taken to cost, now.
    pub byte_us: f64,
}

impl ColdStats {
    /// Returns device bytes written (runs and merges) per byte given to `write`.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        let written = self.run_bytes + self.merge_write_bytes;
        written as f64 / self.user_bytes_written.max(1) as f64
    }

    /// Returns what other stores do not count, by name.
    pub(crate) fn own(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("pages_wanted", self.pages_wanted),
            ("request_count", self.request_count),
            ("sweep_count", self.sweep_count),
            ("run_count", self.run_count),
            ("ranges_merged", self.ranges_merged),
            ("urgent_count", self.urgent_count),
            ("deferred_count", self.deferred_count),
            ("runs_compacted", self.runs_compacted),
            ("merge_us", self.merge_us),
            ("merge_read_bytes", self.merge_read_bytes),
            ("merge_write_bytes", self.merge_write_bytes),
        ])
    }

    pub(crate) fn count_read<'a>(&mut self, wanted: u64, runs: impl Iterator<Item = &'a PageRun>) {
        let (mut requests, mut read) = (0, 0);
        for run in runs {
            requests += 1;
            read += u64::from(run.count);
        }
        self.pages_wanted += wanted;
        self.pages_read += read;
        self.request_count += requests;
        // A read as a whole: which of its requests swept is not worth counting apart.
        if read > wanted {
            self.sweep_count += requests.min(read - wanted);
        }
    }
}
