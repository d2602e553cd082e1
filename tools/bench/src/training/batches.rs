//! The batches of a trace, over and over, and some of those ahead.

use std::collections::VecDeque;
use std::path::Path;

use tierbed_core::{Bags, Error, Result};
use tierbed_lab::trace::TraceReader;

/// Columns of a trace.
pub(crate) const FEATURE_COUNT: usize = 26;

/// Number `n` is batch `n` modulo the trace's.
#[derive(Debug)]
pub(crate) struct Batches {
    trace: TraceReader,
    batch_len: usize,
    batch_count: u64,
    offsets: Vec<i64>,
    /// Number of the first batch held.
    number: u64,
    /// Ids of batches read, nearest first.
    held: VecDeque<Vec<i64>>,
}

impl Batches {
    pub(crate) fn open(path: &Path, batch_len: usize) -> Result<Self> {
        let trace = TraceReader::open(path)?;
        let batch_count = trace.sample_count() / batch_len.max(1) as u64;
        if batch_count == 0 || batch_len == 0 {
            return Err(Error::invalid("the trace holds no whole batch")
                .with("samples", trace.sample_count())
                .with("batch_len", batch_len));
        }
        let offsets = (0..=(FEATURE_COUNT * batch_len) as i64).collect();
        Ok(Self { trace, batch_len, batch_count, offsets, number: 0, held: VecDeque::new() })
    }

    pub(crate) fn trace(&self) -> &TraceReader {
        &self.trace
    }

    /// Batches of an epoch.
    pub(crate) fn batch_count(&self) -> u64 {
        self.batch_count
    }

    /// Reads batch `number` and `ahead_count` batches behind it, those that are not held yet.
    pub(crate) fn read(&mut self, number: u64, ahead_count: usize) -> Result<()> {
        let passed = number.wrapping_sub(self.number).min(self.held.len() as u64);
        self.held.drain(..passed as usize);
        self.number = number;
        while self.held.len() <= ahead_count {
            let ids = self.ids(number + self.held.len() as u64)?;
            self.held.push_back(ids);
        }
        Ok(())
    }

    fn ids(&mut self, number: u64) -> Result<Vec<i64>> {
        let first = number % self.batch_count * self.batch_len as u64;
        let mut ids = Vec::new();
        self.trace.read(first, self.batch_len, &mut ids)?;
        Ok(ids)
    }

    /// Returns how many batches are held.
    pub(crate) fn held_count(&self) -> usize {
        self.held.len()
    }

    /// Returns the batch `ahead` batches behind the one read last.
    ///
    /// # Panics
    /// When it was not read.
    pub(crate) fn bags(&self, ahead: usize) -> Result<Bags<'_>> {
        let Some(ids) = self.held.get(ahead) else { panic!("batch {ahead} ahead was not read") };
        Bags::new(ids, &self.offsets, None, FEATURE_COUNT)
    }

    /// Counts the distinct rows of `count` batches, each for itself.
    pub(crate) fn count_rows(&mut self, first: u64, count: u64) -> Result<u64> {
        let mut rows = 0;
        for number in first..first + count {
            for ids in self.ids(number)?.chunks_mut(self.batch_len) {
                ids.sort_unstable();
                rows += ids.chunk_by(|a, b| a == b).count() as u64;
            }
        }
        Ok(rows)
    }
}
