//! A log-structured merge tree of row records: RecDB as published.
//!
//! Writes gather in memory and go to disk as sorted, immutable files (SSTs), which compactions
//! merge level by level. On top of that plain tree lie the parts of RecDB, each with a switch in
//! [`LsmOptions`]: hot rows under a prefix of their own, requests read in the tree's order, SSTs
//! chosen for compaction by their outdated rows, and compactions that wait until the look-ahead
//! buffer can feed training meanwhile. Source: Gao et al., RecDB, EDBT 2026.
//!
//! ```text
//! write ─▶ log (optional) ─▶ memtable ─seal─▶ flush ─▶ L0 SSTs ─compaction─▶ L1 ─▶ L2 ...
//! read  ─▶ memtables ─▶ L0 newest first ─▶ L1 ─▶ ...       filter, index, block cache, device
//! step  ─▶ plan (pure) ─▶ schedule (pure) ─▶ worker: new files ─▶ install the next version
//! ```
//!
//! [`LsmStore`] keeps the waist's promise (`tierbed_core::conformance`) and shares the commit
//! protocol of `tierbed-store`: everything written becomes durable together, or nothing.
//! Background work is planned by the calling thread ([`LsmStore::step`], writes, commits) and
//! carried out on a thread of its own, or, with [`WorkerChoice::Inline`], on the calling one; then
//! the same calls give the same files.

mod cache;
mod commit;
pub mod compaction;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/lsm.rs"]
pub mod fuzz;
mod growth;
mod key;
pub mod lookahead;
mod memtable;
mod options;
mod read;
mod scan;
mod sst;
mod stats;
mod store;
mod version;
mod wal;
mod worker;
mod write;

pub use compaction::picker::{Picker, TreeShape};
pub use compaction::scheduler::Scheduling;
pub use key::Key;
pub use lookahead::hot_rows::HotRule;
pub use options::{Durability, LsmOptions, MemoryOptions, SstOptions};
pub use stats::{LsmStats, LATENCY_BUCKETS, LOAD_BUCKETS};
pub use store::LsmStore;
pub use version::{SstId, SstMeta, Version, VersionEdit, LEVELS_MAX};
pub use worker::{Work, WorkerChoice};
