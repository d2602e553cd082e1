//! One budget of cached rows shared by several models.
//!
//! A model *joins* a [`TierBudget`] with its tiers and has its floor from then on; what is beyond
//! all floors goes where it makes most hits. Each model's hits at every size are measured by
//! counts of uses of a sample of its rows, and from time to time the lookup that
//! asked last divides anew: members that get less evict rows first, then the others grow.
//!
//! ```text
//! model A ─ tiers ┐                       ┌ hits with 0, 1, .. 64 units ┐
//! model B ─ tiers ┼─ sample of the rows ─▶│ A ▁▃▅▆▇▇    B ▁▁▁▂▅▇       │─▶ most hits: A 24, B 40
//! model C ─ tiers ┘                       └─────────────────────────────┘
//! ```
//!
//! Invariant: rows, index, keys, policies, scores, admission and counts of all models together
//! never take more than the limit, while memory moves neither. A lookup takes no lock that is
//! common to models; it tries a model's own one when it asks for a row of the sample, and goes on
//! without when that is taken.
//!
//! Source: EVStore §8.4, experiment 12 (several models on one machine, a fixed part each).
//! Differs: parts follow demand.

mod demand;
mod division;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use demand::{Demand, Sample};
use division::{divide, Claim, UNITS};
use tierbed_core::{Error, Result, RowKey};

use crate::shard::ShardedTier;
use crate::sizing::TierOptions;
use crate::tier::{hash_of, TierStats};

/// Groups with rows of the sample from one division to the next, of all models.
const GROUPS_PER_EPOCH: u64 = 2048;
/// Part of the limit that a model's counts of uses take, about.
const DEMAND_SHARE: u64 = 256;
/// Part of the limit that is a model's floor where none is given.
const FLOOR_SHARE: u64 = 16;

/// Bytes that the cached rows of several models share.
#[derive(Debug)]
pub struct TierBudget {
    limit_bytes: u64,
    groups_per_epoch: u64,
    /// Groups with rows of the sample so far.
    groups: AtomicU64,
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    list: Vec<Arc<Member>>,
    division_count: u64,
    bytes_moved: u64,
}

/// What a model brings.
#[derive(Debug, Clone)]
pub struct MemberOptions {
    /// Its name in statistics.
    pub name: String,
    /// Bytes that it always has; `None`: a sixteenth of the limit.
    pub floor_bytes: Option<u64>,
    /// Its tiers, the first asked first, and the share of each. Their capacity is not looked at.
    pub tiers: Vec<(TierOptions, f64)>,
    /// Bytes that it takes besides its tiers.
    pub fixed_bytes: u64,
}

/// A model's place in a budget; given up when dropped, with all its rows.
#[derive(Debug)]
pub struct Membership {
    budget: Arc<TierBudget>,
    member: Arc<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    floor_bytes: u64,
    fixed_bytes: u64,
    tiers: Vec<(Arc<ShardedTier>, f64)>,
    /// Units and bytes it has now.
    held: Mutex<(usize, u64)>,
    sample: Sample,
    demand: Mutex<Demand>,
    rows_asked: AtomicU64,
    rows_hit: AtomicU64,
}

/// What a budget holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierBudgetStats {
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes of all rows and metadata.
    pub used_bytes: u64,
    /// Divisions so far that changed something.
    pub division_count: u64,
    /// Bytes that changed hands in them.
    pub bytes_moved: u64,
    /// The models, in the order in which they joined.
    pub members: Vec<MemberStats>,
}

/// What a model has of a budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStats {
    /// Its name.
    pub name: String,
    /// Bytes that it always has.
    pub floor_bytes: u64,
    /// Bytes that it may use now.
    pub capacity_bytes: u64,
    /// Bytes that it uses: rows and metadata.
    pub used_bytes: u64,
    /// Rows asked for.
    pub rows_asked: u64,
    /// Of these, rows that needed no read.
    pub rows_hit: u64,
    /// Its tiers together.
    pub tiers: TierStats,
}

impl TierBudget {
    /// Builds a budget without members.
    ///
    /// # Errors
    /// `Invalid` for no bytes.
    pub fn new(limit_bytes: u64) -> Result<Arc<Self>> {
        Self::with_epoch(limit_bytes, GROUPS_PER_EPOCH)
    }

    /// As [`new`](Self::new); divides anew after `groups` groups with rows of a sample.
    ///
    /// # Errors
    /// `Invalid` for no bytes or no groups.
    pub fn with_epoch(limit_bytes: u64, groups: u64) -> Result<Arc<Self>> {
        if limit_bytes == 0 || groups == 0 {
            return Err(Error::invalid("a tier budget needs bytes, and groups between divisions")
                .with("limit_bytes", limit_bytes)
                .with("groups", groups));
        }
        Ok(Arc::new(Self {
            limit_bytes,
            groups_per_epoch: groups,
            groups: AtomicU64::new(0),
            members: Mutex::default(),
        }))
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Lets a model in, with its floor; others give up what is beyond theirs for it.
    ///
    /// # Errors
    /// `Invalid` when all floors together are more than the limit, or the floor is less than what
    /// the model takes without a row, naming the least; as [`TierOptions::rows_max`].
    pub fn join(self: &Arc<Self>, options: MemberOptions) -> Result<Membership> {
        let floor_bytes = options.floor_bytes.unwrap_or(self.limit_bytes / FLOOR_SHARE);
        let member = Arc::new(Member::new(options, floor_bytes, self.limit_bytes)?);
        if floor_bytes <= member.fixed_bytes {
            return Err(Error::invalid("floor of a model in a tier budget is too small")
                .with("floor_bytes", floor_bytes)
                .with("minimum_bytes", member.fixed_bytes + 1)
                .with("remedy", "raise the floor, or the budget"));
        }
        let mut members = self.lock();
        members.list.push(Arc::clone(&member));
        let unit_bytes = self.unit_bytes();
        let floors: u64 = members.list.iter().map(|member| member.floor(unit_bytes)).sum();
        if floors > UNITS as u64 {
            members.list.pop();
            let taken: u64 = members.list.iter().map(|member| member.floor_bytes).sum();
            return Err(Error::invalid("tier budget is too small for another model")
                .with("limit_bytes", self.limit_bytes)
                .with("floors_bytes", taken)
                .with("floor_bytes", floor_bytes)
                .with("remedy", "raise the budget, lower the floors, or close a model"));
        }
        self.divide(&mut members);
        drop(members);
        Ok(Membership { budget: Arc::clone(self), member })
    }

    /// Returns what it holds.
    #[must_use]
    pub fn stats(&self) -> TierBudgetStats {
        let members = self.lock();
        let list: Vec<MemberStats> = members.list.iter().map(|member| member.stats()).collect();
        TierBudgetStats {
            limit_bytes: self.limit_bytes,
            used_bytes: list.iter().map(|member| member.used_bytes).sum(),
            division_count: members.division_count,
            bytes_moved: members.bytes_moved,
            members: list,
        }
    }

    /// Ends an epoch and divides anew, unless another thread does already.
    fn end_epoch(&self) {
        let mut members = match self.members.try_lock() {
            Ok(members) => members,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        for member in &members.list {
            lock(&member.demand).end_epoch();
        }
        self.divide(&mut members);
    }

    fn divide(&self, members: &mut Members) {
        let unit_bytes = self.unit_bytes();
        let claims: Vec<Claim> =
            members.list.iter().map(|member| member.claim(unit_bytes)).collect();
        let units = divide(&claims);
        let wanted = || members.list.iter().zip(&units);
        let mut bytes_moved = 0;
        // Who gets less goes first, so that the sum is never too much.
        for is_growing in [false, true] {
            for (member, &units) in wanted() {
                let bytes = units as u64 * unit_bytes;
                let held_bytes = lock(&member.held).1;
                if bytes != held_bytes && (bytes > held_bytes) == is_growing {
                    member.resize(units, bytes);
                    bytes_moved += bytes.saturating_sub(held_bytes);
                }
            }
        }
        members.division_count += u64::from(bytes_moved > 0);
        members.bytes_moved += bytes_moved;
    }

    fn unit_bytes(&self) -> u64 {
        self.limit_bytes / UNITS as u64
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        lock(&self.members)
    }
}

impl Member {
    fn new(options: MemberOptions, floor_bytes: u64, limit_bytes: u64) -> Result<Self> {
        let shares: f64 = options.tiers.iter().map(|(_, share)| share).sum();
        let mut tiers = Vec::new();
        for (tier, share) in options.tiers {
            let share = share / shares;
            let most = TierOptions { capacity_bytes: part_of(limit_bytes, share), ..tier };
            tiers.push((Arc::new(ShardedTier::resizable(&most)?), share));
        }
        let demand_bytes = limit_bytes / DEMAND_SHARE;
        let besides_bytes = options.fixed_bytes + Demand::bytes_about(demand_bytes);
        let rows_at = |units: u64| {
            let bytes = (limit_bytes * units / UNITS as u64).saturating_sub(besides_bytes);
            tiers.iter().map(|(tier, share)| tier.rows_with(part_of(bytes, *share))).sum()
        };
        let demand = Demand::new(demand_bytes, rows_at);
        Ok(Self {
            name: options.name,
            floor_bytes,
            fixed_bytes: options.fixed_bytes + demand.bytes(),
            tiers,
            held: Mutex::default(),
            sample: demand.sample(),
            demand: Mutex::new(demand),
            rows_asked: AtomicU64::new(0),
            rows_hit: AtomicU64::new(0),
        })
    }

    fn floor(&self, unit_bytes: u64) -> u64 {
        self.floor_bytes.div_ceil(unit_bytes.max(1))
    }

    fn claim(&self, unit_bytes: u64) -> Claim {
        Claim {
            curve: lock(&self.demand).curve(),
            floor: self.floor(unit_bytes) as usize,
            held: lock(&self.held).0,
        }
    }

    fn resize(&self, units: usize, bytes: u64) {
        let rows_bytes = bytes.saturating_sub(self.fixed_bytes);
        for (tier, share) in &self.tiers {
            tier.resize(part_of(rows_bytes, *share));
        }
        *lock(&self.held) = (units, bytes);
    }

    fn stats(&self) -> MemberStats {
        let tiers = self.tiers.iter().map(|(tier, _)| tier.stats());
        let tiers = tiers.fold(TierStats::default(), |sum, tier| sum.plus(&tier));
        MemberStats {
            name: self.name.clone(),
            floor_bytes: self.floor_bytes,
            capacity_bytes: lock(&self.held).1,
            used_bytes: self.fixed_bytes + tiers.data_bytes + tiers.metadata_bytes,
            rows_asked: self.rows_asked.load(Ordering::Relaxed),
            rows_hit: self.rows_hit.load(Ordering::Relaxed),
            tiers,
        }
    }
}

impl Membership {
    /// Returns the model's tiers, in its order.
    pub fn tiers(&self) -> impl Iterator<Item = Arc<ShardedTier>> + '_ {
        self.member.tiers.iter().map(|(tier, _)| Arc::clone(tier))
    }

    /// Notes that the rows of `keys`, each once, were asked for together, and how many of them
    /// needed no read. Memory may be divided anew, which takes some milliseconds; no lock of a
    /// tier may be held.
    pub fn note(&self, keys: impl Iterator<Item = RowKey>, hit_count: u64) {
        let member = &self.member;
        let (mut sampled, mut row_count) = (Vec::new(), 0);
        for key in keys {
            row_count += 1;
            let hash = hash_of(key);
            if member.sample.has(hash) {
                sampled.push(hash);
            }
        }
        member.rows_asked.fetch_add(row_count, Ordering::Relaxed);
        member.rows_hit.fetch_add(hit_count, Ordering::Relaxed);
        if sampled.is_empty() {
            return;
        }
        match member.demand.try_lock() {
            Ok(mut demand) => demand.note(&sampled),
            Err(TryLockError::Poisoned(poisoned)) => {
                poisoned.into_inner().note(&sampled);
            }
            // A sample may miss a group.
            Err(TryLockError::WouldBlock) => {}
        }
        let groups = self.budget.groups.fetch_add(1, Ordering::Relaxed) + 1;
        if groups.is_multiple_of(self.budget.groups_per_epoch) {
            self.budget.end_epoch();
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut members = self.budget.lock();
        self.member.resize(0, 0);
        members.list.retain(|member| !Arc::ptr_eq(member, &self.member));
        self.budget.divide(&mut members);
    }
}

fn part_of(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * share) as u64
}

// Numbers and counts are whole after every statement, or may forget a group.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
