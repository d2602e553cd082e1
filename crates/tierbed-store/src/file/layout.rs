//! Page layout of records: header, checksum, presence bits, slots.
//!
//! A page is one or more whole 4 KiB blocks; it holds as many records as fit, or one record
//! that needs several blocks. Little-endian; normative text: `docs/reference/formats/store.md`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | crc32c of all bytes from 4 to the end of the page |
//! | 4..8 | magic `TBr1` |
//! | 8..12 | table id |
//! | 12..16 | generation: which write of the page this is (file store: 1..=8191) |
//! | 16..24 | page number |
//! | 24..24+B | presence bits, one per record slot, padded to 4 bytes |
//! | 24+B.. | records, then zeros |

#![expect(
    clippy::indexing_slicing,
    reason = "pages have the length of their layout, which callers slice and record and seal assert"
)]

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, TableId, TableSchema};
use tierbed_io::PAGE_BYTES;

/// Magic of a page of record slots with presence bits.
pub(crate) const ROWS_MAGIC: [u8; 4] = *b"TBr1";
/// Bytes before what a page holds.
pub(crate) const HEADER_BYTES: usize = 24;

/// How the records of one table lie in its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageLayout {
    /// Bytes of one record.
    pub record_bytes: usize,
    /// Bytes of one page, a multiple of 4,096.
    pub page_bytes: usize,
    /// Record slots of one page, at least 1.
    pub rows_per_page: u64,
    /// Pages of the table.
    pub page_count: u64,
    records_at: usize,
}

/// Computes the layout of `table`.
#[must_use]
pub(crate) fn page_layout(table: &TableSchema) -> PageLayout {
    let record_bytes = table.record_bytes();
    let records_at = |rows: usize| HEADER_BYTES + 4 * rows.div_ceil(32);
    let page_bytes = (records_at(1) + record_bytes).next_multiple_of(PAGE_BYTES);
    let mut rows = ((page_bytes - HEADER_BYTES) / record_bytes).max(1);
    while rows > 1 && records_at(rows) + rows * record_bytes > page_bytes {
        rows -= 1;
    }
    PageLayout {
        record_bytes,
        page_bytes,
        rows_per_page: rows as u64,
        page_count: table.row_count.div_ceil(rows as u64),
        records_at: records_at(rows),
    }
}

impl PageLayout {
    /// Returns the page of row `row` and its slot in that page.
    #[must_use]
    pub(crate) fn locate(&self, row: u64) -> (u64, usize) {
        (row / self.rows_per_page, (row % self.rows_per_page) as usize)
    }

    /// Returns the record in `slot`, if it was ever written.
    ///
    /// # Panics
    /// When the page has no such slot, or another length than [`page_bytes`](Self::page_bytes).
    #[must_use]
    pub(crate) fn record<'a>(&self, page: &'a [u8], slot: usize) -> Option<&'a [u8]> {
        assert!((slot as u64) < self.rows_per_page, "slot inside the page");
        assert!(page.len() == self.page_bytes, "a page has the length of its layout");
        if page[HEADER_BYTES + slot / 8] >> (slot % 8) & 1 == 0 {
            return None;
        }
        let at = self.records_at + slot * self.record_bytes;
        Some(&page[at..at + self.record_bytes])
    }

    /// Puts `record` into `slot` and marks it present.
    ///
    /// # Panics
    /// When the page has no such slot, or the record another length.
    pub(crate) fn put_record(&self, page: &mut [u8], slot: usize, record: &[u8]) {
        assert!((slot as u64) < self.rows_per_page, "slot inside the page");
        assert!(page.len() == self.page_bytes, "a page has the length of its layout");
        let at = self.records_at + slot * self.record_bytes;
        page[HEADER_BYTES + slot / 8] |= 1 << (slot % 8);
        page[at..at + self.record_bytes].copy_from_slice(record);
    }
}

/// Identity of a page: what a reader expects to find in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageName {
    /// Kind of page.
    pub magic: [u8; 4],
    /// The table and its store: see [`page_owner`].
    pub owner: u32,
    /// Number of the page, in the table or in its file, as its store counts.
    pub page: u64,
    /// Which write of that page.
    pub generation: u32,
}

/// Returns what pages of `table` in the store of that number hold: tables of a store differ in it,
/// and so does a table of one store from its equal in another.
#[must_use]
pub fn page_owner(store: u32, table: TableId) -> u32 {
    store ^ table.0
}

/// Writes header and checksum over a page whose records are in place.
///
/// # Panics
/// When the page is shorter than a header.
pub(crate) fn seal(page: &mut [u8], name: PageName) {
    assert!(page.len() >= HEADER_BYTES, "a page has room for its header");
    fill(&mut page[4..HEADER_BYTES], name);
    let crc = crc32c(&page[4..]);
    page[..4].copy_from_slice(&crc.to_le_bytes());
}

// `rest` are header bytes 4..24.
fn fill(rest: &mut [u8], name: PageName) {
    let fields = name
        .magic
        .into_iter()
        .chain(name.owner.to_le_bytes())
        .chain(name.generation.to_le_bytes())
        .chain(name.page.to_le_bytes());
    for (place, byte) in rest.iter_mut().zip(fields) {
        *place = byte;
    }
}

/// Checks that `page` is exactly the write `name` asks for.
///
/// # Errors
/// `Corruption`: a flipped bit (checksum), another page (misdirected write), or an older
/// write of this page (lost write).
pub(crate) fn verify(page: &[u8], name: PageName, file: &str) -> Result<()> {
    let describe = |error: Error| {
        error.with("file", file).with("page", name.page).with(
            "remedy",
            "restore the store's folder from a copy, or train again from a checkpoint",
        )
    };
    let Some((crc_bytes, rest)) = page.split_first_chunk::<4>() else {
        return Err(describe(Error::corruption("page is too short")));
    };
    let (expected, found) = (u32::from_le_bytes(*crc_bytes), crc32c(rest));
    if expected != found {
        return Err(describe(Error::corruption("page checksum mismatch"))
            .with("expected", format_args!("{expected:#010x}"))
            .with("found", format_args!("{found:#010x}")));
    }
    let mut wanted = [0u8; HEADER_BYTES - 4];
    fill(&mut wanted, name);
    let Some(head) = rest.first_chunk::<{ HEADER_BYTES - 4 }>() else {
        return Err(describe(Error::corruption("page is too short")));
    };
    if *head == wanted {
        return Ok(());
    }
    let generation = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    Err(describe(Error::corruption("page is valid but not the one that was written here last"))
        .with("expected_generation", name.generation)
        .with("found_generation", generation))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::OptimizerKind;

    fn table(dim: u32, row_count: u64) -> TableSchema {
        TableSchema {
            optimizer: OptimizerKind::RowWiseAdagrad,
            ..TableSchema::plain("t", row_count, dim)
        }
    }

    #[test]
    fn pages_are_filled_and_never_overfilled() {
        for dim in (1..300).chain([1000, 1022, 1023, 4096]) {
            let layout = page_layout(&table(dim, 1_000_000));
            let used = layout.records_at + layout.rows_per_page as usize * layout.record_bytes;
            assert!(used <= layout.page_bytes, "dim {dim}");
            let one_more = layout.rows_per_page as usize + 1;
            let needed = HEADER_BYTES + 4 * one_more.div_ceil(32) + one_more * layout.record_bytes;
            assert!(needed > layout.page_bytes, "dim {dim} leaves room for another row");
        }
    }

    #[test]
    fn a_record_larger_than_a_block_gets_a_page_of_several() {
        let layout = page_layout(&table(1100, 10));
        assert_eq!((layout.page_bytes, layout.rows_per_page, layout.page_count), (8192, 1, 10));
    }

    fn sealed(layout: &PageLayout) -> (Vec<u8>, PageName) {
        let name = PageName { magic: ROWS_MAGIC, owner: 3, page: 17, generation: 5 };
        let mut page = vec![0; layout.page_bytes];
        layout.put_record(&mut page, 2, &vec![0; layout.record_bytes]);
        seal(&mut page, name);
        (page, name)
    }

    #[test]
    fn presence_is_a_bit_not_a_value() {
        let layout = page_layout(&table(9, 1000));
        let (page, name) = sealed(&layout);
        verify(&page, name, "f").unwrap();
        assert_eq!(layout.record(&page, 2), Some(&vec![0; layout.record_bytes][..]));
        assert_eq!(layout.record(&page, 3), None);
    }

    #[test]
    fn another_page_and_an_older_write_are_noticed() {
        let layout = page_layout(&table(9, 1000));
        let (page, name) = sealed(&layout);
        for other in [
            PageName { page: 18, ..name },
            PageName { owner: 4, ..name },
            PageName { generation: 6, ..name },
            PageName { magic: *b"TBd1", ..name },
        ] {
            let error = verify(&page, other, "f").unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption);
        }
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_noticed(bit in 0usize..4096 * 8) {
            let layout = page_layout(&table(9, 1000));
            let (mut page, name) = sealed(&layout);
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(verify(&page, name, "f").is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let name = PageName { magic: ROWS_MAGIC, owner: 0, page: 0, generation: 1 };
            let _ = verify(&bytes, name, "f");
        }
    }
}
