//! Writer of the pages of a placement.
//!
//! Rows arrive in any order, and a row may sit on several pages. So each row is handed to a sorter
//! once for each of its pages, and comes out page by page. Where rows can be asked for one by one
//! ([`PlacedWriter::fill`]) nothing needs sorting. Seats of rows that never came stay empty, and a
//! page without rows is left out.
#![expect(clippy::indexing_slicing, reason = "items and pages are those of the placement")]

use std::sync::Arc;

use tierbed_core::{Budget, Error, Reservation, Result, RowId, RowKey};
use tierbed_io::Folder;
use tierbed_kernels::Codec;

use crate::codecs::Tables;
use crate::page::PageBuilder;
use crate::placed::{Numbering, PlacedTables};
use crate::places::PlacesWriter;
use crate::writer::PageFileWriter;
use tierbed_io::sorter::{ExternalSorter, SorterOptions, MEMORY_BYTES_MIN};

/// Sort key: page, then item, most significant byte first.
const KEY_BYTES: usize = 4 + 4;
/// A page that is not in the file.
const NO_PAGE: u32 = u32::MAX;
/// The sorter needs no more than this to sort a terabyte in two passes.
const SORT_BYTES_MAX: u64 = 256 << 20;

/// Gives the weights `[dim]` of a row, or tells that it was never written.
pub type RowSource<'a> = dyn FnMut(RowKey, &mut [f32]) -> Result<bool> + 'a;

/// Fills the pages of one placement.
#[derive(Debug)]
pub(crate) struct PlacedWriter {
    pub(crate) numbering: Numbering,
    pub(crate) tables: Vec<u32>,
    placed: PlacedTables,
    /// The page's number among the pages written, by the placement's number.
    written: Vec<u32>,
    /// A bit per item: its row came.
    is_present: Vec<u64>,
    sorter: Option<ExternalSorter>,
    builder: PageBuilder,
    /// The page being filled.
    open_page: u32,
    codec: Codec,
    weights: Vec<f32>,
    code: Vec<u8>,
    /// The page's owner, as pages name it.
    owner: u32,
    pub(crate) first_page: u64,
    pub(crate) page_count: u32,
    pub(crate) seat_count: u64,
    _memory: Reservation,
}

/// Where rows are sorted, and in how much memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SortSpace<'a> {
    pub(crate) folder: &'a Arc<dyn Folder>,
    pub(crate) budget: &'a Budget,
    /// A sorter may take one part in so many of what is free.
    pub(crate) share_count: u64,
}

impl PlacedWriter {
    /// Makes ready for the rows of placement `number`.
    ///
    /// # Errors
    /// `Invalid` when the placement is not one of its tables, or the budget does not reach.
    pub(crate) fn new(
        placed: PlacedTables,
        number: usize,
        tables: Tables<'_>,
        sort: SortSpace<'_>,
    ) -> Result<Self> {
        let Tables { schema, codecs } = tables;
        let numbering = placed.check(schema, codecs)?;
        let (shape, codec) = (numbering.shape(codecs)?, numbering.codec(codecs)?.clone());
        let page_count = placed.index.page_count() as usize;
        let present_words = numbering.item_count.div_ceil(64) as usize;
        let bytes = placed.index.memory_bytes() + (4 * page_count + 8 * present_words) as u64;
        let memory = sort.budget.reserve("placement", bytes)?;
        let options = SorterOptions {
            key_bytes: KEY_BYTES,
            payload_bytes: shape.row_bytes,
            memory_bytes: (sort.budget.free_bytes() / sort.share_count)
                .clamp(MEMORY_BYTES_MIN, SORT_BYTES_MAX),
            scratch_name: format!("scratch.places.{number}"),
        };
        let sorter = ExternalSorter::new(Arc::clone(sort.folder), &options, sort.budget)?;
        Ok(Self {
            tables: placed.tables.iter().map(|table| table.0).collect(),
            written: vec![NO_PAGE; page_count],
            is_present: vec![0; present_words],
            sorter: Some(sorter),
            builder: PageBuilder::new(shape),
            open_page: NO_PAGE,
            codec,
            weights: vec![0.0; numbering.dim as usize],
            code: vec![0; shape.row_bytes],
            owner: (schema.tables().len() + number) as u32,
            first_page: 0,
            page_count: 0,
            seat_count: 0,
            placed,
            numbering,
            _memory: memory,
        })
    }

    /// Takes the code of a row; `item` is its number.
    pub(crate) fn push(&mut self, item: u32, code: &[u8]) -> Result<()> {
        assert_eq!(code.len(), self.code.len(), "bytes of a row");
        let Some(sorter) = &mut self.sorter else { return Err(twice(item)) };
        let pages = self.placed.index.pages_of(item);
        if pages.is_empty() {
            return Err(Error::invalid("placement has no page for a row").with("item", item));
        }
        if !set_bit(&mut self.is_present, item) {
            return Err(twice(item));
        }
        for &page in pages {
            sorter.push(&encode_key(page, item), code)?;
        }
        Ok(())
    }

    /// Asks `row_of` for every row, page by page, and writes the pages.
    pub(crate) fn fill(
        &mut self,
        pages: &mut PageFileWriter,
        row_of: &mut RowSource<'_>,
    ) -> Result<()> {
        let is_empty = self.is_present.iter().all(|&bits| bits == 0);
        if self.sorter.take().is_none() || !is_empty {
            return Err(Error::invalid("rows of these tables were given before"));
        }
        self.first_page = pages.page_count();
        for page in 0..self.placed.index.page_count() {
            for at in 0..self.placed.index.rows_of(page).len() {
                let item = self.placed.index.rows_of(page)[at];
                let key = self.key_of(item);
                if row_of(key, &mut self.weights)? {
                    set_bit(&mut self.is_present, item);
                    let mut code = std::mem::take(&mut self.code);
                    encode(&self.codec, key, &self.weights, &mut code)?;
                    self.seat(pages, page, item, &code);
                    self.code = code;
                }
            }
            self.seal(pages)?;
        }
        Ok(())
    }

    /// Writes the pages of the rows that were pushed; returns the sorted runs.
    pub(crate) fn finish(&mut self, pages: &mut PageFileWriter) -> Result<u64> {
        let Some(sorter) = self.sorter.take() else { return Ok(0) };
        self.first_page = pages.page_count();
        let mut sorted = sorter.finish()?;
        while let Some(record) = sorted.next()? {
            let (page, item) = decode_key(record.key);
            if page != self.open_page {
                self.seal(pages)?;
            }
            self.seat(pages, page, item, record.payload);
        }
        self.seal(pages)?;
        Ok(sorted.stats().run_count)
    }

    fn seat(&mut self, pages: &PageFileWriter, page: u32, item: u32, code: &[u8]) {
        if self.open_page != page {
            self.open_page = page;
            let number = (pages.page_count() - self.first_page) as u32;
            let known = std::mem::replace(&mut self.written[page as usize], number);
            assert_eq!(known, NO_PAGE, "page {page} of the placement is written twice");
        }
        self.builder.push(RowId(u64::from(item)), 0, code);
        self.seat_count += 1;
    }

    fn seal(&mut self, pages: &mut PageFileWriter) -> Result<()> {
        if self.builder.row_count() > 0 {
            pages.put(self.owner, &mut self.builder)?;
            self.page_count += 1;
        }
        self.open_page = NO_PAGE;
        Ok(())
    }

    /// Writes the pages of each item.
    pub(crate) fn write_places(&self, places: &mut PlacesWriter) -> Result<()> {
        let forward = self.placed.index.forward();
        let mut start = 0;
        for item in 0..forward.list_count() {
            places.put(start)?;
            start += self.pages_of(item).len() as u32;
        }
        places.put(start)?;
        for item in 0..forward.list_count() {
            for &page in self.pages_of(item) {
                let number = self.written[page as usize];
                assert_ne!(number, NO_PAGE, "page {page} of item {item} was not written");
                places.put(number)?;
            }
        }
        places.end_placement()
    }

    fn pages_of(&self, item: u32) -> &[u32] {
        let is_present = bit(&self.is_present, item);
        if is_present {
            self.placed.index.pages_of(item)
        } else {
            &[]
        }
    }

    /// Counts the rows that came, by table.
    pub(crate) fn row_counts(&self, mut add: impl FnMut(usize)) {
        for item in (0..self.numbering.item_count).filter(|&item| bit(&self.is_present, item)) {
            add(self.key_of(item).table.0 as usize);
        }
    }

    /// Returns the row of an item of the placement.
    fn key_of(&self, item: u32) -> RowKey {
        let Some(key) = self.numbering.key_of(item) else {
            panic!("item {item} of a placement of {}", self.numbering.item_count)
        };
        key
    }
}

/// Codes a row, `[dim]`, into `code`.
///
/// # Errors
/// `Invalid`, naming the row, for a number that the codec cannot keep.
pub(crate) fn encode(codec: &Codec, key: RowKey, row: &[f32], code: &mut [u8]) -> Result<()> {
    let named = |error: Error| error.with("table_id", key.table.0).with("row", key.row.0);
    codec.encode(row, code).map_err(named)
}

fn twice(item: u32) -> Error {
    Error::invalid("row was pushed twice").with("item", item)
}

fn bit(bits: &[u64], at: u32) -> bool {
    bits[at as usize / 64] >> (at % 64) & 1 == 1
}

/// Sets a bit; tells whether it was clear.
fn set_bit(bits: &mut [u64], at: u32) -> bool {
    let was_clear = !bit(bits, at);
    bits[at as usize / 64] |= 1 << (at % 64);
    was_clear
}

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn encode_key(page: u32, item: u32) -> [u8; KEY_BYTES] {
    ((u64::from(page) << 32) | u64::from(item)).to_be_bytes()
}

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn decode_key(bytes: &[u8]) -> (u32, u32) {
    let Some(key) = bytes.first_chunk() else {
        panic!("sort key of {} bytes, not {KEY_BYTES}", bytes.len())
    };
    let key = u64::from_be_bytes(*key);
    ((key >> 32) as u32, key as u32)
}
