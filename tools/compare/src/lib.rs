//! What do others do with the same rows? Baselines behind the waist, for comparison and for
//! users who have them already.
//!
//! | store | where rows live | commit |
//! |---|---|---|
//! | [`HashDb`] | buckets appended to files (AIBox) | files synced, index written |
//! | [`MmapStore`] | a dense array in a mapped file | `msync`; undo pages until then |
//! | [`RocksStore`] | RocksDB, loaded at run time | memtables flushed, a RocksDB checkpoint |
//!
//! [`register_stores`] makes them backends of the engine, which does not depend on this crate.
//!
//! All keep the waist's promise (`tierbed_core::conformance`) and use the commit protocol of
//! `tierbed-store`. What each guarantees beyond and what it costs:
//! `docs/how-to/choose-a-backend.md`.

mod ffi;
mod hashdb;
mod mmap;
mod registry;
mod rocks;

pub use hashdb::{HashDb, HashDbOptions};
pub use mmap::{MmapOptions, MmapStore};
pub use registry::register_stores;
pub use rocks::{is_rocksdb_available, RocksMode, RocksOptions, RocksStore};

use tierbed_core::store::Attachment;
use tierbed_core::RowKey;
use tierbed_store::CommitLog;

fn attached_bytes(log: &CommitLog, attachments: &[Attachment<'_>]) -> u64 {
    let new: u64 = attachments.iter().map(|attachment| attachment.bytes.len() as u64).sum();
    log.attachment_bytes() + new
}

/// One number per row that orders as [`RowKey`] does: table above, row below (40 bits).
fn packed(key: RowKey) -> u64 {
    (u64::from(key.table.0) << 40) | key.row.0
}
