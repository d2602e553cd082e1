//! Hand-over of work to other threads: a rendezvous for one job, a queue for many.
//!
//! By ownership: what is handed over, the giver no longer has, so that no two threads ever share
//! a row. A [`Rendezvous`] joins one caller and one worker and holds one job (storage work beside
//! training); a [`Queue`] joins one caller and many workers (transfers in flight).
//!
//! [`Leases`] lend one value to many while another swaps it.
//!
//! Everything here is built from the three names of `sync`. The crate `tierbed-models` compiles
//! these same files over a scheduler that tries every order of events, and shows that it would
//! notice a missing wake-up.

mod leases;
mod queue;
mod rendezvous;
mod sync;

pub use leases::{Lease, Leases};
pub use queue::Queue;
pub use rendezvous::{Disconnected, Rendezvous};
