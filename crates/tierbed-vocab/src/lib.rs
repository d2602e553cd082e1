//! Open vocabularies: 64-bit ids of any value mapped to dense rows (id remapping).
//!
//! An id gets the next free row when it first appears (or after as many appearances as its
//! table's [`Policy`] demands), so above this crate every table is dense and every engine, order
//! and backend works as it does for `num_embeddings=N`. Row 0 is the *shared row*: ids without a
//! row of their own read and train it.
//!
//! The index is an extendible hash of pages, and its pages are *rows of the store*: a hidden
//! table `_ids.<table>` beside each open one. So index and rows are committed together or not at
//! all, whatever the backend, and a crash can never leave one without the other.
//!
//! ```text
//! id ─ mix ─▶ hash ─ first bits ─▶ directory (in memory) ─▶ bucket page (cached) ─▶ row
//! ```
//!
//! In memory: four bytes of directory per bucket slot (about 0.1 bytes per id), and a cache of
//! pages of the size asked for. One page read per id not cached; a batch's ids are probed in
//! bucket order, together.
//!
//! Source (extendible hashing): Fagin, Nievergelt, Pippenger, Strong, TODS 1979.

pub mod attachments;
mod bucket;
mod directory;
mod free_rows;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/vocab.rs"]
pub mod fuzz;
mod pages;
mod policy;
mod published;
mod vocabulary;

pub use bucket::{mix, unmix};
pub use pages::{PageCache, PAGE_BYTES};
pub use policy::{Eviction, Policy};
pub use published::{PageSource, Published};
pub use vocabulary::{
    bucket_table, free_table, is_free_table, Evicted, FreedSink, Growth, IdEntry, Scratch, State,
    Vocabulary, BATCH_BYTES_PER_INDEX, SHARED_ROW,
};
