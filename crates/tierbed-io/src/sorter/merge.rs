//! Merge of sorted runs by a heap of run numbers.
#![expect(clippy::indexing_slicing, reason = "the heap holds numbers of readers")]

use tierbed_core::Result;

use super::lengths::Lengths;
use super::scratch::{Run, RunReader, RunWriter, Scratch};
use crate::PAGE_BYTES;

/// Bytes of the longest read: larger ones gain nothing.
const READ_BYTES_MAX: usize = 1 << 20;
/// Bytes of the shortest read, where so many runs can be merged at once with it.
const READ_BYTES_LEAST: usize = 32 << 10;
const RUNS_AT_ONCE_LEAST: usize = 16;
/// Bytes of a reader and its place in the heap, without its buffers.
const READER_BYTES: usize = 256;

/// Returns how many runs can be merged at once: a read and a record each, and a page to write.
///
/// Reads are not made so short that the disk answers one by one: merging some runs before costs a
/// second write of them, which takes less time.
pub(super) fn fan_in(memory_bytes: usize, record_bytes: usize) -> usize {
    let at_once = |read_bytes: usize| {
        let reader_bytes = read_bytes + record_bytes + READER_BYTES;
        memory_bytes.saturating_sub(PAGE_BYTES) / reader_bytes
    };
    match at_once(READ_BYTES_LEAST) {
        few if few < RUNS_AT_ONCE_LEAST => at_once(PAGE_BYTES).max(2),
        many => many,
    }
}

/// Returns the memory in which `run_count` runs are merged at once with reads of `read_bytes`.
pub(super) fn memory_bytes(run_count: usize, record_bytes: usize, read_bytes: usize) -> u64 {
    let reader_bytes = (read_bytes + record_bytes + READER_BYTES) as u64;
    run_count as u64 * reader_bytes + PAGE_BYTES as u64
}

/// Merges neighbouring runs into longer ones until all can be merged at once, as few as suffice;
/// the order of equal keys stays. Returns how often it went over the runs.
pub(super) fn reduce(scratch: &mut Scratch, lengths: &Lengths, memory_bytes: usize) -> Result<u64> {
    let at_once = fan_in(memory_bytes, lengths.longest_bytes);
    let (mut pass_count, mut at) = (0, 0);
    while scratch.runs().len() > at_once {
        if at + 1 >= scratch.runs().len() {
            at = 0;
        }
        pass_count += u64::from(at == 0);
        let surplus = scratch.runs().len() - at_once + 1;
        let count = surplus.min(at_once).min(scratch.runs().len() - at);
        let group = scratch.take_runs(at..at + count);
        // The write buffer gets as much as each read buffer.
        let share = memory_bytes / (count + 1);
        let mut merge = Merge::open(&group, lengths, share * count)?;
        let mut run = RunWriter::new(scratch, share)?;
        while let Some(record) = merge.next()? {
            run.push(record)?;
        }
        run.finish_at(at)?;
        at += 1;
    }
    Ok(pass_count)
}

/// A merge of runs: a binary heap of run numbers, smallest current record first.
#[derive(Debug)]
pub(super) struct Merge {
    readers: Vec<RunReader>,
    heap: Vec<Top>,
    lengths: Lengths,
    /// The top run's record was handed out and is to be advanced.
    is_top_spent: bool,
}

/// A run by the head of its current record's key.
#[derive(Debug, Clone, Copy)]
struct Top {
    head: u64,
    run: usize,
}

impl Merge {
    pub(super) fn open(runs: &[Run], lengths: &Lengths, memory_bytes: usize) -> Result<Self> {
        assert!(!runs.is_empty(), "a merge of no runs");
        let share = memory_bytes / runs.len();
        let share = share.saturating_sub(lengths.longest_bytes + READER_BYTES);
        let buffer_bytes = (share.min(READ_BYTES_MAX) / PAGE_BYTES).max(1) * PAGE_BYTES;
        let mut merge = Self {
            readers: Vec::with_capacity(runs.len()),
            heap: Vec::with_capacity(runs.len()),
            lengths: lengths.clone(),
            is_top_spent: false,
        };
        for (run, number) in runs.iter().zip(0..) {
            let mut reader = RunReader::new(run.clone(), buffer_bytes, lengths.longest_bytes);
            if reader.advance(lengths)? {
                merge.heap.push(Top { head: lengths.head(reader.record()), run: number });
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
            let reader = &mut self.readers[self.heap[0].run];
            if reader.advance(&self.lengths)? {
                self.heap[0].head = self.lengths.head(reader.record());
            } else {
                self.heap.swap_remove(0);
            }
            self.sift_down(0);
        }
        let top = self.heap.first();
        self.is_top_spent = top.is_some();
        Ok(top.map(|top| self.readers[top.run].record()))
    }

    fn is_before(&self, a: Top, b: Top) -> bool {
        if a.head != b.head {
            return a.head < b.head;
        }
        let rest = |top: Top| self.lengths.rest(self.readers[top.run].record());
        // Equal keys leave in the order of their runs.
        (rest(a), a.run) < (rest(b), b.run)
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
