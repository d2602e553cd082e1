//! How is the budget shared among windows, buffers and lists?

use tierbed_core::{Error, Result, Schema};
use tierbed_io::PAGE_BYTES;

use super::extents::{Bucket, Chunk};
use super::ferry::Ferry;
use super::lists::BlockShape;
use super::parking::Parking;
use super::shelf::ENTRY_BYTES;
use super::window::{Home, Live};
use crate::plan::Plan;

/// Longest I/O buffer, which is also the usual extent.
pub(crate) const BUF_BYTES_MAX: usize = 256 << 10;
/// Share of the memory that I/O buffers get.
const IO_SHARE: u64 = 16;
/// Buffers of the I/O engine.
const DEPTH_MIN: u64 = 2;
const DEPTH_MAX: u64 = 64;
/// Least memory kept for lists of chunks, which grow with what is on disk.
const SLACK_MIN_BYTES: u64 = 32 << 10;
/// Memory kept per chunk expected: twice its place in a list, and as much to be wrong by.
const CHUNK_BYTES: u64 = 4 * size_of::<Chunk>() as u64;
/// Mean flush is this many thousandths of (memory squared / table bytes), measured on a
/// Criteo-shaped trace.
const FLUSH_THOUSANDTHS: u128 = 30;

/// What one shelf needs and gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ShelfSize {
    pub(crate) words: usize,
    pub(crate) blocks: BlockShape,
    /// Half the rows of its largest window, and a few: fewer would mean writing pages that are
    /// hardly filled.
    rows_min: usize,
    /// Rows the plan ever uses: more room helps nobody.
    rows_max: usize,
    entry_count: u64,
}

/// Everything that is sized at opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) shelves: Vec<ShelfSize>,
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
    pub(crate) live_bytes: u64,
    /// Entries of the window that has most.
    pub(crate) entries_max: usize,
    /// Words of the records of the window that has most.
    pub(crate) words_max: usize,
    /// Kept free for lists of chunks.
    pub(crate) slack_bytes: u64,
}

impl ShelfSize {
    /// Words of an entry and its record.
    fn row_words(&self) -> usize {
        1 + self.words
    }

    /// Returns the least memory of the shelf.
    fn bytes_min(&self, window_count: usize) -> u64 {
        self.buckets_bytes(window_count)
            + BlockShape::bytes_min(window_count, self.row_words(), self.rows_min)
    }

    fn buckets_bytes(&self, window_count: usize) -> u64 {
        (size_of::<Bucket>() * window_count) as u64
    }

    /// Makes blocks of `memory_bytes`; returns the memory of the shelf.
    fn cut(&mut self, window_count: usize, memory_bytes: u64) -> u64 {
        let buckets_bytes = self.buckets_bytes(window_count);
        let lists_bytes = memory_bytes.saturating_sub(buckets_bytes);
        let rows_max = self.rows_max.max(self.rows_min);
        self.blocks = BlockShape::new(lists_bytes, (window_count, self.row_words()), rows_max);
        buckets_bytes + self.blocks.memory_bytes(window_count, self.row_words())
    }
}

impl Sizes {
    /// Finds what the tables of `schema` need along `plan`.
    pub(crate) fn needs(schema: &Schema, plan: &Plan, limit_bytes: u64) -> Self {
        let (mut shelves, homes) = shelve(schema);
        let (entries_max, words_max) = note_windows(plan, &homes, &mut shelves);
        let stored_max = shelves.iter().map(|shelf| ENTRY_BYTES + 4 * shelf.words).max();
        let buf_min = stored_max.unwrap_or(0).next_multiple_of(PAGE_BYTES);
        let io_bytes = limit_bytes.min(1 << 40) / IO_SHARE;
        let flush_bytes = flush_bytes(&shelves, limit_bytes);
        let buf_bytes = (io_bytes / 8).min(2 * flush_bytes).min(BUF_BYTES_MAX as u64) as usize;
        let buf_bytes = buf_bytes.next_multiple_of(PAGE_BYTES).max(buf_min);
        let queue_depth = (io_bytes / buf_bytes as u64).clamp(DEPTH_MIN, DEPTH_MAX);
        let bucket_bytes = live_bytes(&shelves) / plan.window_count().max(1) as u64;
        let extent_bytes =
            (bucket_bytes / 8).clamp(buf_min as u64, BUF_BYTES_MAX.max(buf_min) as u64);
        let chunks = live_bytes(&shelves) / chunk_bytes(flush_bytes, extent_bytes, buf_bytes);
        let slack_bytes = (chunks * CHUNK_BYTES).max(SLACK_MIN_BYTES);
        Self {
            shelves,
            homes,
            buf_bytes,
            queue_depth: queue_depth as u32,
            // Blocks of three windows, and the row ids of one for scans.
            window_bytes: plan.directory_bytes()
                + 3 * plan.block_bytes_max() as u64
                + 8 * entries_max as u64,
            live_bytes: 2 * Live::memory_bytes(words_max, entries_max)
                + Ferry::memory_bytes(entries_max),
            entries_max,
            words_max,
            extent_bytes: extent_bytes as usize,
            stored_pages_bytes: buf_min,
            slack_bytes,
        }
    }

    /// Sizes lists for moving rows, where they are write buffers only and no window is trained
    /// on; returns the bytes that parked rows are gathered in.
    pub(crate) fn for_moving(&mut self) -> u64 {
        let buf_bytes = self.buf_bytes;
        (self.words_max, self.entries_max, self.live_bytes) = (0, 0, 0);
        let parking = |shelf: &mut ShelfSize| {
            let page_rows = PAGE_BYTES.div_ceil(4 * shelf.words);
            shelf.rows_min = shelf.rows_min.min(page_rows).max(1);
            Parking::memory_bytes(4 * shelf.words, buf_bytes) as u64
        };
        self.shelves.iter_mut().map(parking).sum()
    }

    /// Shares `free_bytes` out among the shelves; returns the bytes that all shelves take.
    ///
    /// # Errors
    /// `Invalid` when the least memory does not fit; `used_bytes` are those taken
    /// before, so that the error can name the smallest budget that would do.
    pub(crate) fn share_out(
        &mut self,
        window_count: usize,
        used_bytes: u64,
        free_bytes: u64,
    ) -> Result<u64> {
        let need = |shelf: &ShelfSize| shelf.bytes_min(window_count);
        let needed_bytes = self.slack_bytes + self.shelves.iter().map(need).sum::<u64>();
        if needed_bytes > free_bytes {
            let minimum = used_bytes + needed_bytes;
            return Err(Error::invalid("dram budget is too small for this plan")
                .with("minimum_bytes", minimum)
                .with(
                    "remedy",
                    format_args!(
                        "raise dram_budget to at least {minimum} bytes, or plan smaller windows"
                    ),
                ));
        }
        let spare_bytes = free_bytes - needed_bytes;
        let weight = |shelf: &ShelfSize| u128::from(shelf.entry_count) * shelf.row_words() as u128;
        let all: u128 = self.shelves.iter().map(weight).sum::<u128>().max(1);
        let mut taken_bytes = 0;
        for shelf in &mut self.shelves {
            let share_bytes = (u128::from(spare_bytes) * weight(shelf) / all) as u64;
            taken_bytes += shelf.cut(window_count, shelf.bytes_min(window_count) + share_bytes);
        }
        Ok(taken_bytes)
    }
}

/// Puts tables with records of one length on one shelf; returns the shelves, with the rows of
/// their tables as `rows_max`, and the home of each table.
pub(crate) fn shelve(schema: &Schema) -> (Vec<ShelfSize>, Vec<Home>) {
    let mut shelves: Vec<ShelfSize> = Vec::new();
    let mut homes = Vec::new();
    for table in schema.tables() {
        let words = table.record_words();
        let at = shelves.iter().position(|shelf| shelf.words == words);
        let at = at.unwrap_or_else(|| {
            shelves.push(ShelfSize { words, ..ShelfSize::default() });
            shelves.len() - 1
        });
        homes.push(Home { shelf: at, words });
        if let Some(shelf) = shelves.get_mut(at) {
            shelf.rows_max += table.row_count as usize;
        }
    }
    (shelves, homes)
}

// The rows that the plan uses, all of them.
fn live_bytes(shelves: &[ShelfSize]) -> u64 {
    let bytes = |shelf: &ShelfSize| (shelf.rows_max * 4 * shelf.words) as u64;
    shelves.iter().map(bytes).sum::<u64>().max(1)
}

// How many bytes a list has, on average, when it is flushed: more memory, longer lists.
fn flush_bytes(shelves: &[ShelfSize], limit_bytes: u64) -> u64 {
    let memory_bytes = u128::from(limit_bytes.min(1 << 40));
    let bytes = memory_bytes * memory_bytes * FLUSH_THOUSANDTHS / 1000;
    (bytes / u128::from(live_bytes(shelves))).clamp(1, 1 << 40) as u64
}

// How long a chunk is on average: a flush is cut where an extent or a buffer ends, and begins
// behind what the extent holds already.
fn chunk_bytes(flush_bytes: u64, extent_bytes: u64, buf_bytes: usize) -> u64 {
    let cut_bytes = extent_bytes.min(buf_bytes as u64);
    (flush_bytes * cut_bytes / (flush_bytes + cut_bytes)).max(PAGE_BYTES as u64)
}

// Notes what each shelf needs in each window; returns entries and words of the largest windows.
fn note_windows(plan: &Plan, homes: &[Home], shelves: &mut [ShelfSize]) -> (usize, usize) {
    let (mut entries_max, mut words_max) = (0, 0);
    let mut now = vec![0usize; shelves.len()];
    for counts in plan.counts() {
        now.fill(0);
        for (home, &count) in homes.iter().zip(counts) {
            if let Some(now) = now.get_mut(home.shelf) {
                *now += count as usize;
            }
        }
        for (shelf, now) in shelves.iter_mut().zip(&now) {
            shelf.rows_min = shelf.rows_min.max(*now);
            shelf.entry_count += *now as u64;
        }
        entries_max = entries_max.max(now.iter().sum());
        let words = shelves.iter().zip(&now).map(|(shelf, now)| shelf.words * now).sum();
        words_max = words_max.max(words);
    }
    for shelf in shelves {
        shelf.rows_max =
            shelf.rows_max.min(usize::try_from(shelf.entry_count).unwrap_or(usize::MAX));
        shelf.rows_min = (shelf.rows_min / 2 + 4).min(shelf.rows_max.max(1));
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
        assert_eq!(chunk_bytes(64 * page, 64 * page, 64 * PAGE_BYTES), 32 * page);
        assert!(chunk_bytes(1000 * page, 8 * page, 64 * PAGE_BYTES) < 8 * page);
        assert!(chunk_bytes(1000 * page, 64 * page, 8 * PAGE_BYTES) < 8 * page);
        // A short one nearly never; and no chunk is shorter than a page.
        assert!(chunk_bytes(4 * page, 1000 * page, 1000 * PAGE_BYTES) > 3 * page);
        assert_eq!(chunk_bytes(1, 64 * page, 64 * PAGE_BYTES), page);
    }
}
