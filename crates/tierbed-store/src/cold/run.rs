//! Delta runs: rows that were evicted together, in row order, never changed.
//!
//! ```text
//! key pages      differences of the row ids, one varint each, cut into pages
//! record pages   records in the same order, as many per page as fit
//! ```
//!
//! Both kinds have the header of all pages of Tierbed, with the magic `TBk1` or `TBd1`, the
//! physical page number, and the run's version as generation. The keys are read only when a
//! store is opened. Normative: `docs/reference/formats/cold.md`.

use crate::PageName;
use tierbed_core::{Error, Result};

use crate::cold::cost::PageRun;

pub(crate) const KEYS_MAGIC: [u8; 4] = *b"TBk1";
pub(crate) const DELTA_MAGIC: [u8; 4] = *b"TBd1";

/// One run of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    /// When it was written, among all runs and merges of its table.
    pub(crate) version: u32,
    pub(crate) row_count: u32,
    /// Rows whose newest version is here.
    pub(crate) live_rows: u32,
    /// Bytes of the encoded keys.
    pub(crate) key_bytes: u32,
    /// Its pages, in order: keys, then records. No piece crosses an extent.
    pub(crate) segments: Vec<PageRun>,
}

impl Run {
    /// Lists the physical pages in order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.segments.iter().flat_map(|segment| segment.first..segment.end())
    }

    /// Returns how many of the pages hold keys, given the bytes a page holds.
    pub(crate) fn key_page_count(&self, payload_bytes: usize) -> usize {
        (self.key_bytes as usize).div_ceil(payload_bytes)
    }

    /// Returns the number of pages.
    pub(crate) fn page_count(&self) -> u64 {
        self.segments.iter().map(|segment| u64::from(segment.count)).sum()
    }
}

/// Names a page of a run.
pub(crate) fn run_page(magic: [u8; 4], owner: u32, page: u32, version: u32) -> PageName {
    PageName { magic, owner, page: u64::from(page), generation: version }
}

/// Encodes ascending row ids.
pub(crate) fn encode_keys(rows: impl Iterator<Item = u64>) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), 0);
    for row in rows {
        assert!(row >= next, "rows of a run strictly ascend");
        let mut rest = row - next;
        next = row + 1;
        while rest >= 0x80 {
            bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
    }
    bytes
}

/// Decodes `row_count` row ids below `rows_max`, ascending.
///
/// # Errors
/// `Corruption` when the bytes say anything else.
pub(crate) fn decode_keys(bytes: &[u8], row_count: u32, rows_max: u64) -> Result<Vec<u64>> {
    let damaged = || Error::corruption("keys of a delta run are damaged");
    // Every row takes at least a byte: a wrong count cannot ask for much memory.
    if row_count as usize > bytes.len() {
        return Err(damaged());
    }
    let mut rows = Vec::with_capacity(row_count as usize);
    let (mut next, mut rest, mut shift) = (0u64, 0u64, 0u32);
    for &byte in bytes {
        if shift > 42 {
            return Err(damaged());
        }
        rest |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            let row = next.checked_add(rest).filter(|row| *row < rows_max).ok_or_else(damaged)?;
            rows.push(row);
            (next, rest, shift) = (row + 1, 0, 0);
        }
    }
    if rows.len() != row_count as usize || shift != 0 {
        return Err(damaged());
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_survive(rows in proptest::collection::btree_set(0u64..1 << 40, 0..200)) {
            let bytes = encode_keys(rows.iter().copied());
            let found = decode_keys(&bytes, rows.len() as u32, 1 << 40).unwrap();
            prop_assert!(found.into_iter().eq(rows));
        }

        #[test]
        fn random_bytes_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            count in 0u32..70,
        ) {
            if let Ok(rows) = decode_keys(&bytes, count, 1 << 20) {
                prop_assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(rows.iter().all(|row| *row < 1 << 20));
            }
        }
    }

    #[test]
    fn neighbours_take_a_byte_each() {
        assert_eq!(encode_keys(5000..6000).len(), 1001);
    }
}
