//! Read-write row stores for training, and their atomic commits.
//!
//! | store | where rows live | useful for |
//! |---|---|---|
//! | [`FileStore`] | direct-addressed records in 4 KiB pages on disk | tables beyond memory |
//! | [`cold::ColdStore`] | base ranges and delta runs on disk | streams, far beyond memory |
//! | [`MemoryStore`] | plain memory | tables that fit, and the oracle of every test |
//!
//! All keep the waist's promise (`tierbed_core::conformance`) and share one commit protocol
//! ([`CommitLog`]): everything written becomes durable together, or nothing does. Stores of other
//! crates (`tierbed-lsm`) use the same protocol.

pub mod cold;
mod commit;
mod extents;
mod file;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/store.rs"]
pub mod fuzz;
pub mod kept;
pub mod mark;
mod memory;
pub mod registry;
pub mod shards;

pub use commit::{
    check_attachments, AttachmentMeta, CommitFailure, CommitLog, FoundCommit, Manifest, TableMeta,
};
pub use extents::ExtentPool;
pub use file::{check_records, page_owner, FileStore, FileStoreOptions};
pub(crate) use file::{page_layout, seal, verify, PageLayout, PageName, HEADER_BYTES, ROWS_MAGIC};
pub use memory::MemoryStore;
