//! The cold store: merged base ranges plus delta runs, for look-ahead of a few batches.
//!
//! For streams, and whatever else has no known end. Each table has a *base array*, where a row's
//! place is arithmetic, and *delta runs* of rows that were evicted together, in row order, newest
//! first. Places of delta rows are in memory, six bytes each. The base range that has most
//! outdated rows per byte to move is merged first, and rather when the buffered batches outlast
//! it. A read of many rows becomes page probes or a sweep, by measured cost. Source: RecDB §4.
//!
//! ```text
//! write ─▶ write buffer ─▶ run (keys, records)      sequential, fresh pages
//!                            │ merge: picker, scheduler
//!                            ▼
//! read ◀── buffer, delta list, base ◀── base range   copy on write into another extent
//! ```
//!
//! | RecDB | here |
//! |---|---|
//! | outdated-row monitor (§4.3) | length of a range's delta list ([`index`]) |
//! | compaction picker (§4.3, Eq. 1) | [`picker`] over base ranges |
//! | compaction scheduler (§4.4, Eq. 2) | [`scheduler`], informed by `TrainStore::observe` |
//! | key sorter (§4.2) | requests sorted by place, joined by [`cost`] |
//!
//! Invariants: what the last commit needs is never overwritten; every page names its table, its
//! number and its version, so lost, torn and misdirected writes are found; presence is a bit.

mod commit;
mod cost;
mod data_path;
mod disk;
mod flush;
#[cfg(any(test, fuzzing))]
#[path = "../../../../tools/fuzz/entries/store_cold.rs"]
pub mod fuzz;
mod geometry;
mod image;
mod index;
mod merge;
mod options;
mod picker;
mod read;
mod run;
mod run_pages;
mod scheduler;
mod stats;
mod store;
mod table;
mod table_file;
mod write_buffer;

pub use options::{ColdOptions, MemoryOptions, DELTA_SHARE_DEFAULT};
pub use stats::ColdStats;
pub use store::ColdStore;
