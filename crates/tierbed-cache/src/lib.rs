//! Row caches in DRAM over any store: tiers, eviction policies, admission, replay.
//!
//! A [`RowTier`] keeps rows within a byte budget: one mechanism (slabs, an index, free slots)
//! and a policy that only decides evictions ([`EvictionPolicy`], [`Lru`]). A [`ShardedTier`]
//! splits the budget over locks, so that threads hitting different rows do not meet. Tiers hold
//! copies: losing one costs a read, never a row. Adding a policy is one file in [`policy`], one
//! line in its registry; the kit `tierbed_lab::policy::check_eviction_policy` then holds it to
//! the contract.

mod admission;
mod budget;
mod index;
mod key_cache;
mod key_numbers;
pub mod policy;
mod replay;
mod shard;
mod sizing;
mod slab;
mod tier;

pub use admission::{AdmissionBitmap, AdmissionRule};
pub use budget::{MemberOptions, MemberStats, Membership, TierBudget, TierBudgetStats};
pub use index::SlotIndex;
pub use key_cache::{KeyCache, KeyCacheStats};
pub use policy::{EvictionPolicy, Lru, PolicyKind};
pub use replay::{ReplayCache, ReplayCounts};
pub use shard::{ShardedTier, Visits};
pub use sizing::{RowClass, TierOptions};
pub use tier::{Insertion, RowTier, TierGroup, TierStats};
