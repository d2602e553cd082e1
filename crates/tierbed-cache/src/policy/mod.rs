//! Eviction policies: which slot a full pool gives up.
//!
//! A policy sees slot numbers and hashes, never rows: it orders the occupied slots of one pool
//! and names the next victim. The tier tells it about every slab of slots that joins or leaves
//! the pool, so that a policy's memory is a fixed number of bytes per slot and counts against
//! the tier's budget.
//!
//! Rows are asked for in groups. The calls for one group, in this order:
//!
//! ```text
//! begin_group ─▶ touch (each hit), arrive (each miss) ─▶ end_group
//!                                    └─ admitted ─▶ victim, evict (if full) ─▶ insert
//! ```

mod auto;
pub mod balance;
pub mod buckets;
#[cfg(test)]
#[path = "../../../../tools/lab/src/policy/conformance.rs"]
pub mod conformance;
mod credit_rule;
mod ev_arc;
mod ev_car;
mod ev_lfu;
pub mod ghosts;
mod group_frequency;
pub mod list;
mod lru;
mod rank_counts;
mod rank_ring;
mod registry;
mod return_rates;
mod s3_fifo;
mod score;
mod score_frame;
mod score_table;
mod shadow;
pub mod slots;
mod two_clocks;
mod victims;

pub use auto::Auto;
pub use credit_rule::{CreditRule, MissWeight};
pub use ev_arc::EvArc;
pub use ev_car::{BestGroup, EvCar};
pub use ev_lfu::{EvLfu, FlushRule};
pub use group_frequency::GroupFrequency;
pub use lru::Lru;
pub use registry::{register_policy, OtherPolicy, PolicyKind};
pub use s3_fifo::S3Fifo;
pub use score_frame::ScoreFrame;
pub(crate) use score_table::ScoreTable;
pub use two_clocks::{MarkRule, TwoClocks};

use tierbed_core::env::mix64;

/// Slots of one slab are numbered `slab << SLOT_BITS ..`; bounds the slots of a slab.
pub const SLOT_BITS: u32 = 12;

/// Most slabs of a tier, and slots of a cache: policies number slots with 24 bits.
pub const SLABS_MAX: u32 = (1 << (24 - SLOT_BITS)) - 1;

/// The rows one request asks for together.
#[derive(Debug, Clone, Copy)]
pub struct Group<'a> {
    /// Hashes of the rows that belong to this pool, each once: [`mix64`] of the table, from bit 40
    /// on, and the row below. Nothing is lost, so that a policy may tell tables apart.
    pub hashes: &'a [u64],
    /// Rows of the whole group, of this pool and others.
    pub row_count: u32,
    /// How many of them were hits.
    pub hit_count: u32,
}

impl Group<'_> {
    /// Returns the rows that were missing.
    #[must_use]
    pub fn miss_count(&self) -> u32 {
        self.row_count.saturating_sub(self.hit_count)
    }
}

/// What a policy says of a row that was missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Whether the row should come in.
    pub is_admitted: bool,
    /// The row's score now, to be remembered with its record when it does not come in.
    pub score: u16,
    /// Rows that leave before it comes in, even when there is room.
    pub flushed: u32,
}

impl Arrival {
    /// A row that comes in as any other.
    #[must_use]
    pub fn admitted(score: u16) -> Self {
        Self { is_admitted: true, score, flushed: 0 }
    }
}

/// Orders the occupied slots of one pool.
///
/// Contract, checked by `tierbed_lab::policy::check_eviction_policy`:
/// - slots come from slabs added by [`add_slab`](Self::add_slab) and not yet dropped;
/// - [`victim`](Self::victim) is an occupied slot whenever there is one, and stays the same
///   until the next call that changes something;
/// - [`dump`](Self::dump) lists every occupied slot once, the victim first.
pub trait EvictionPolicy: Send + std::fmt::Debug {
    /// Returns the policy's name, as in options and statistics.
    fn name(&self) -> &'static str;

    /// Returns the bytes it keeps per slot.
    fn bytes_per_slot(&self) -> usize;

    /// Returns the bytes it keeps per slab of the tier, whether or not the slab is in its pool.
    fn bytes_per_slab(&self) -> usize;

    /// Returns the bytes it keeps beside those of each of `slot_count` slots: they do not grow with
    /// the slots, or end at some number of them.
    fn bytes_fixed(&self, _slot_count: usize) -> usize {
        0
    }

    /// Adds the empty slots `slab << SLOT_BITS ..+ slot_count`.
    fn add_slab(&mut self, slab: u32, slot_count: u32);

    /// Forgets a slab whose slots are all empty.
    fn drop_slab(&mut self, slab: u32);

    /// Adapts what depends on the number of slots, after a slab joined or left.
    fn slots_changed(&mut self) {}

    /// Notes that the rows of `group` were asked for together; the calls for each follow.
    fn begin_group(&mut self, _group: &Group<'_>) {}

    /// Notes that the group that began last has been dealt with.
    fn end_group(&mut self) {}

    /// Notes that the row of occupied slot `slot` was asked for.
    fn touch(&mut self, slot: u32);

    /// Notes that the row of `hash` was asked for and missing, and says whether it should come
    /// in. `score` is what was remembered with its record, 0 for a row never seen; `is_full`
    /// tells that another row would have to leave for it.
    fn arrive(&mut self, _hash: u64, score: u16, _is_full: bool) -> Arrival {
        Arrival::admitted(score)
    }

    /// Notes that a row moved into the empty slot `slot`, with the score of its [`Arrival`];
    /// `hash` is that of its key, for policies that remember rows beyond their stay.
    fn insert(&mut self, slot: u32, hash: u64, score: u16);

    /// Returns the range of the scores of rows that are evicted now, for tables that keep them.
    fn score_frame(&self) -> ScoreFrame {
        ScoreFrame::default()
    }

    /// Names the occupied slot that leaves next.
    fn victim(&mut self) -> Option<u32>;

    /// Notes that the row of the [`victim`](Self::victim) left to make room. Returns the score
    /// to remember with its record.
    fn evict(&mut self, slot: u32, _hash: u64) -> u16 {
        self.remove(slot)
    }

    /// Notes that the row of occupied slot `slot` left for another reason than its rank.
    /// Returns the score to remember with its record.
    fn remove(&mut self, slot: u32) -> u16;

    /// Lists the occupied slots in the order in which they would leave.
    fn dump(&self) -> Vec<u32>;
}

/// Returns the order in which the slots of `policy` leave when nothing else happens.
pub fn order_of_leaving(mut policy: impl EvictionPolicy) -> Vec<u32> {
    let mut slots = Vec::new();
    while let Some(slot) = policy.victim() {
        policy.evict(slot, mix64(u64::from(slot)));
        slots.push(slot);
    }
    slots
}

#[cfg(test)]
mod tests;
