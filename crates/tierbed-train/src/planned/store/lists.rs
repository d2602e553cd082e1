//! Lists of rows in memory, one per window that they wait for.
//!
//! A list per window, and per span of windows where there are some, in *blocks* of a few rows each.
//! A row lies in its block as it will lie on disk: entry, then record. So a flush copies whole
//! blocks, and a window that comes reads its rows one after another; only the end of a list is ever
//! written to. The last block of a list may be part full, no other: `rows / block_rows + lists`
//! blocks are always enough.
//!
//! ```text
//! list of window 8:  [e r|e r|e r|e r] ◀─ [e r|e r|   |   ] ◀─ end
//! ```

#![expect(clippy::indexing_slicing, reason = "windows are those of the plan, blocks of the lists")]

use tierbed_io::{WordBuf, PAGE_BYTES};
use tierbed_kernels::prefetch;

const NO_BLOCK: u32 = u32::MAX;
/// Part-full blocks of all windows together take at most this share of the memory.
const TAILS_SHARE: u64 = 16;

/// How many lists there are, and how many of them have rows at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListCounts {
    pub(crate) all: usize,
    pub(crate) open: usize,
}

/// How memory is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BlockShape {
    pub(crate) block_count: usize,
    pub(crate) block_rows: usize,
}

impl BlockShape {
    /// Returns the bytes of blocks of one row each, for `rows_min` rows of `row_words`, entry
    /// included: the least that `list_count` lists can do with.
    pub(crate) fn bytes_min(list_count: usize, row_words: usize, rows_min: usize) -> u64 {
        Self { block_count: rows_min, block_rows: 1 }.memory_bytes(list_count, row_words)
    }

    /// Cuts `memory_bytes` into blocks of at most a page, for at most `rows_max` rows: as long as
    /// leaves little memory in part-full blocks of the lists that are open at a time.
    pub(crate) fn new(
        memory_bytes: u64,
        lists: ListCounts,
        row_words: usize,
        rows_max: usize,
    ) -> Self {
        assert!(row_words > 0 && lists.open <= lists.all, "{lists:?} of {row_words} words");
        let fixed_bytes = Self::default().memory_bytes(lists.all, row_words);
        let free_bytes = memory_bytes.saturating_sub(fixed_bytes);
        let row_bytes = 4 * row_words as u64;
        let tail_bytes = free_bytes / TAILS_SHARE / lists.open.max(1) as u64;
        let block_rows = (tail_bytes.min(PAGE_BYTES as u64) / row_bytes).max(1);
        let block_count = (free_bytes / (block_rows * row_bytes + 4)) as usize;
        let block_rows = block_rows as usize;
        let tail_count = if block_rows == 1 { 0 } else { lists.open };
        let block_count = block_count.min(rows_max.div_ceil(block_rows) + tail_count);
        Self { block_count, block_rows }
    }

    /// Returns the bytes that `list_count` lists take.
    pub(crate) fn memory_bytes(&self, list_count: usize, row_words: usize) -> u64 {
        let block_bytes = 4 * self.block_rows * row_words + size_of::<u32>();
        (self.block_count * block_bytes + list_count * (size_of::<End>() + size_of::<u32>())) as u64
    }

    /// Returns the rows that all blocks hold.
    pub(crate) fn row_count(&self) -> usize {
        self.block_count * self.block_rows
    }
}

/// Where a list ends: its last block, and the rows in it.
#[derive(Debug, Clone, Copy)]
struct End {
    block: u32,
    row_count: u32,
}

const EMPTY: End = End { block: NO_BLOCK, row_count: 0 };

/// A list per window, then per span.
#[derive(Debug)]
pub(crate) struct Lists {
    rows: WordBuf,
    /// Words of an entry and its record.
    row_words: usize,
    shape: BlockShape,
    /// Per block: the block before it in its list, or another free one.
    links: Vec<u32>,
    free: u32,
    free_count: usize,
    ends: Vec<End>,
    counts: Vec<u32>,
}

impl Lists {
    /// Takes the memory for lists of rows of `row_words`, entry included.
    pub(crate) fn new(list_count: usize, row_words: usize, shape: BlockShape) -> Self {
        let BlockShape { block_count, block_rows } = shape;
        assert!(block_count < NO_BLOCK as usize, "{block_count} blocks cannot be numbered");
        let chain = (1..=block_count as u32).map(|block| {
            if block as usize == block_count {
                NO_BLOCK
            } else {
                block
            }
        });
        Self {
            rows: WordBuf::new(block_count * block_rows * row_words),
            row_words,
            shape,
            links: chain.collect(),
            free: 0,
            free_count: block_count,
            ends: vec![EMPTY; list_count],
            counts: vec![0; list_count],
        }
    }

    /// Returns the bytes of all blocks.
    pub(crate) fn rows_bytes(&self) -> u64 {
        4 * self.rows.len() as u64
    }

    /// Returns the number of rows per list.
    pub(crate) fn counts(&self) -> &[u32] {
        &self.counts
    }

    pub(crate) fn count(&self, window: usize) -> usize {
        self.counts[window] as usize
    }

    pub(crate) fn has_free_block(&self) -> bool {
        self.free_count > 0
    }

    /// Tells whether a row fits behind the list of `window`.
    #[inline]
    pub(crate) fn has_room(&self, window: usize) -> bool {
        self.has_free_block() || self.is_open(self.ends[window])
    }

    // Tells whether a row fits into the last block of a list.
    #[inline]
    fn is_open(&self, end: End) -> bool {
        end.block != NO_BLOCK && (end.row_count as usize) < self.shape.block_rows
    }

    fn start_of(&self, block: u32, row: u32) -> usize {
        (block as usize * self.shape.block_rows + row as usize) * self.row_words
    }

    /// Asks the processor to bring the end of the list of `window` near.
    #[inline]
    pub(crate) fn expect(&self, window: usize) {
        let end = self.ends[window];
        let (block, row) =
            if self.is_open(end) { (end.block, end.row_count) } else { (self.free, 0) };
        prefetch(&self.rows, self.start_of(block, row), self.row_words);
    }

    /// Adds a row to the list of `window`; returns the place of its record. `None` when there is
    /// no [room](Self::has_room).
    ///
    /// # Panics
    /// When there is no such list.
    #[inline]
    pub(crate) fn push(&mut self, window: usize, entry: u32) -> Option<&mut [f32]> {
        let end = &mut self.ends[window];
        if end.block == NO_BLOCK || end.row_count as usize == self.shape.block_rows {
            let fresh = self.free;
            let link = self.links.get_mut(fresh as usize)?;
            self.free = std::mem::replace(link, end.block);
            self.free_count -= 1;
            *end = End { block: fresh, row_count: 0 };
        }
        let (block, row) = (end.block, end.row_count);
        end.row_count += 1;
        self.counts[window] += 1;
        let start = self.start_of(block, row);
        let (head, record) = self.rows[start..start + self.row_words].split_first_mut()?;
        *head = f32::from_bits(entry.to_le());
        Some(record)
    }

    /// Returns the last rows of the list of `window`, entry and record each: at most `rows_max`,
    /// and those of one block. Empty only when the list is, or `rows_max` is 0.
    pub(crate) fn last_rows(&self, window: usize, rows_max: usize) -> &[f32] {
        let end = self.ends[window];
        if end.block == NO_BLOCK {
            return &[];
        }
        let taken = end.row_count.min(u32::try_from(rows_max).unwrap_or(u32::MAX));
        let start = self.start_of(end.block, end.row_count - taken);
        &self.rows[start..self.start_of(end.block, end.row_count)]
    }

    /// Forgets the last `row_count` rows of the list of `window`, which lie in one block.
    ///
    /// # Panics
    /// When the last block of the list has fewer.
    pub(crate) fn forget_last(&mut self, window: usize, row_count: usize) {
        let end = &mut self.ends[window];
        let row_count = row_count as u32;
        assert!(row_count <= end.row_count, "{row_count} rows of {end:?} leave list {window}");
        end.row_count -= row_count;
        self.counts[window] -= row_count;
        if end.row_count > 0 || end.block == NO_BLOCK {
            return;
        }
        let before = std::mem::replace(&mut self.links[end.block as usize], self.free);
        self.free = end.block;
        self.free_count += 1;
        debug_assert!(self.free_count <= self.shape.block_count, "a block was freed twice");
        *end = match before {
            NO_BLOCK => EMPTY,
            block => End { block, row_count: self.shape.block_rows as u32 },
        };
        debug_assert_eq!(before == NO_BLOCK, self.counts[window] == 0, "list {window} lost rows");
        if before != NO_BLOCK {
            // Its rows are the next to be asked for.
            let start = self.start_of(before, 0);
            prefetch(&self.rows, start, self.shape.block_rows.min(8) * self.row_words);
        }
    }

    /// Moves the last rows of the list of `window` into `rows`, as many as it has room for.
    ///
    /// # Panics
    /// When the list has fewer, or the room is not for whole rows.
    pub(crate) fn take(&mut self, window: usize, rows: &mut [u8]) {
        let row_bytes = 4 * self.row_words;
        let (wanted, over) = (rows.len() / row_bytes, rows.len() % row_bytes);
        assert!(over == 0, "{} bytes are no rows of {row_bytes}", rows.len());
        let count = self.count(window);
        assert!(wanted <= count, "{wanted} rows of list {window} are taken, it has {count}");
        let mut rest = rows;
        while !rest.is_empty() {
            let found: &[u8] = bytemuck::cast_slice(self.last_rows(window, rest.len() / row_bytes));
            let (place, behind) = rest.split_at_mut(found.len());
            place.copy_from_slice(found);
            let row_count = found.len() / row_bytes;
            rest = behind;
            self.forget_last(window, row_count);
        }
    }

    /// Visits the rows of `window` without taking them: entry and record.
    pub(crate) fn iter(&self, window: usize) -> impl Iterator<Item = (u32, &[f32])> {
        let mut at = self.ends[window];
        let blocks = std::iter::from_fn(move || {
            let link = *self.links.get(at.block as usize)?;
            let start = self.start_of(at.block, 0);
            let rows = &self.rows[start..self.start_of(at.block, at.row_count)];
            at = End { block: link, row_count: self.shape.block_rows as u32 };
            Some(rows)
        });
        blocks.flat_map(|rows| split_rows(rows, self.row_words))
    }
}

/// Splits rows into entries and records.
pub(crate) fn split_rows(rows: &[f32], row_words: usize) -> impl Iterator<Item = (u32, &[f32])> {
    rows.chunks_exact(row_words.max(1)).filter_map(|row| {
        let (head, record) = row.split_first()?;
        Some((u32::from_le(head.to_bits()), record))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows_of(lists: &Lists, window: usize) -> Vec<(u32, f32)> {
        let mut rows: Vec<_> =
            lists.iter(window).map(|(entry, record)| (entry, record[0])).collect();
        rows.sort_by_key(|row| row.0);
        rows
    }

    proptest! {
        #[test]
        fn behaves_as_stacks(
            steps in proptest::collection::vec((0usize..5, any::<bool>(), 0usize..20), 0..400),
            block_rows in 1usize..9,
        ) {
            let shape = BlockShape { block_count: 60 / block_rows + 5, block_rows };
            let mut lists = Lists::new(5, 2, shape);
            let mut model = vec![Vec::new(); 5];
            let mut live = 0;
            for (at, (window, is_push, rows_max)) in (0u32..).zip(steps) {
                if is_push && live < 60 {
                    prop_assert!(lists.has_room(window));
                    lists.push(window, at * 3).unwrap()[0] = at as f32;
                    model[window].push((at * 3, at as f32));
                    live += 1;
                } else if rows_max % 2 == 0 {
                    let last = lists.last_rows(window, rows_max).to_vec();
                    let left = model[window].len() - last.len() / 2;
                    let is_due = rows_max > 0 && !model[window].is_empty();
                    prop_assert_eq!(!last.is_empty(), is_due);
                    let last: Vec<_> = split_rows(&last, 2).map(|(e, r)| (e, r[0])).collect();
                    prop_assert_eq!(&last, &model[window][left..]);
                    lists.forget_last(window, last.len());
                    model[window].truncate(left);
                    live -= last.len();
                } else {
                    let taken = rows_max.min(model[window].len());
                    let mut bytes = vec![0; 8 * taken];
                    lists.take(window, &mut bytes);
                    let left = model[window].len() - taken;
                    let mut found: Vec<_> = bytes
                        .chunks_exact(8)
                        .map(|row| {
                            let (entry, value) = row.split_at(4);
                            let entry = u32::from_le_bytes(entry.try_into().unwrap());
                            (entry, f32::from_le_bytes(value.try_into().unwrap()))
                        })
                        .collect();
                    found.sort_by_key(|row| row.0);
                    prop_assert_eq!(&found, &model[window][left..]);
                    model[window].truncate(left);
                    live -= taken;
                }
            }
            for (window, model) in model.iter().enumerate() {
                prop_assert_eq!(lists.count(window), model.len());
                prop_assert_eq!(&rows_of(&lists, window), model);
            }
        }

        #[test]
        fn blocks_keep_within_their_memory(
            memory_bytes in 0u64..1 << 24,
            window_count in 1usize..3000,
            row_words in 2usize..3000,
            rows_max in 1usize..1 << 20,
        ) {
            let lists = ListCounts { all: window_count, open: window_count };
            let shape = BlockShape::new(memory_bytes, lists, row_words, rows_max);
            let least_bytes = BlockShape::default().memory_bytes(window_count, row_words);
            let taken_bytes = shape.memory_bytes(window_count, row_words);
            prop_assert!(taken_bytes <= memory_bytes.max(least_bytes));
            prop_assert!(shape.block_rows == 1 || 4 * shape.block_rows * row_words <= PAGE_BYTES);
            let tails_bytes = 4 * shape.block_rows * row_words * window_count;
            let share_bytes = memory_bytes / TAILS_SHARE;
            prop_assert!(shape.block_rows == 1 || tails_bytes as u64 <= share_bytes);
        }
    }

    #[test]
    fn full_blocks_refuse_rows() {
        let mut lists = Lists::new(2, 2, BlockShape { block_count: 1, block_rows: 2 });
        assert!(lists.push(0, 0).is_some() && lists.push(0, 1).is_some());
        assert!(!lists.has_room(0) && lists.push(1, 0).is_none());
        lists.forget_last(0, 2);
        assert!(lists.has_room(1) && lists.push(1, 0).is_some());
    }

    #[test]
    #[should_panic(expected = "2 rows of list 0 are taken, it has 1")]
    fn more_rows_than_a_list_has_are_not_taken() {
        let mut lists = Lists::new(1, 2, BlockShape { block_count: 2, block_rows: 2 });
        assert!(lists.push(0, 0).is_some());
        lists.take(0, &mut [0; 16]);
    }
}
