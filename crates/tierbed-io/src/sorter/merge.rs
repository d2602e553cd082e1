//! Merge of sorted runs by a heap of run numbers.
#![expect(clippy::indexing_slicing, reason = "the heap holds numbers of readers")]

use tierbed_core::Result;

use super::scratch::{Run, RunReader, RunWriter, Scratch};
use crate::PAGE_BYTES;

/// Bytes of the longest read: larger ones gain nothing.
const READ_BYTES_MAX: usize = 1 << 20;

/// Returns how many runs can be merged at once: a page each, a record each, and a page to write.
pub(super) fn fan_in(memory_bytes: usize, record_bytes: usize) -> usize {
    (memory_bytes.saturating_sub(PAGE_BYTES) / (PAGE_BYTES + record_bytes)).max(2)
}

/// Merges groups of neighbouring runs into longer runs; the order of equal keys stays.
pub(super) fn merge_pass(
    scratch: &mut Scratch,
    key_bytes: usize,
    record_bytes: usize,
    memory_bytes: usize,
) -> Result<()> {
    let mut next = scratch.next_generation();
    for group in scratch.runs().chunks(fan_in(memory_bytes, record_bytes)) {
        // The write buffer gets as much as each read buffer.
        let share = memory_bytes / (group.len() + 1);
        let mut merge = Merge::open(group, key_bytes, record_bytes, share * group.len())?;
        let mut run = RunWriter::new(&mut next, share)?;
        while let Some(record) = merge.next()? {
            run.push(record)?;
        }
        run.finish()?;
    }
    *scratch = next;
    Ok(())
}

/// A merge of runs: a binary heap of run numbers, smallest current record first.
#[derive(Debug)]
pub(super) struct Merge {
    readers: Vec<RunReader>,
    heap: Vec<usize>,
    key_bytes: usize,
    /// The top run's record was handed out and is to be advanced.
    is_top_spent: bool,
}

impl Merge {
    pub(super) fn open(
        runs: &[Run],
        key_bytes: usize,
        record_bytes: usize,
        memory_bytes: usize,
    ) -> Result<Self> {
        assert!(!runs.is_empty(), "a merge of no runs");
        let share = (memory_bytes / runs.len()).saturating_sub(record_bytes);
        let buffer_bytes = (share.min(READ_BYTES_MAX) / PAGE_BYTES).max(1) * PAGE_BYTES;
        let mut merge =
            Self { readers: Vec::new(), heap: Vec::new(), key_bytes, is_top_spent: false };
        for run in runs {
            let mut reader = RunReader::new(run.clone(), buffer_bytes, record_bytes);
            if reader.advance()? {
                merge.heap.push(merge.readers.len());
            }
            merge.readers.push(reader);
        }
        for at in (0..merge.heap.len() / 2).rev() {
            merge.sift_down(at);
        }
        Ok(merge)
    }

    /// Returns the smallest record not yet returned.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>> {
        if std::mem::take(&mut self.is_top_spent) {
            let top = self.heap[0];
            if !self.readers[top].advance()? {
                self.heap.swap_remove(0);
            }
            self.sift_down(0);
        }
        let top = self.heap.first();
        self.is_top_spent = top.is_some();
        Ok(top.map(|&run| self.readers[run].record()))
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        let key = |run: usize| {
            let (key, _) = self.readers[run].record().split_at(self.key_bytes);
            // Equal keys leave in the order of their runs.
            (key, run)
        };
        key(a) < key(b)
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let mut least = at;
            for child in [2 * at + 1, 2 * at + 2] {
                if child < self.heap.len() && self.is_before(self.heap[child], self.heap[least]) {
                    least = child;
                }
            }
            if least == at {
                return;
            }
            self.heap.swap(at, least);
            at = least;
        }
    }
}
