//! Writer of the pages and the index of a table that has a tail.
//!
//! Rows of the head go to pages as they come. The others are sorted by id outside memory, unless
//! they come that way, and written when the table is complete. Pages of the table follow each
//! other, so nothing else is written between.
#![expect(clippy::indexing_slicing, reason = "rows are checked against the schema on entry")]

use std::sync::Arc;

use tierbed_core::{Budget, Error, Reservation, Result, RowId, RowKey, TableId};
use tierbed_io::sorter::{ExternalSorter, Record, SorterOptions};
use tierbed_io::{Device, PAGE_BYTES};

use super::{HeadSize, TailShape, TailShapes};
use crate::bits::BitWriter;
use crate::manifest::{TableContents, TailInfo};
use crate::page::{PageBuilder, PageShape};
use crate::placed_writer::SortSpace;
use crate::writer::PageFileWriter;

/// Bytes of a sort key: the row, most significant byte first.
const KEY_BYTES: usize = 8;
/// The sorter needs no more than this to sort a terabyte in two passes.
const SORT_BYTES_MAX: u64 = 256 << 20;
const SCRATCH_NAME: &str = "scratch.tail";
/// Bytes of two bitmaps for 64 rows.
const BITMAPS_BYTES: u64 = 16;

/// Fills the pages of one table.
#[derive(Debug)]
pub(crate) struct TailWriter {
    table: TableId,
    row_count: u64,
    head_size: HeadSize,
    /// Rows of the head, once they are known.
    head_rows_max: u64,
    head_rows: u64,
    first_page: u64,
    builder: PageBuilder,
    /// A bit per row: it came.
    present: Vec<u64>,
    /// A bit per row: it is of the head.
    heads: Vec<u64>,
    state: State,
    _memory: Reservation,
}

#[derive(Debug)]
enum State {
    /// No row came yet.
    Waiting,
    /// Rows go to pages; the last one of the tail, if one came.
    Open(Option<RowId>),
    /// Rows of the tail go to the sorter.
    Sorting(Box<ExternalSorter>),
    /// All pages are written.
    Closed,
}

/// Where the rows of a table go.
pub(crate) struct TailSink<'a> {
    pub(crate) pages: &'a mut PageFileWriter,
    pub(crate) contents: &'a mut TableContents,
    /// Takes rows of the head and their pages.
    pub(crate) pairs: &'a mut ExternalSorter,
}

/// How many rows of a table are the head, and how its pages are cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadAndShape {
    pub(crate) size: HeadSize,
    pub(crate) shape: PageShape,
}

impl TailWriter {
    /// Makes ready for the rows of a table.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach.
    pub(crate) fn new(
        table: TableId,
        row_count: u64,
        how: HeadAndShape,
        budget: &Budget,
    ) -> Result<Self> {
        let HeadAndShape { size: head_size, shape } = how;
        let words = row_count.div_ceil(64);
        let bytes = MemoryBytes::of(row_count, shape.row_bytes).kept;
        let memory = budget.reserve("tail", bytes)?;
        Ok(Self {
            table,
            row_count,
            head_size,
            head_rows_max: head_size.of(row_count),
            head_rows: 0,
            first_page: 0,
            builder: PageBuilder::new(shape),
            present: vec![0; words as usize],
            heads: vec![0; words as usize],
            state: State::Waiting,
            _memory: memory,
        })
    }

    /// Says how many rows will come.
    ///
    /// # Panics
    /// When some came.
    pub(crate) fn expect(&mut self, stored_rows: u64) {
        assert!(matches!(self.state, State::Waiting), "rows of table {} came", self.table.0);
        self.head_rows_max = self.head_size.of(stored_rows);
    }

    /// Takes the code of a row. Rows of the tail are sorted in `space`; `None`: they come by id.
    pub(crate) fn push(
        &mut self,
        row: RowId,
        code: &[u8],
        sink: &mut TailSink<'_>,
        space: Option<SortSpace<'_>>,
    ) -> Result<()> {
        match self.state {
            State::Closed => {
                return Err(Error::invalid("rows of a table with a tail come one after the other")
                    .with("table_id", self.table.0)
                    .with("row", row.0)
                    .with("remedy", "push all rows of a table before those of the next"));
            }
            State::Waiting => {
                self.first_page = sink.pages.page_count();
                self.state = State::Open(None);
            }
            State::Open(_) | State::Sorting(_) => {}
        }
        if !set_bit(&mut self.present, row) {
            return Err(Error::invalid("row was pushed twice")
                .with("table_id", self.table.0)
                .with("row", row.0));
        }
        if self.head_rows < self.head_rows_max {
            set_bit(&mut self.heads, row);
            self.head_rows += 1;
            return self.seat(row, code, sink);
        }
        if let (State::Open(None), Some(space)) = (&self.state, space) {
            self.state = State::Sorting(Box::new(sorter(code.len(), space)?));
        }
        match &mut self.state {
            State::Sorting(sorter) => sorter.push(&key_of(row), code),
            State::Open(last) => {
                assert!(*last < Some(row), "{row:?} of a tail comes behind {last:?}");
                if last.replace(row).is_none() {
                    self.seal(sink)?;
                }
                self.seat(row, code, sink)
            }
            State::Waiting | State::Closed => panic!("row {row:?} comes to no open table"),
        }
    }

    /// Writes what is left of the table's pages; returns the sorted runs.
    pub(crate) fn close(&mut self, sink: &mut TailSink<'_>) -> Result<u64> {
        let mut run_count = 0;
        if let State::Sorting(sorter) = std::mem::replace(&mut self.state, State::Closed) {
            self.seal(sink)?;
            let mut sorted = sorter.finish()?;
            while let Some(Record { key, payload }) = sorted.next()? {
                self.seat(row_of(key), payload, sink)?;
            }
            run_count = sorted.stats().run_count;
        }
        self.seal(sink)?;
        Ok(run_count)
    }

    /// Tells whether rows came, and more may come.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_) | State::Sorting(_))
    }

    /// Returns what the manifest says of the table.
    pub(crate) fn info(&self) -> TailInfo {
        assert!(!self.is_open(), "pages of table {} are not complete", self.table.0);
        let Self { head_rows, first_page, .. } = *self;
        TailInfo { table: self.table.0, head_rows, first_page }
    }

    fn seat(&mut self, row: RowId, code: &[u8], sink: &mut TailSink<'_>) -> Result<()> {
        for part in 0..self.builder.shape().parts_per_row {
            self.builder.push(row, part, code);
            if self.builder.is_full() {
                self.seal(sink)?;
            }
        }
        Ok(())
    }

    fn seal(&mut self, sink: &mut TailSink<'_>) -> Result<()> {
        if self.builder.row_count() == 0 {
            return Ok(());
        }
        // Rows of a page are all of the head, or none is.
        let is_head = bit(&self.heads, self.builder.row(0));
        let pairs = is_head.then_some(&mut *sink.pairs);
        sink.pages.append(self.table, &mut self.builder, sink.contents, pairs)
    }

    /// Returns the bit of a row of the head among those of stored rows.
    fn head_bits(&self) -> impl Iterator<Item = bool> + '_ {
        let stored = (0..self.row_count).map(RowId).filter(|row| bit(&self.present, *row));
        stored.map(|row| bit(&self.heads, row))
    }
}

/// Takes the rows of heads and their pages, in key order.
pub(crate) struct TailIndexWriter<'a> {
    shapes: &'a TailShapes,
    writers: Vec<&'a TailWriter>,
    device: Arc<dyn Device>,
    out: BitWriter,
    /// The next table whose bitmaps are to be written.
    next: usize,
    entry_count: u64,
}

impl<'a> TailIndexWriter<'a> {
    /// Begins the index of the tables of `writers`, which are those of `shapes`.
    pub(crate) fn new(
        shapes: &'a TailShapes,
        writers: Vec<&'a TailWriter>,
        device: Arc<dyn Device>,
    ) -> Self {
        assert_eq!(shapes.tables.len(), writers.len(), "every tail has a writer");
        let out = BitWriter::new(Arc::clone(&device));
        Self { shapes, writers, device, out, next: 0, entry_count: 0 }
    }

    /// Notes that a row of a head starts on `page_id`; keys must be increasing.
    pub(crate) fn push(&mut self, key: RowKey, page_id: u64) -> Result<()> {
        while self.next == 0 || self.shapes.tables[self.next - 1].table != key.table {
            assert!(self.next < self.writers.len(), "{key:?} is of no table that has a tail");
            self.begin_table()?;
        }
        let shape = &self.shapes.tables[self.next - 1];
        let (entry, bits) =
            ((page_id - shape.first_page) / shape.parts_per_row, shape.entry_bits());
        assert!(entry < shape.group_count(shape.head_rows), "page {page_id} is not of the head");
        let at = 64 * shape.entries_start + self.entry_count * u64::from(bits);
        self.entry_count += 1;
        if bits == 0 {
            return Ok(());
        }
        self.out.put(at, entry, bits)
    }

    /// Writes what is left, durably, and returns the checksum over the blocks' checksums.
    pub(crate) fn finish(mut self) -> Result<u32> {
        while self.next < self.writers.len() {
            self.begin_table()?;
        }
        self.check_entries();
        let crc = self.out.finish(64 * self.shapes.word_count)?;
        self.device.sync()?;
        Ok(crc)
    }

    fn begin_table(&mut self) -> Result<()> {
        self.check_entries();
        let (shape, writer) = (&self.shapes.tables[self.next], self.writers[self.next]);
        (self.next, self.entry_count) = (self.next + 1, 0);
        if shape.has_present() {
            put_words(&mut self.out, shape.present_start, writer.present.iter().copied())?;
        }
        if shape.has_heads() {
            let mut bits = writer.head_bits().peekable();
            let words = std::iter::from_fn(|| {
                bits.peek()?;
                let set = (0..64).zip(bits.by_ref().take(64)).filter(|(_, is_set)| *is_set);
                Some(set.fold(0, |word, (at, _)| word | 1 << at))
            });
            put_words(&mut self.out, shape.heads_start, words)?;
        }
        Ok(())
    }

    fn check_entries(&self) {
        let shape = self.next.checked_sub(1).map(|at| &self.shapes.tables[at]);
        let head_rows = shape.map_or(0, |shape: &TailShape| shape.head_rows);
        assert_eq!(self.entry_count, head_rows, "entries of the head of a table");
    }
}

fn put_words(out: &mut BitWriter, start: u64, words: impl Iterator<Item = u64>) -> Result<()> {
    for (word, at) in words.zip(start..) {
        out.put(64 * at, word, 64)?;
    }
    Ok(())
}

fn sorter(code_bytes: usize, space: SortSpace<'_>) -> Result<ExternalSorter> {
    let SortSpace { folder, budget, share_count } = space;
    let least_bytes = ExternalSorter::memory_bytes_min(KEY_BYTES + code_bytes);
    let options = SorterOptions {
        key_bytes: KEY_BYTES,
        payload_bytes: code_bytes,
        memory_bytes: (budget.free_bytes() / share_count)
            .clamp(least_bytes, SORT_BYTES_MAX.max(least_bytes)),
        scratch_name: SCRATCH_NAME.to_owned(),
    };
    ExternalSorter::new(Arc::clone(folder), &options, budget)
}

/// Memory in which a table with a tail is written, at least.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryBytes {
    /// Bitmaps and the page being filled, to the end.
    pub(crate) kept: u64,
    /// Sorting, while its rows are written.
    pub(crate) sorter: u64,
}

impl MemoryBytes {
    /// Returns that of a table of `row_count` rows, whose codes have `code_bytes`.
    pub(crate) fn of(row_count: u64, code_bytes: usize) -> Self {
        Self {
            kept: BITMAPS_BYTES * row_count.div_ceil(64) + PAGE_BYTES as u64,
            sorter: ExternalSorter::memory_bytes_min(KEY_BYTES + code_bytes),
        }
    }
}

fn bit(bits: &[u64], row: RowId) -> bool {
    bits[(row.0 / 64) as usize] >> (row.0 % 64) & 1 == 1
}

/// Sets a bit; tells whether it was clear.
fn set_bit(bits: &mut [u64], row: RowId) -> bool {
    let was_clear = !bit(bits, row);
    bits[(row.0 / 64) as usize] |= 1 << (row.0 % 64);
    was_clear
}

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn key_of(row: RowId) -> [u8; KEY_BYTES] {
    row.0.to_be_bytes()
}

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn row_of(key: &[u8]) -> RowId {
    let Some(key) = key.first_chunk() else {
        panic!("sort key of {} bytes, not {KEY_BYTES}", key.len())
    };
    RowId(u64::from_be_bytes(*key))
}
