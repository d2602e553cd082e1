//! HashDB: the two-level hash of AIBox, RecDB's baseline.
//!
//! Public of AIBox (Zhao et al., CIKM 2019) are the idea and its figures, not its code: a hash in
//! memory names the group of a key and the group's place on SSD, because one entry per key would
//! not fit; an LRU and an LFU cache hold rows; changed groups are written as a whole to new
//! files, and files with too many outdated groups are merged. RecDB (§5.1.4, §5.3) compares with
//! that: 1.5 % of the memory for the first level, the rest for caches; all changed rows of a full
//! cache are written.
//!
//! Our choices: groups ("buckets") of one page where the memory allows, twice as long each time
//! it does not; 8 bytes of index per bucket, counted; rows hashed inside ranges of a megabyte so
//! that scans need bounded memory; one cache in two parts for the store; outdated share 50 %;
//! checksums. Reads and writes of buckets are submitted together, which favours it.
//!
//! ```text
//! row ─▶ cache (LRU half, LFU half) ─full─▶ changed rows by bucket ─▶ read, merge, append
//! row ─▶ hash ─▶ bucket ─▶ index: file, page, length ─▶ one read ─▶ row
//! ```

mod bucket;
mod cache;
mod files;
mod index;
mod merge;
mod scan;
mod store;
mod traffic;

pub use store::{HashDb, HashDbOptions};
