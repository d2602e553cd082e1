//! Cache tiers, resident rows, and what answers in place of a miss.
//!
//! ```text
//! unique rows ─▶ tier 1 ─▶ tier 2 ─▶ … ─▶ resident rows ─▶ miss: read, surrogate or default
//!                  ▲  wide    narrow │        chosen offline                │  ▲
//!                  └── rows read; what leaves a tier falls to the next ◀────┘  │
//!                                    └─ evicted from the last: its neighbour ──┘
//! ```
//!
//! A [`CacheTier`] is a codec, a policy, an admission rule and a share of the bytes: EVStore's
//! first and second layer are two of them. [`ResidentTable`]s are rows that a plan made from a
//! log keeps in memory for as long as the snapshot is open: the most used ones in one codec, a few
//! bytes of a product code for all others. [`NeighbourOptions`] let rows that left the tiers be
//! answered by others that are in one. Every answer that is not the stored row is counted
//! ([`LookupStats`](crate::LookupStats)).
//!
//! Policies are told which rows one sample asked for together, and how many of these needed no
//! read, whichever tier had them.
//!
//! Source: EVStore §4 (three layers). Differs: what leaves the first tier falls to the second;
//! the released code sends misses there by the number of their table.

mod coded;
mod neighbours;
mod options;
mod replacing;
mod resident;
mod stack;

pub use neighbours::{
    NeighbourFile, NeighbourOptions, NeighbourStats, NeighboursOf, NEIGHBOURS_MAGIC,
};
pub use options::{CachePart, CacheTier, MissMode, SharedTiers, TierStackOptions};
pub use resident::{HeadRows, ResidentTable, Tail};
pub use stack::TierSummary;

pub(crate) use neighbours::Neighbours;
pub(crate) use resident::resident_bytes;
pub(crate) use stack::{Answer, CacheBytes, Group, TierScratch, TierStack};
