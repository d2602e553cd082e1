//! The primitives of [`parts`](super::parts). `tierbed-models` replaces them by name.

pub(super) use std::sync::{Mutex, MutexGuard};
