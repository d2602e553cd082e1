//! Which locks does the hand-over use? The ones of the standard library; `crates/tierbed-models`
//! puts its own in their place.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
