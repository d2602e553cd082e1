//! Exchange of pooled vectors and gradients between ranks by one-sided writes.
//!
//! Tables are divided over *ranks*; each rank trains with its own samples. The rank that holds a
//! row looks it up, pools, and writes the sum straight into its place in the output of the rank
//! whose sample it is: no collective call, no unpack. Gradients go the other way, straight into
//! the owner's matrix. Source: Chen and others, *Accelerating Multi-GPU Embedding Retrieval with
//! PGAS-Style Communication*, §III ("PGAS" below).
//!
//! ```text
//!   rank 0                                  rank 1
//!   ids ──publish──▶ [inbox] ◀──read── ids of all samples ─▶ look up, pool
//!   output[k] ◀───────── one-sided write of each vector ────────┘
//!        ◀───────────────── signal: epoch ──────────────────────┘
//! ```
//!
//! Ranks share a [`SymmetricHeap`]: as many regions of one layout as there are ranks, each
//! writable by all. Its [`pad`] says what is complete: words that only grow, one for each pair of
//! ranks and kind of message.
//!
//! Invariants: (1) every word of a buffer has one writer per epoch; (2) it is read only after its
//! writer's signal of that epoch was seen; (3) buffers take turns, so a writer of epoch `e + 2`
//! has seen its reader's signal of `e + 1`, which the reader gave after it was done with `e`.

pub mod ahead;
pub mod arrivals;
mod asked;
mod away;
pub mod backward;
mod bags;
pub mod baseline;
mod batch;
mod destinations;
pub mod exchange;
pub mod heap;
pub mod layout;
mod memory;
mod message;
pub mod nodes;
pub mod pad;
mod part;
pub mod plan;
pub mod precision;
pub mod protocol;
pub mod rail_grads;
pub mod rails;
mod row_lookup;
pub mod row_set;
pub mod step;
pub mod uniques;

pub use ahead::Agreement;
pub use arrivals::Arrivals;
pub use backward::UpdateRows;
pub use exchange::{Exchange, LookupRows, Output};
pub use heap::{LocalHeap, ShmHeap, SymmetricHeap};
pub use layout::{Layout, Limits};
pub use memory::{Region, Writer};
pub use nodes::Nodes;
pub use pad::{Channel, Pad};
pub use plan::{ExchangePlan, Group, GroupKind, Member, ShardedTable, Sharding};
pub use precision::Precision;
pub use rails::RailBytes;
pub use row_set::RowSet;
pub use step::{Step, StepRows, Wants};
pub use uniques::{distinct, Distinct};
