//! The synchronisation primitives of a hand-over; the models replace them by name.

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
