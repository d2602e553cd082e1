//! Layout and checks of a snapshot's 4 KiB pages.
//!
//! ```text
//! | crc | magic | version | owner | rows | part | page id | ids … | codes of rows …  | zeros |
//! 0     4       6         8      12     14     16        24      24 + capacity*id            4096
//! ```
//!
//! A page holds rows of one table, or of the tables of one placement; both have a number, the
//! page's *owner*: tables come first, then placements. Rows are in the owner's codec. One larger
//! than a page is cut into parts on consecutive pages, one part a page. Normative text:
//! docs/reference/formats/snapshot.md.
#![expect(clippy::indexing_slicing, reason = "offsets follow from the page's checked shape")]

use std::ops::Range;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, RowId, TableId, TableSchema};
use tierbed_io::PAGE_BYTES;
use tierbed_kernels::Codec;

/// First two bytes after the checksum: `TP`.
pub const PAGE_MAGIC: u16 = u16::from_le_bytes(*b"TP");
/// Version of the page layout.
pub const PAGE_VERSION: u16 = 1;
/// Bytes before the row ids.
pub const HEADER_BYTES: usize = 24;
/// Tables of at least this many rows have 8-byte row ids.
pub const WIDE_ROW_COUNT: u64 = 1 << 32;

const PAYLOAD_BYTES: usize = PAGE_BYTES - HEADER_BYTES;

/// How the rows of one table are cut into pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageShape {
    /// Bytes of a row id: 4 or 8.
    pub id_bytes: usize,
    /// Elements per row.
    pub dim: usize,
    /// Bytes of the code of a row.
    pub row_bytes: usize,
    /// Most rows in a page; 1 when a row needs several.
    pub rows_per_page: usize,
    /// Pages of a row; 1 when rows share pages.
    pub parts_per_row: usize,
    /// Bytes on each page of a row but the last.
    pub part_bytes_max: usize,
}

impl PageShape {
    /// Returns the shape of `table`'s pages with rows in `codec`.
    #[must_use]
    pub fn new(table: &TableSchema, codec: &Codec) -> Self {
        let id_bytes = if table.row_count >= WIDE_ROW_COUNT { 8 } else { 4 };
        Self::of(table.dim, codec, id_bytes)
    }

    /// Returns the shape of pages that tables of `dim` elements in `codec` share by a placement.
    #[must_use]
    pub fn shared(dim: u32, codec: &Codec) -> Self {
        Self::of(dim, codec, size_of::<u32>())
    }

    fn of(dim: u32, codec: &Codec, id_bytes: usize) -> Self {
        let dim = dim as usize;
        let row_bytes = codec.code_bytes(dim);
        let part_bytes = PAYLOAD_BYTES - id_bytes;
        Self {
            id_bytes,
            dim,
            row_bytes,
            rows_per_page: (PAYLOAD_BYTES / (id_bytes + row_bytes)).max(1),
            parts_per_row: row_bytes.div_ceil(part_bytes),
            part_bytes_max: part_bytes.min(row_bytes),
        }
    }

    /// Returns which bytes of a row its part `part` has.
    ///
    /// # Panics
    /// When rows have fewer parts.
    #[must_use]
    pub fn part(&self, part: usize) -> Range<usize> {
        assert!(part < self.parts_per_row, "part {part} of {}", self.parts_per_row);
        let before = part * self.part_bytes_max;
        before..self.row_bytes.min(before + self.part_bytes_max)
    }

    fn id_at(&self, slot: usize) -> usize {
        HEADER_BYTES + slot * self.id_bytes
    }

    fn code_at(&self, slot: usize) -> usize {
        self.id_at(self.rows_per_page) + slot * self.part_bytes_max
    }
}

/// A page being filled with rows of one table.
#[derive(Debug)]
pub(crate) struct PageBuilder {
    shape: PageShape,
    bytes: Box<[u8; PAGE_BYTES]>,
    row_count: usize,
    part: usize,
}

impl PageBuilder {
    pub(crate) fn new(shape: PageShape) -> Self {
        assert!(
            shape.code_at(shape.rows_per_page) <= PAGE_BYTES,
            "rows of {shape:?} do not fit a page"
        );
        Self { shape, bytes: Box::new([0; PAGE_BYTES]), row_count: 0, part: 0 }
    }

    pub(crate) fn shape(&self) -> PageShape {
        self.shape
    }

    pub(crate) fn row_count(&self) -> usize {
        self.row_count
    }

    /// Returns the part that the one row in the page is; 0 in pages of whole rows.
    pub(crate) fn part(&self) -> usize {
        self.part
    }

    /// Returns the row id in `slot`.
    ///
    /// # Panics
    /// When no row is there.
    pub(crate) fn row(&self, slot: usize) -> RowId {
        assert!(slot < self.row_count, "slot {slot} of a page with {} rows", self.row_count);
        read_row_id(&self.bytes, self.shape, slot)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.row_count == self.shape.rows_per_page
    }

    /// Adds part `part` of a row: the bytes of its code that [`PageShape::part`] names.
    ///
    /// # Panics
    /// When the page is full, or `code` is not that of a row of the table.
    pub(crate) fn push(&mut self, row: RowId, part: usize, code: &[u8]) {
        assert!(!self.is_full(), "page is full");
        assert_eq!(code.len(), self.shape.row_bytes, "row size");
        let id_at = self.shape.id_at(self.row_count);
        self.put(id_at, &row.0.to_le_bytes()[..self.shape.id_bytes]);
        self.put(self.shape.code_at(self.row_count), &code[self.shape.part(part)]);
        self.row_count += 1;
        self.part = part;
    }

    /// Completes the page of `owner` as number `page_id`, hands its bytes out and starts over.
    pub(crate) fn seal<T>(
        &mut self,
        owner: TableId,
        page_id: u64,
        take: impl FnOnce(&[u8; PAGE_BYTES]) -> T,
    ) -> T {
        assert!(self.row_count > 0, "an empty page is not written");
        self.put(4, &PAGE_MAGIC.to_le_bytes());
        self.put(6, &PAGE_VERSION.to_le_bytes());
        self.put(8, &owner.0.to_le_bytes());
        self.put(12, &(self.row_count as u16).to_le_bytes());
        self.put(14, &(self.part as u16).to_le_bytes());
        self.put(16, &page_id.to_le_bytes());
        let crc = crc32c(&self.bytes[4..]);
        self.put(0, &crc.to_le_bytes());
        let taken = take(&self.bytes);
        self.bytes.fill(0);
        (self.row_count, self.part) = (0, 0);
        taken
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A page that passed its checks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageView<'a> {
    bytes: &'a [u8; PAGE_BYTES],
    shape: PageShape,
    pub(crate) page_id: u64,
    /// A table, or behind the tables a placement.
    pub(crate) owner: TableId,
    pub(crate) row_count: usize,
    pub(crate) part: usize,
    pub(crate) crc: u32,
}

impl<'a> PageView<'a> {
    /// Checks that `bytes` are page `page_id` of a snapshot whose owners have `shapes`.
    pub(crate) fn parse(bytes: &'a [u8], page_id: u64, shapes: &[PageShape]) -> Result<Self> {
        let bad = |what: &str| Error::corruption(what).with("page_id", page_id);
        let Ok(bytes) = <&[u8; PAGE_BYTES]>::try_from(bytes) else {
            return Err(bad("page is not whole").with("found_bytes", bytes.len()));
        };
        let (stored, computed) = (le_u32(bytes, 0), crc32c(&bytes[4..]));
        if stored != computed {
            return Err(bad("page checksum mismatch")
                .with("expected", format_args!("{stored:#010x}"))
                .with("found", format_args!("{computed:#010x}")));
        }
        if le_u16(bytes, 4) != PAGE_MAGIC || le_u16(bytes, 6) != PAGE_VERSION {
            return Err(bad("not a page of this format version"));
        }
        let found_id = le_u64(bytes, 16);
        if found_id != page_id {
            return Err(bad("another page lies here").with("found", found_id));
        }
        let owner = TableId(le_u32(bytes, 8));
        let Some(shape) = shapes.get(owner.0 as usize).copied() else {
            return Err(bad("page has an unknown owner").with("owner", owner.0));
        };
        let (row_count, part) = (usize::from(le_u16(bytes, 12)), usize::from(le_u16(bytes, 14)));
        if !(1..=shape.rows_per_page).contains(&row_count) || part >= shape.parts_per_row {
            return Err(bad("page header out of range").with("rows", row_count).with("part", part));
        }
        Ok(Self { bytes, shape, page_id, owner, row_count, part, crc: stored })
    }

    /// Returns the row id in `slot`.
    ///
    /// # Panics
    /// When no row is there.
    pub(crate) fn row(&self, slot: usize) -> RowId {
        assert!(slot < self.row_count, "slot {slot} of a page with {} rows", self.row_count);
        read_row_id(self.bytes, self.shape, slot)
    }

    /// Finds `row` and returns what this page has of its code.
    pub(crate) fn find(&self, row: RowId) -> Option<&'a [u8]> {
        let slot = (0..self.row_count).find(|&slot| self.row(slot) == row)?;
        Some(self.code(slot))
    }

    /// Returns what this page has of the code of the row in `slot`.
    ///
    /// # Panics
    /// When no row is there.
    pub(crate) fn code(&self, slot: usize) -> &'a [u8] {
        assert!(slot < self.row_count, "slot {slot} of a page with {} rows", self.row_count);
        let at = self.shape.code_at(slot);
        &self.bytes[at..at + self.shape.part(self.part).len()]
    }
}

fn read_row_id(bytes: &[u8; PAGE_BYTES], shape: PageShape, slot: usize) -> RowId {
    let at = shape.id_at(slot);
    RowId(if shape.id_bytes == 8 { le_u64(bytes, at) } else { u64::from(le_u32(bytes, at)) })
}

pub(crate) fn le_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn le_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn le_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(dim: u32, row_count: u64) -> TableSchema {
        TableSchema::plain("t", row_count, dim)
    }

    #[test]
    fn shapes_fill_pages() {
        let coded = |dim, rows, codec| {
            let s = PageShape::new(&table(dim, rows), &codec);
            (s.id_bytes, s.rows_per_page, s.parts_per_row)
        };
        let shape = |dim, rows| coded(dim, rows, Codec::F32);
        assert_eq!(shape(1, 10), (4, 509, 1));
        assert_eq!(shape(16, 10), (4, 59, 1));
        assert_eq!(shape(16, 1 << 32), (8, 56, 1));
        assert_eq!(shape(1017, 10), (4, 1, 1));
        assert_eq!(shape(1018, 10), (4, 1, 2));
        assert_eq!(shape(4096, 10), (4, 1, 5));
        assert_eq!(coded(64, 10, Codec::F16), (4, 30, 1));
        assert_eq!(coded(64, 10, Codec::Int8), (4, 56, 1));
        assert_eq!(coded(64, 10, Codec::Int4), (4, 101, 1));
        assert_eq!(coded(4096, 10, Codec::Int8), (4, 1, 2));
    }

    #[test]
    fn rows_come_back_whole_or_in_parts() {
        for (dim, row_count) in [(1, 600), (16, 1 << 33), (1016, 2), (2500, 3)] {
            let shape = PageShape::new(&table(dim, row_count), &Codec::F32);
            let code: Vec<u8> = (0..dim).flat_map(|at| (at as f32).to_le_bytes()).collect();
            let row = RowId(row_count - 1);
            let mut found = Vec::new();
            let mut builder = PageBuilder::new(shape);
            for part in 0..shape.parts_per_row {
                builder.push(row, part, &code);
                let bytes = builder.seal(TableId(0), 7, |bytes| bytes.to_vec());
                let page = PageView::parse(&bytes, 7, &[shape]).unwrap();
                assert_eq!((page.row_count, page.part, page.row(0)), (1, part, row));
                found.extend_from_slice(page.find(row).unwrap());
                assert!(page.find(RowId(0)).is_none());
            }
            assert_eq!(found, code);
        }
    }

    fn sealed() -> (Vec<u8>, PageShape) {
        let shape = PageShape::new(&table(16, 100), &Codec::Int8);
        let mut builder = PageBuilder::new(shape);
        for row in 0..40 {
            builder.push(RowId(row), 0, &[row as u8; 20]);
        }
        (builder.seal(TableId(0), 3, |bytes| bytes.to_vec()), shape)
    }

    #[test]
    fn every_flipped_bit_and_every_other_page_is_noticed() {
        let (bytes, shape) = sealed();
        for bit in 0..8 * PAGE_BYTES {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(PageView::parse(&flipped, 3, &[shape]).is_err(), "bit {bit}");
        }
        assert!(PageView::parse(&bytes, 4, &[shape]).is_err());
        assert!(PageView::parse(&bytes, 3, &[]).is_err());
        assert!(PageView::parse(&bytes[..4000], 3, &[shape]).is_err());
    }

    proptest! {
        /// Even with a valid checksum, no header makes a reader panic or leave the page.
        #[test]
        fn random_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), PAGE_BYTES),
            dim in 1u32..2000,
            wide: bool,
            coded: bool,
            plausible: bool,
        ) {
            let codec = if coded { Codec::Int4 } else { Codec::F32 };
            let shape = PageShape::new(&table(dim, if wide { 1 << 33 } else { 100 }), &codec);
            if plausible {
                bytes[4..6].copy_from_slice(&PAGE_MAGIC.to_le_bytes());
                bytes[6..8].copy_from_slice(&PAGE_VERSION.to_le_bytes());
                bytes[8..12].fill(0);
                bytes[13] = 0;
                bytes[14..24].fill(0);
                let crc = crc32c(&bytes[4..]);
                bytes[0..4].copy_from_slice(&crc.to_le_bytes());
            }
            if let Ok(page) = PageView::parse(&bytes, 0, &[shape]) {
                for slot in 0..page.row_count {
                    prop_assert!(page.find(page.row(slot)).is_some());
                }
            } else {
                let is_overfull = usize::from(bytes[12]) > shape.rows_per_page;
                prop_assert!(!plausible || bytes[12] == 0 || is_overfull);
            }
        }
    }
}
