//! Does a hand-over between threads hold in every order of events?
//!
//! `build.rs` compiles the files of [`tierbed_core::handover`] into this crate, over loom's mutex
//! and condition variable instead of the standard library's. A test then runs in every order that
//! the two could come in: a forgotten wake-up is a deadlock, a row read too early an old value.
//! Beside the files as they are stand copies with one mistake each, which the same tests must
//! refuse; so the models are known to be able to fail.
//!
//! What is modelled: a job to a background thread and back (compaction; the forward order's
//! storage thread, with the rows of a window as the job), and transfers to a few threads and back
//! (the prefetch of a look-ahead window through the I/O pool). And the locks of `tierbed-cache`:
//! rows that threads look up, offer and replace in the shards of a tier. And the swap of what a
//! server answers from, under lookups that keep rows in tiers.
//!
//! [`tierbed_core::handover`]: ../tierbed_core/handover/index.html

mod sync {
    pub(super) use loom::hint::spin_loop;
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// Once more, so that a lock may come free meanwhile.
    pub(super) const TRIES: usize = 2;
}

include!(concat!(env!("OUT_DIR"), "/handovers.rs"));
