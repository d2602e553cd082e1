//! Where is a row until it is needed again? In memory, or in the bucket of the next window.
//!
//! The rows of one record length share a *shelf* ([`shelf`]): in memory a list in blocks of rows
//! per future window ([`lists`]), on disk a *bucket* per future window: a chain of chunks in
//! extents of one file ([`extents`]). A list is both the cache of its window and the write buffer
//! of its bucket. When blocks run short, the largest list of a window that is far away is appended
//! to its bucket; when a window comes, its bucket has been read, in one go, while the window
//! before it was trained on ([`river`]). Where memory is too small for a list per window, windows
//! that are far share one ([`spans`]).
//!
//! ```text
//!              list of window 12 ──(largest, far)──▶ bucket of window 12 ──(while 11 trains)──┐
//! used in 7 ─▶ list of window 8  ───────────────────────────────────────────▶ rows of 8       │
//!   never seen ─▶ initial value ────────────────────────────────────────────▶ rows of 12  ◀───┘
//! ```

pub(crate) mod disk;
pub(crate) mod extents;
pub(crate) mod ferry;
pub(crate) mod lists;
pub(crate) mod parking;
pub(crate) mod pilot;
pub(crate) mod river;
pub(crate) mod shelf;
pub(crate) mod sizing;
pub(crate) mod spans;
pub(crate) mod split;
pub(crate) mod window;
