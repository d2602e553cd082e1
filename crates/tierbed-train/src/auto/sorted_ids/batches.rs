//! Batches put together again from the words of runs.

#![expect(clippy::indexing_slicing, reason = "bounds are those that were written")]

use tierbed_core::{Bags, Result};

use super::BatchSink;

/// A batch that is being put together.
pub(super) struct Joined<'a> {
    /// Whether ids of each feature are numbers of runs, `[F]`.
    is_open: &'a [bool],
    /// Checksum and bounds.
    head: Vec<i64>,
    rows: Vec<i64>,
}

impl<'a> Joined<'a> {
    pub(super) fn new(is_open: &'a [bool]) -> Self {
        Self { is_open, head: Vec::new(), rows: Vec::new() }
    }

    /// Takes the next words, of a run whose number `n` has row `rows[n]`; whole batches go to
    /// `sink`.
    ///
    /// # Errors
    /// Those of `sink`.
    pub(super) fn push(
        &mut self,
        words: &[i64],
        rows: &[i64],
        sink: &mut BatchSink<'_>,
    ) -> Result<()> {
        let head_len = self.is_open.len() + 2;
        let mut rest = words;
        loop {
            let (now, later) = rest.split_at(rest.len().min(head_len - self.head.len()));
            self.head.extend_from_slice(now);
            rest = later;
            if self.head.len() < head_len {
                return Ok(());
            }
            let first = self.rows.len();
            let missing = self.head[head_len - 1] as usize - first;
            let (now, later) = rest.split_at(rest.len().min(missing));
            self.rows.extend_from_slice(now);
            rest = later;
            self.replace(first, rows);
            if now.len() < missing {
                return Ok(());
            }
            // A batch without ids, too, whether or not more words come.
            self.pass(sink)?;
        }
    }

    // Replaces the numbers behind position `first` by their rows.
    fn replace(&mut self, first: usize, rows: &[i64]) {
        for (bounds, _) in self.head[1..].windows(2).zip(self.is_open).filter(|(_, open)| **open) {
            let end = (bounds[1] as usize).min(self.rows.len());
            let begin = (bounds[0] as usize).max(first).min(end);
            for number in &mut self.rows[begin..end] {
                *number = rows[*number as usize];
            }
        }
    }

    fn pass(&mut self, sink: &mut BatchSink<'_>) -> Result<()> {
        let [checksum, offsets @ ..] = self.head.as_slice() else { panic!("a batch has a head") };
        let feature_count = self.is_open.len();
        let bags = Bags { indices: &self.rows, offsets, weights: None, feature_count };
        sink(&bags, *checksum as u32)?;
        self.head.clear();
        self.rows.clear();
        Ok(())
    }

    /// Tells whether no part of a batch waits for the rest.
    pub(super) fn is_whole(&self) -> bool {
        self.head.is_empty()
    }
}
