//! Rows until their next use: in memory, or in the bucket of the window that needs them.
//!
//! The rows of one record length share a *size class* ([`size_class`]): in memory a list in blocks
//! of rows per future window ([`lists`]), on disk a *bucket* per future window: a chain of chunks
//! in extents of one file ([`extents`]). A list is both the cache of its window and the write
//! buffer of its bucket. When blocks run short, the largest list of a window that is far away is
//! appended to its bucket; when a window comes, its bucket has been read, in one go, while the
//! window before it was trained on ([`pipeline`]). Where memory is too small for a list per window,
//! windows that are far share one ([`spans`]).
//!
//! ```text
//!              list of window 12 ──(largest, far)──▶ bucket of window 12 ──(while 11 trains)──┐
//! used in 7 ─▶ list of window 8  ───────────────────────────────────────────▶ rows of 8       │
//!   never seen ─▶ initial value ────────────────────────────────────────────▶ rows of 12  ◀───┘
//! ```

pub(crate) mod disk;
pub(crate) mod extents;
pub(crate) mod lists;
pub(crate) mod pipeline;
pub(crate) mod row_mover;
pub(crate) mod size_class;
pub(crate) mod sizing;
pub(crate) mod spans;
pub(crate) mod split;
pub(crate) mod storage_thread;
pub(crate) mod unplanned;
pub(crate) mod window_rows;
