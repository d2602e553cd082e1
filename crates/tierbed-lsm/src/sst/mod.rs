//! The SST format: a sorted, immutable file of rows.
//!
//! An SST is a row of equal blocks: rows, then the index (first key of every rows block), then
//! the filter. What else one must know about it (key range, counts) is in the version.
//!
//! ```text
//! | rows 0 | rows 1 | ... | index | ... | filter | ... |      every block names its SST and number
//! ```

pub(crate) mod block;
mod bloom;
mod cursor;
mod reader;
mod writer;

pub(crate) use block::{rows_per_block, Rows, HEADER_BYTES};
pub(crate) use cursor::RunCursor;
pub(crate) use reader::{verify_sst, OpenSst, SstTools};
pub(crate) use writer::SstWriter;

/// Reads a little-endian word; `None` past the end.
pub(crate) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_le_bytes(*word))
}

/// Reads a little-endian double word; `None` past the end.
pub(crate) fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..)?.first_chunk::<8>()?;
    Some(u64::from_le_bytes(*word))
}
