//! Division of the budget among windows, buffers and lists.

#![expect(clippy::indexing_slicing, reason = "size classes are those of the homes")]

use std::sync::Arc;

use tierbed_core::{Error, Result, Schema, TableSchema};
use tierbed_io::PAGE_BYTES;

use super::extents::{Bucket, Chunk};
use super::lists::{BlockShape, ListCounts};
use super::row_mover::RowMover;
use super::size_class::ENTRY_BYTES;
use super::spans::{choose_span_windows, open_lists, Spans};
use super::unplanned::UnplannedWriter;
use super::window_rows::{Home, WindowRows};
use crate::planned::plan::EpochPlan;

/// Longest I/O buffer, which is also the usual extent.
pub(crate) const BUF_BYTES_MAX: usize = 256 << 10;
/// Share of the memory that I/O buffers get.
const IO_SHARE: u64 = 16;
/// Buffers of the I/O engine.
const DEPTH_MIN: u64 = 2;
const DEPTH_MAX: u64 = 64;
/// With spans two reads must leave a buffer to write from.
const DEPTH_MIN_SPANS: u32 = 4;
/// Least memory kept for lists of chunks, which grow with what is on disk.
const SLACK_MIN_BYTES: u64 = 32 << 10;
/// Memory kept per chunk expected: twice its place in a list, and as much to be wrong by.
const CHUNK_BYTES: u64 = 4 * size_of::<Chunk>() as u64;
/// Mean flush is this many thousandths of (memory squared / table bytes), measured on a
/// Criteo-shaped trace.
const FLUSH_THOUSANDTHS: u128 = 30;
/// About the tenths of a budget that are left for waiting rows, windows and buffers apart.
const USUAL_SHARE_TENTHS: u64 = 7;

/// What one size class needs and gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClassSize {
    pub(crate) words: usize,
    pub(crate) blocks: BlockShape,
    /// Half the rows of its largest window, and a few: fewer would mean writing pages that are
    /// hardly filled.
    rows_min: usize,
    /// Rows the plan ever uses: more room helps nobody.
    rows_max: usize,
    entry_count: u64,
}

/// What decides whether windows share buckets while they are far away.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpanRequest {
    /// Memory of the store, and what of it is left for waiting rows and lists of chunks.
    pub(crate) limit_bytes: u64,
    pub(crate) free_bytes: u64,
    /// Windows of a span as the caller wants it; `None` leaves the choice to the memory.
    pub(crate) wanted: Option<usize>,
    /// Windows of the spans that rows wait in already; 0 when they do not.
    pub(crate) stored: usize,
}

/// Everything that is sized at opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) classes: Vec<ClassSize>,
    pub(crate) homes: Vec<Home>,
    pub(crate) buf_bytes: usize,
    pub(crate) queue_depth: u32,
    /// Bytes of an extent that waste little: an eighth of a mean bucket.
    pub(crate) extent_bytes: usize,
    /// Least bytes of an extent or a buffer: the longest record, in whole pages.
    pub(crate) stored_pages_bytes: usize,
    /// Blocks of the plan, directory, row ids.
    pub(crate) window_bytes: u64,
    /// Two windows in memory, and notes between them.
    pub(crate) arenas_bytes: u64,
    /// Entries of the window that has most.
    pub(crate) entries_max: usize,
    /// Words of the records of the window that has most.
    pub(crate) words_max: usize,
    /// Kept free for lists of chunks.
    pub(crate) slack_bytes: u64,
    /// Windows that share a bucket while they are far.
    pub(crate) spans: Arc<Spans>,
    /// Bytes of the rows that the plan uses.
    used_bytes: u64,
}

impl ClassSize {
    /// Words of an entry and its record.
    fn row_words(&self) -> usize {
        1 + self.words
    }

    /// What it gets of the memory, compared with others.
    fn weight(&self) -> u128 {
        u128::from(self.entry_count) * self.row_words() as u128
    }

    /// Returns the least memory of the size class.
    fn bytes_min(&self, list_count: usize) -> u64 {
        self.buckets_bytes(list_count)
            + BlockShape::bytes_min(list_count, self.row_words(), self.rows_min)
    }

    fn buckets_bytes(&self, list_count: usize) -> u64 {
        (size_of::<Bucket>() * list_count) as u64
    }

    /// Makes blocks of `memory_bytes`; returns the memory of the size class.
    fn cut(&mut self, lists: ListCounts, memory_bytes: u64) -> u64 {
        let buckets_bytes = self.buckets_bytes(lists.all);
        let lists_bytes = memory_bytes.saturating_sub(buckets_bytes);
        let rows_max = self.rows_max.max(self.rows_min);
        self.blocks = BlockShape::new(lists_bytes, lists, self.row_words(), rows_max);
        buckets_bytes + self.blocks.memory_bytes(lists.all, self.row_words())
    }
}

impl Sizes {
    /// Finds what the tables of `schema` need along `plan`.
    pub(crate) fn needs(schema: &Schema, plan: &EpochPlan, limit_bytes: u64) -> Self {
        let (mut classes, homes) = size_classes_of(schema);
        let (entries_max, words_max) = note_windows(plan, &homes, &mut classes);
        let stored_max = classes.iter().map(|class| ENTRY_BYTES + 4 * class.words).max();
        let buf_min = stored_max.unwrap_or(0).next_multiple_of(PAGE_BYTES);
        let flush_bytes = flush_bytes(&classes, limit_bytes);
        let bucket_bytes = all_rows_bytes(&classes) / plan.window_count().max(1) as u64;
        let used_bytes = used_bytes(&classes, plan.row_count_max());
        let has_ids = schema.tables().iter().any(TableSchema::is_own);
        let mut sizes = Self {
            classes,
            homes,
            buf_bytes: 0,
            queue_depth: 0,
            // Blocks of three windows, and the row ids of one for scans.
            // With ids to translate, those of the window that is trained, too.
            window_bytes: plan.directory_bytes()
                + 3 * plan.block_bytes_max() as u64
                + 8 * entries_max as u64 * if has_ids { 2 } else { 1 },
            arenas_bytes: 2 * WindowRows::memory_bytes(words_max, entries_max)
                + RowMover::memory_bytes(entries_max),
            entries_max,
            words_max,
            extent_bytes: extent_bytes(bucket_bytes, buf_min),
            stored_pages_bytes: buf_min,
            slack_bytes: 0,
            spans: Arc::new(spans_of(plan, 0, false)),
            used_bytes,
        };
        sizes.cut_buffers(limit_bytes, flush_bytes);
        let mean_bytes = chunk_bytes(flush_bytes, sizes.extent_bytes, sizes.buf_bytes);
        sizes.slack_bytes = slack_bytes(used_bytes, mean_bytes);
        sizes
    }

    // Cuts the share of I/O buffers so that a flush fills one or a few.
    fn cut_buffers(&mut self, limit_bytes: u64, flush_bytes: u64) {
        let io_bytes = limit_bytes.min(1 << 40) / IO_SHARE;
        let buf_bytes = (io_bytes / 8).min(2 * flush_bytes).min(BUF_BYTES_MAX as u64) as usize;
        self.buf_bytes = buf_bytes.next_multiple_of(PAGE_BYTES).max(self.stored_pages_bytes);
        let queue_depth = (io_bytes / self.buf_bytes as u64).clamp(DEPTH_MIN, DEPTH_MAX);
        self.queue_depth = queue_depth as u32;
    }

    /// Returns about the bytes that are taken whatever waits.
    pub(crate) fn fixed_bytes(&self) -> u64 {
        let buffers = u64::from(self.queue_depth) + 1;
        self.window_bytes + self.arenas_bytes + buffers * self.buf_bytes as u64
    }

    /// Returns the bytes for the rows of a span on the way to its windows.
    pub(crate) fn staging_bytes(&self) -> usize {
        // Nothing is split while rows move.
        match self.spans.span_windows() > 0 && self.words_max > 0 {
            true => self.buf_bytes,
            false => 0,
        }
    }

    /// Lets windows share buckets while they are far, when the free memory is too little for a
    /// bucket each, or when the request wants it. A store whose rows wait in spans keeps those.
    pub(crate) fn share_buckets(&mut self, plan: &EpochPlan, request: SpanRequest) {
        let SpanRequest { limit_bytes, free_bytes, wanted, stored } = request;
        let window_count = plan.window_count();
        let lists_bytes = free_bytes.saturating_sub(self.slack_bytes);
        let wanted =
            wanted.unwrap_or_else(|| choose_span_windows(self.weigh(lists_bytes), window_count));
        let span_windows = if stored > 0 { stored } else { wanted };
        let spans = spans_of(plan, span_windows, wanted > 0);
        if spans.span_windows() == 0 {
            // Flushes follow the memory that waiting rows have, not what the store has.
            let waiting_bytes = free_bytes / USUAL_SHARE_TENTHS * 10;
            let flush_bytes = flush_bytes(&self.classes, waiting_bytes.min(limit_bytes));
            let mean_bytes = chunk_bytes(flush_bytes, self.extent_bytes, self.buf_bytes);
            self.slack_bytes = slack_bytes(self.used_bytes, mean_bytes);
            return;
        }
        let open_count = open_lists(window_count, span_windows) as u64;
        if wanted > 0 {
            self.extent_bytes = extent_bytes(self.used_bytes / open_count, self.stored_pages_bytes);
            // The largest lists are flushed.
            let flush_bytes = self.weigh(free_bytes / 4 * 3) / open_count;
            self.cut_buffers(limit_bytes, flush_bytes.max(1));
            let mean_bytes = chunk_bytes(flush_bytes.max(1), self.extent_bytes, self.buf_bytes);
            self.slack_bytes = slack_bytes(self.used_bytes, mean_bytes);
        }
        self.queue_depth = self.queue_depth.max(DEPTH_MIN_SPANS);
        self.window_bytes += spans.memory_bytes();
        self.spans = Arc::new(spans);
    }

    // The part of `bytes` that a list of a size class gets on average, weighted by its bytes: size
    // classes have lists of their own.
    fn weigh(&self, bytes: u64) -> u64 {
        let weights = || self.classes.iter().map(ClassSize::weight);
        let all = weights().sum::<u128>().max(1);
        let squares: u128 = weights().map(|weight| (weight << 16) / all).map(|w| w * w).sum();
        ((u128::from(bytes) * squares) >> 32) as u64
    }

    /// Sizes lists for moving rows, where they are write buffers only and no window is trained
    /// on; returns the bytes that unplanned rows are gathered in.
    pub(crate) fn for_moving(&mut self) -> u64 {
        let buf_bytes = self.buf_bytes;
        (self.words_max, self.entries_max, self.arenas_bytes) = (0, 0, 0);
        let writer = |class: &mut ClassSize| {
            let page_rows = PAGE_BYTES.div_ceil(4 * class.words);
            class.rows_min = class.rows_min.min(page_rows).max(1);
            UnplannedWriter::memory_bytes(4 * class.words, buf_bytes) as u64
        };
        self.classes.iter_mut().map(writer).sum()
    }

    /// Shares `free_bytes` out among the size classes; returns the bytes that all size classes
    /// take.
    ///
    /// # Errors
    /// `Invalid` when the least memory does not fit; `used_bytes` are those taken
    /// before, so that the error can name the smallest budget that would do.
    pub(crate) fn share_out(&mut self, used_bytes: u64, free_bytes: u64) -> Result<u64> {
        let window_count = self.spans.window_count();
        let lists = ListCounts {
            all: self.spans.list_count(),
            open: open_lists(window_count, self.spans.span_windows()),
        };
        let need = |class: &ClassSize| class.bytes_min(lists.all);
        let needed_bytes = self.slack_bytes + self.classes.iter().map(need).sum::<u64>();
        if needed_bytes > free_bytes {
            let minimum = used_bytes + needed_bytes;
            return Err(Error::invalid("dram budget is too small for this plan")
                .with_minimum_bytes(minimum)
                .with(
                    "remedy",
                    format_args!(
                        "raise dram_budget to at least {minimum} bytes, or plan smaller windows"
                    ),
                ));
        }
        let spare_bytes = free_bytes - needed_bytes;
        let all: u128 = self.classes.iter().map(ClassSize::weight).sum::<u128>().max(1);
        let mut taken_bytes = 0;
        for class in &mut self.classes {
            let share_bytes = (u128::from(spare_bytes) * class.weight() / all) as u64;
            taken_bytes += class.cut(lists, class.bytes_min(lists.all) + share_bytes);
        }
        let bound_bytes = free_bytes - self.slack_bytes;
        assert!(taken_bytes <= bound_bytes, "{taken_bytes} of {bound_bytes} bytes are shared out");
        Ok(taken_bytes)
    }
}

/// Puts tables with records of one length on one size class; returns the size classes, with the
/// rows of their tables as `rows_max`, and the home of each table.
pub(crate) fn size_classes_of(schema: &Schema) -> (Vec<ClassSize>, Vec<Home>) {
    let mut classes: Vec<ClassSize> = Vec::new();
    let mut homes = Vec::new();
    for table in schema.tables() {
        let words = table.record_words();
        let at = classes.iter().position(|class| class.words == words);
        let at = at.unwrap_or_else(|| {
            classes.push(ClassSize { words, ..ClassSize::default() });
            classes.len() - 1
        });
        homes.push(Home { class: at, words });
        classes[at].rows_max += table.row_count as usize;
    }
    (classes, homes)
}

/// Cuts the windows of `plan` into spans.
pub(crate) fn spans_of(plan: &EpochPlan, span_windows: usize, is_filled: bool) -> Spans {
    Spans::new(window_entries(plan), span_windows, is_filled)
}

fn window_entries(plan: &EpochPlan) -> impl Iterator<Item = u64> + '_ {
    plan.counts().map(|counts| counts.iter().map(|&count| u64::from(count)).sum())
}

// Bytes of `row_count_max` rows, or of those of all tables if they are fewer.
fn used_bytes(classes: &[ClassSize], row_count_max: u64) -> u64 {
    let row_count = classes.iter().map(|class| class.rows_max as u64).sum::<u64>().max(1);
    let used = row_count_max.min(row_count);
    (u128::from(all_rows_bytes(classes)) * u128::from(used) / u128::from(row_count)).max(1) as u64
}

// An eighth of a bucket, so that half an extent is not much of it.
fn extent_bytes(bucket_bytes: u64, least: usize) -> usize {
    (bucket_bytes / 8).clamp(least as u64, BUF_BYTES_MAX.max(least) as u64) as usize
}

// What lists of chunks may come to take, when this is the mean length of chunks.
fn slack_bytes(used_bytes: u64, mean_chunk_bytes: u64) -> u64 {
    (used_bytes / mean_chunk_bytes * CHUNK_BYTES).max(SLACK_MIN_BYTES)
}

// The rows that the plan may use, all of them.
fn all_rows_bytes(classes: &[ClassSize]) -> u64 {
    let bytes = |class: &ClassSize| (class.rows_max * 4 * class.words) as u64;
    classes.iter().map(bytes).sum::<u64>().max(1)
}

// How many bytes a list has, on average, when it is flushed: more memory, longer lists.
fn flush_bytes(classes: &[ClassSize], limit_bytes: u64) -> u64 {
    let memory_bytes = u128::from(limit_bytes.min(1 << 40));
    let bytes = memory_bytes * memory_bytes * FLUSH_THOUSANDTHS / 1000;
    (bytes / u128::from(all_rows_bytes(classes))).clamp(1, 1 << 40) as u64
}

// How long a chunk is on average: a flush is cut where an extent or a buffer ends, and begins
// behind what the extent holds already.
fn chunk_bytes(flush_bytes: u64, extent_bytes: usize, buf_bytes: usize) -> u64 {
    let cut_bytes = extent_bytes.min(buf_bytes) as u64;
    (flush_bytes * cut_bytes / (flush_bytes + cut_bytes)).max(PAGE_BYTES as u64)
}

// Notes what each size class needs in each window; returns entries and words of the largest
// windows.
fn note_windows(plan: &EpochPlan, homes: &[Home], classes: &mut [ClassSize]) -> (usize, usize) {
    let (mut entries_max, mut words_max) = (0, 0);
    let mut now = vec![0usize; classes.len()];
    for counts in plan.counts() {
        assert_eq!(counts.len(), homes.len(), "the plan is for other tables");
        now.fill(0);
        for (home, &count) in homes.iter().zip(counts) {
            now[home.class] += count as usize;
        }
        for (class, now) in classes.iter_mut().zip(&now) {
            class.rows_min = class.rows_min.max(*now);
            class.entry_count += *now as u64;
        }
        entries_max = entries_max.max(now.iter().sum());
        let words = classes.iter().zip(&now).map(|(class, now)| class.words * now).sum();
        words_max = words_max.max(words);
    }
    for class in classes {
        class.rows_max =
            class.rows_max.min(usize::try_from(class.entry_count).unwrap_or(usize::MAX));
        class.rows_min = (class.rows_min / 2 + 4).min(class.rows_max.max(1));
    }
    (entries_max, words_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_shorter_than_flushes_extents_and_buffers() {
        let page = PAGE_BYTES as u64;
        // A long flush is cut by every extent, and then begins where the last one ended.
        assert_eq!(chunk_bytes(64 * page, 64 * PAGE_BYTES, 64 * PAGE_BYTES), 32 * page);
        assert!(chunk_bytes(1000 * page, 8 * PAGE_BYTES, 64 * PAGE_BYTES) < 8 * page);
        assert!(chunk_bytes(1000 * page, 64 * PAGE_BYTES, 8 * PAGE_BYTES) < 8 * page);
        // A short one nearly never; and no chunk is shorter than a page.
        assert!(chunk_bytes(4 * page, 1000 * PAGE_BYTES, 1000 * PAGE_BYTES) > 3 * page);
        assert_eq!(chunk_bytes(1, 64 * PAGE_BYTES, 64 * PAGE_BYTES), page);
    }
}
