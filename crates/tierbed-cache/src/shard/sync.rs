//! The primitives of [`parts`](super::parts). `tierbed-models` replaces them by name.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::{Mutex, MutexGuard};

/// How often a lock that another thread has is tried before giving up: some microseconds, in which
/// whoever copies rows out of a part is done.
pub(super) const TRIES: usize = 128;
