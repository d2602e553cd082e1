//! What is a hand-over made of? The models put others of the same names in their place.

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
