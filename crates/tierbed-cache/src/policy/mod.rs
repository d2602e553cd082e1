//! Who leaves when a pool is full?
//!
//! A policy sees slot numbers and hashes, never rows: it orders the occupied slots of one pool
//! and names the next victim. The tier tells it about every slab of slots that joins or leaves
//! the pool, so that a policy's memory is a fixed number of bytes per slot and counts against
//! the tier's budget.

mod lru;

pub use lru::Lru;

/// Slots of one slab are numbered `slab << SLOT_BITS ..`; bounds the slots of a slab.
pub const SLOT_BITS: u32 = 12;

/// Orders the occupied slots of one pool.
///
/// Contract, checked by [`check_eviction_policy`](crate::check_eviction_policy):
/// - slots come from slabs told by [`add_slab`](Self::add_slab) and not yet dropped;
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

    /// Adds the empty slots `slab << SLOT_BITS ..+ slot_count`.
    fn add_slab(&mut self, slab: u32, slot_count: u32);

    /// Forgets a slab whose slots are all empty.
    fn drop_slab(&mut self, slab: u32);

    /// Notes that a row moved into the empty slot `slot`; `hash` is that of its key, for
    /// policies that remember rows beyond their stay.
    fn insert(&mut self, slot: u32, hash: u64);

    /// Notes that the row of occupied slot `slot` was asked for.
    fn touch(&mut self, slot: u32);

    /// Notes that the row of occupied slot `slot` left, evicted or removed.
    fn remove(&mut self, slot: u32, hash: u64);

    /// Names the occupied slot that leaves next.
    fn victim(&mut self) -> Option<u32>;

    /// Lists the occupied slots in the order in which they would leave.
    fn dump(&self) -> Vec<u32>;
}

/// The policies there are: the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used.
    #[default]
    Lru,
}

impl PolicyKind {
    /// Every kind, for tests and tables.
    pub const ALL: [Self; 1] = [Self::Lru];

    /// Builds an empty policy.
    #[must_use]
    pub fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
        }
    }
}
