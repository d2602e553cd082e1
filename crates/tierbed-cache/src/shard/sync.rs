//! What [`parts`](super::parts) is built from. `tierbed-models` puts models in its place.

pub(super) use std::sync::{Mutex, MutexGuard};
