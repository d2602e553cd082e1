//! Look-ahead over the next batches: RecDB's request preprocessor, part by part.
//!
//! | part (RecDB §4.2) | here | switch |
//! |---|---|---|
//! | Hot Key Identifier | [`hot_rows`]: rows used often in the window | `LsmOptions::hot_rule` |
//! | Key Allocator | `key_allocator`: under which prefix does a row live | the same |
//! | Key Sorter | [`key_sorter`]: in which order are rows read | `LsmOptions::sorts_requests` |

pub mod hot_rows;
pub(crate) mod key_allocator;
pub mod key_sorter;
