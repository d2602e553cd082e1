//! The stack of cache tiers, asked and informed as one.
#![expect(
    clippy::indexing_slicing,
    reason = "positions are those of the scratch, tables those of the schema"
)]

mod asking;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use serde::Serialize;
use tierbed_cache::{MemberOptions, Membership, ShardedTier, TierGroup, TierStats, Visits};
use tierbed_core::{Error, Result, RowKey, Schema};
use tierbed_kernels::{Codec, Kernels};

use super::coded::{admission_bytes, options_of, CodedTier, Rows};
use super::replacing::Replacing;
use super::resident::Resident;
use super::{MissMode, Neighbours, TierStackOptions};
use crate::layers::Layers;
use crate::scratch::{Filled, Scratch};

/// Most locks a tier is split over.
const SHARDS_MAX: usize = 16;
/// Most tiers: their number is kept in a byte per row.
const TIERS_MAX: usize = 8;
/// Most f32 elements that are offered to a tier in one call; larger groups are split.
const OFFERED_WORDS_MAX: usize = 4096;

/// What answered for a row that is in no tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing: it must be read.
    None,
    /// Another row, or a coarse code.
    Surrogate,
    /// The default row of its table.
    Default,
}

/// Rows that one sample asked for: positions among the unique rows of a chunk, each once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group<'a> {
    pub(crate) positions: &'a [u32],
    /// Rows of the whole group, where these are a part of it.
    pub(crate) row_count: u32,
    /// How many of them needed no read.
    pub(crate) hit_count: u32,
}

/// What one tier is, did and holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierSummary {
    /// Its codec.
    pub codec: &'static str,
    /// Its policy.
    pub policy: &'static str,
    /// Rows found.
    pub hits: u64,
    /// Rows asked for and not found.
    pub misses: u64,
    /// Rows that came in.
    pub insertions: u64,
    /// Rows that left.
    pub evictions: u64,
    /// Rows held.
    pub row_count: u64,
    /// Most rows it can hold; 0 where its bytes are too few for any.
    pub row_count_max: u64,
    /// Bytes of codes, in use or not yet.
    pub data_bytes: u64,
    /// Bytes of index, keys, policy and admission.
    pub metadata_bytes: u64,
    /// Bytes it may use.
    pub capacity_bytes: u64,
}

/// Memory of a call that tells the tiers what it found. Grows to what the largest group needs.
#[derive(Debug, Default)]
pub(crate) struct TierScratch {
    keys: Vec<RowKey>,
    row_words: Vec<usize>,
    /// Of the first keys: in which slot they were found.
    slots: Vec<u32>,
    /// Of each key: where its code begins in `codes`, if it is offered.
    code_starts: Vec<Option<usize>>,
    codes: Vec<f32>,
    /// Rows that fell from the tier before, and now.
    offered: Fallen,
    fallen: Fallen,
}

/// Rows on their way to the next tier.
#[derive(Debug, Default)]
struct Fallen {
    keys: Vec<RowKey>,
    /// Their numbers, one after the other.
    rows: Vec<f32>,
}

impl Fallen {
    fn clear(&mut self) {
        self.keys.clear();
        self.rows.clear();
    }
}

/// Bytes of a cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheBytes {
    pub(crate) now: u64,
    /// What it may grow to.
    pub(crate) most: u64,
}

impl CacheBytes {
    /// Returns what is taken now: neighbours do not grow, and have theirs from the beginning.
    pub(crate) fn held(self, options: &TierStackOptions) -> u64 {
        let neighbours_bytes = |bytes| options.neighbours_bytes(bytes);
        self.now - neighbours_bytes(self.now) + neighbours_bytes(self.most)
    }
}

/// Rows of a table of the snapshot itself.
#[derive(Debug, Clone, Copy)]
struct TableRows {
    dim: usize,
    /// Number of its first row among all.
    first: u64,
    row_count: u64,
}

/// What tiers are told of.
struct Told<'a> {
    scratch: &'a mut Scratch,
    layers: &'a Layers,
}

/// The tiers of a snapshot.
#[derive(Debug)]
pub(crate) struct TierStack {
    tiers: Vec<CodedTier>,
    /// Of the budget that the tiers share with other snapshots.
    membership: Option<Membership>,
    /// By tier: rows found, and not found.
    counts: Vec<(AtomicU64, AtomicU64)>,
    resident: Resident,
    neighbours: Option<Neighbours>,
    misses: MissMode,
    tables: Vec<TableRows>,
    /// By tier: its part of the bytes of a cache that is not shared.
    shares: Vec<f64>,
    kernels: Kernels,
}

impl TierStack {
    /// Builds empty tiers that take `capacity` together, besides the resident rows, or what
    /// their shared budget gives them. `stored_rows` is how many rows of each table there are to
    /// cache.
    ///
    /// # Errors
    /// `Invalid` for codecs that need training, too many tiers, resident rows of other tables, and
    /// when the shared budget has no room.
    pub(crate) fn new(
        schema: &Schema,
        stored_rows: &[u64],
        options: &TierStackOptions,
        capacity: CacheBytes,
    ) -> Result<Self> {
        assert_eq!(stored_rows.len(), schema.tables().len(), "counts of stored rows by table");
        if options.tiers.len() > TIERS_MAX {
            return Err(Error::invalid("too many cache tiers")
                .with("found", options.tiers.len())
                .with("allowed", TIERS_MAX));
        }
        let mut all_rows = 0;
        let (mut tables, mut classes) = (Vec::new(), Vec::new());
        for (table, &stored) in schema.tables().iter().zip(stored_rows) {
            let (dim, row_count) = (table.dim as usize, table.row_count);
            tables.push(TableRows { dim, first: all_rows, row_count });
            all_rows += table.row_count;
            classes.push(Rows { dim, row_count: stored, table_rows: row_count });
        }
        if options.tiers.iter().any(|tier| matches!(tier.codec, Codec::Product(_))) {
            return Err(Error::invalid("a product codec keeps resident rows, not a tier"));
        }
        let membership = join(options, &classes, all_rows)?;
        let rows: Vec<Arc<ShardedTier>> = match &membership {
            Some(membership) => membership.tiers().collect(),
            None => own_rows(options, &classes, all_rows, capacity)?,
        };
        assert_eq!(rows.len(), options.tiers.len(), "every tier has rows of its own");
        let tiers = options.tiers.iter().zip(rows);
        let tiers = tiers.map(|(tier, rows)| CodedTier::new(tier, rows, all_rows));
        let tiers = tiers.collect::<Result<Vec<_>>>()?;
        let resident = Resident::new(schema, &options.resident)?;
        let neighbours = options
            .neighbours
            .as_ref()
            .map(|given| Neighbours::new(schema, given, options.neighbours_bytes(capacity.most)));
        let neighbours = neighbours.transpose()?;
        let kernels = Kernels::detect();
        let counts = tiers.iter().map(|_| Default::default()).collect();
        let misses = options.misses;
        let shares = options.tiers.iter().map(|tier| tier.share / options.share_sum()).collect();
        Ok(Self {
            tiers,
            membership,
            counts,
            resident,
            neighbours,
            misses,
            tables,
            shares,
            kernels,
        })
    }

    /// Returns the bytes of the resident rows.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident.memory_bytes()
    }

    /// Returns the neighbours that answer misses, if there are any.
    pub(crate) fn neighbours(&self) -> Option<&Neighbours> {
        self.neighbours.as_ref()
    }

    /// Returns what each tier did and holds.
    pub(crate) fn stats(&self) -> Vec<TierSummary> {
        let summary = |(tier, counts): (&CodedTier, &(AtomicU64, AtomicU64))| {
            let stats: TierStats = tier.stats();
            TierSummary {
                codec: tier.codec.name(),
                policy: tier.policy.name(),
                hits: counts.0.load(Ordering::Relaxed),
                misses: counts.1.load(Ordering::Relaxed),
                insertions: stats.insertions,
                evictions: stats.evictions,
                row_count: stats.row_count,
                row_count_max: tier.rows_max(),
                data_bytes: stats.data_bytes,
                metadata_bytes: stats.metadata_bytes,
                capacity_bytes: stats.capacity_bytes,
            }
        };
        self.tiers.iter().zip(&self.counts).map(summary).collect()
    }

    /// Puts rows into the first tier, the last ones as those used last.
    pub(crate) fn preload(&self, keys: &[RowKey], rows: &[f32]) -> Result<()> {
        let found: usize = keys.iter().map(|key| self.dim(*key)).sum();
        if found != rows.len() {
            return Err(Error::invalid("rows to preload have the wrong length")
                .with("found", rows.len())
                .with("expected", found));
        }
        let Some(tier) = self.tiers.first() else { return Ok(()) };
        tier.preload(keys, rows, |key| self.dim(key), &mut Visits::default())
    }

    /// Answers for a row that is in no tier, if misses may be answered so.
    pub(crate) fn answer_miss(
        &self,
        key: RowKey,
        layers: &Layers,
        visits: &mut Visits,
        out: &mut [f32],
    ) -> Answer {
        if self.misses == MissMode::Read {
            return Answer::None;
        }
        // What stands for a row was made of the snapshot's.
        if !layers.is_changed(key) && self.resident.surrogate(self.kernels, key, out) {
            return Answer::Surrogate;
        }
        if let Some(neighbours) = &self.neighbours {
            let is_near = |near: RowKey| {
                !layers.is_pending(near)
                    && (self.tiers.iter().any(|tier| tier.peek(near, visits, out))
                        || !layers.is_changed(near) && self.resident.head(self.kernels, near, out))
            };
            if self.knows(key) && neighbours.find(key).is_some_and(is_near) {
                neighbours.count_answer();
                return Answer::Surrogate;
            }
        }
        if self.misses == MissMode::Surrogate {
            return Answer::None;
        }
        self.resident.default_row(key, out);
        Answer::Default
    }

    /// Tells whether a row is in a tier; tells the policies nothing.
    pub(crate) fn holds(&self, key: RowKey, visits: &mut Visits) -> bool {
        self.tiers.iter().any(|tier| tier.holds(key, visits))
    }

    /// Tells the shared budget, where there is one, which rows were asked for together.
    pub(crate) fn note(&self, group: &Group<'_>, scratch: &Scratch) {
        let Some(membership) = &self.membership else { return };
        let keys = group.positions.iter().map(|&at| scratch.keys[at as usize]);
        membership.note(keys, u64::from(group.hit_count));
    }

    /// Whether rows that needed no read must be noted: a shared budget follows demand.
    pub(crate) fn wants_hits(&self) -> bool {
        self.membership.is_some()
    }

    /// Whether a lookup that needs no page is a matter of memory alone: rows that stand for others
    /// are made by reading, and a shared budget may be divided anew.
    pub(crate) fn are_plain(&self) -> bool {
        self.membership.is_none() && self.neighbours.is_none()
    }

    /// Whether every miss is read: nothing stands for a row.
    pub(crate) fn reads_misses(&self) -> bool {
        self.misses == MissMode::Read
    }

    /// Whether a policy is group-aware: it needs the rows of each sample together.
    pub(crate) fn knows_groups(&self) -> bool {
        self.tiers.iter().any(|tier| tier.knows_groups)
    }

    /// Tells the tiers of the rows that were asked for, and offers them those that were read.
    ///
    /// # Errors
    /// As [`ShardedTier::settle`](tierbed_cache::ShardedTier::settle).
    pub(crate) fn settle(
        &self,
        group: &Group<'_>,
        scratch: &mut Scratch,
        layers: &Layers,
    ) -> Result<()> {
        let mut work = std::mem::take(&mut scratch.work);
        let mut rest = group.positions;
        while !rest.is_empty() {
            let told = Told { scratch, layers };
            let count = self.offer(rest, &told, &mut work);
            assert!(count > 0, "at least one row is offered at once");
            let (positions, later) = rest.split_at(count);
            rest = later;
            let part = Group { positions, ..*group };
            for number in 1..=self.tiers.len() as u8 {
                let mut told = Told { scratch, layers };
                self.settle_tier(number, &part, &mut told, &mut work)?;
            }
        }
        scratch.work = work;
        if let Some(neighbours) = &self.neighbours {
            neighbours.settle();
        }
        Ok(())
    }

    /// Takes the rows that were read, of as many positions as fit; returns how many positions.
    fn offer(&self, positions: &[u32], told: &Told<'_>, work: &mut TierScratch) -> usize {
        let Told { scratch, layers } = told;
        work.offered.clear();
        for (taken, &at) in positions.iter().enumerate() {
            let at = at as usize;
            if scratch.filled[at] != Filled::Read {
                continue;
            }
            let key = scratch.keys[at];
            if !self.knows(key) || layers.is_pending(key) {
                continue;
            }
            let dim = self.dim(key);
            // At least one row, however long: the caller goes on behind those taken.
            if taken > 0 && work.offered.rows.len() + dim > OFFERED_WORDS_MAX {
                return taken;
            }
            work.offered.keys.push(key);
            work.offered.rows.extend_from_slice(scratch.row(at, dim));
        }
        positions.len()
    }

    /// Settles tier `number`, from 1; rows that it refuses or evicts are offered to the next.
    fn settle_tier(
        &self,
        number: u8,
        group: &Group<'_>,
        told: &mut Told<'_>,
        work: &mut TierScratch,
    ) -> Result<()> {
        let Told { scratch, layers } = told;
        let tier_count = self.tiers.len();
        assert!((1..=tier_count).contains(&usize::from(number)), "tier {number} of {tier_count}");
        let tier = &self.tiers[usize::from(number) - 1];
        work.begin();
        if tier.knows_groups {
            for &at in group.positions {
                let at = at as usize;
                if scratch.tier_of[at] == number {
                    let key = scratch.keys[at];
                    tier.admits(self.number_of(key));
                    work.slots.push(scratch.slot_of[at]);
                    work.push(key, tier.words(self.dim(key)), None);
                }
            }
        }
        let mut first = 0;
        for at in 0..work.offered.keys.len() {
            let key = work.offered.keys[at];
            let dim = self.dim(key);
            let row = &work.offered.rows[first..first + dim];
            first += dim;
            let start = work.codes.len();
            let is_offered = tier.admits(self.number_of(key)) && tier.encode(row, &mut work.codes);
            work.push(key, tier.words(dim), is_offered.then_some(start));
        }
        if work.keys.is_empty() {
            return Ok(());
        }
        let TierScratch { keys, row_words, slots, code_starts, codes, fallen, .. } = &mut *work;
        let Group { row_count, hit_count, .. } = *group;
        let asked = TierGroup { keys, row_words, slots, row_count, hit_count };
        let code_of = |at: usize| {
            let start = code_starts[at]?;
            Some(&codes[start..start + row_words[at]])
        };
        let is_last = usize::from(number) == tier_count;
        tier.settle(&asked, &mut scratch.visits, code_of, |key, code| {
            // Its old weights must not arrive in the next tier behind those that replace them.
            if layers.is_pending(key) {
                return;
            }
            let start = fallen.rows.len();
            // A policy that flushes gives more than the next tier should be told of at once.
            if is_last || start + self.dim(key) > 2 * OFFERED_WORDS_MAX {
                if let Some(neighbours) = &self.neighbours {
                    neighbours.leaves(key);
                }
                return;
            }
            fallen.keys.push(key);
            fallen.rows.resize(start + self.dim(key), 0.0);
            tier.decode(code, &mut fallen.rows[start..]);
        })?;
        // What left this tier is what the next one is offered.
        std::mem::swap(&mut work.offered, &mut work.fallen);
        Ok(())
    }

    /// Tells whether tiers have room for a row: tables that grew since the snapshot have rows that
    /// they do not know.
    pub(crate) fn knows(&self, key: RowKey) -> bool {
        self.tables.get(key.table.0 as usize).is_some_and(|table| key.row.0 < table.row_count)
    }

    /// Lets the tiers have `capacity_bytes` from now on, no more than they had at first; not those
    /// of a shared budget.
    pub(crate) fn resize(&self, capacity_bytes: u64) {
        for (tier, share) in self.tiers.iter().zip(&self.shares) {
            tier.resize((capacity_bytes as f64 * share) as u64);
        }
    }

    /// Returns the most rows that all tiers can hold.
    pub(crate) fn rows_max(&self) -> u64 {
        self.tiers.iter().map(CodedTier::rows_max).sum()
    }

    /// Lists at most `count` rows that would leave last, those of the first tier first.
    pub(crate) fn hottest(&self, count: usize) -> Vec<RowKey> {
        let keys = self.tiers.iter().flat_map(|tier| tier.hottest(count));
        keys.take(count).collect()
    }

    /// Takes rows out of all tiers.
    pub(crate) fn forget(&self, keys: impl Iterator<Item = RowKey>) {
        let mut replacing = self.replacing(OFFERED_WORDS_MAX);
        keys.filter(|key| self.knows(*key)).for_each(|key| replacing.push_none(key));
        replacing.finish();
    }

    /// Begins to replace rows where tiers hold them, `row_count` at once.
    pub(crate) fn replacing(&self, row_count: usize) -> Replacing<'_> {
        Replacing::new(&self.tiers, row_count)
    }

    fn dim(&self, key: RowKey) -> usize {
        let table_count = self.tables.len();
        assert!((key.table.0 as usize) < table_count, "{key:?} is of none of {table_count} tables");
        self.tables[key.table.0 as usize].dim
    }

    /// The number of a row among all rows of the snapshot.
    fn number_of(&self, key: RowKey) -> u64 {
        self.tables[key.table.0 as usize].first + key.row.0
    }
}

/// Makes tiers of a snapshot's own bytes.
fn own_rows(
    options: &TierStackOptions,
    classes: &[Rows],
    all_rows: u64,
    capacity: CacheBytes,
) -> Result<Vec<Arc<ShardedTier>>> {
    let shares = options.share_sum();
    let made = options.tiers.iter().map(|tier| {
        let rows_bytes = |bytes: u64| {
            let bytes = (bytes as f64 * (tier.share / shares)) as u64;
            bytes.saturating_sub(admission_bytes(tier, all_rows))
        };
        let most = options_of(tier, rows_bytes(capacity.most), classes);
        ShardedTier::with_capacity(&most, SHARDS_MAX, rows_bytes(capacity.now)).map(Arc::new)
    });
    made.collect()
}

/// Joins the budget that is shared with other snapshots, where there is one.
fn join(options: &TierStackOptions, classes: &[Rows], all_rows: u64) -> Result<Option<Membership>> {
    let Some(shared) = &options.shared else { return Ok(None) };
    let tiers = options.tiers.iter();
    let member = MemberOptions {
        name: shared.name.clone(),
        floor_bytes: shared.floor_bytes,
        tiers: tiers.clone().map(|tier| (options_of(tier, 0, classes), tier.share)).collect(),
        fixed_bytes: tiers.map(|tier| admission_bytes(tier, all_rows)).sum(),
    };
    shared.budget.join(member).map(Some)
}

impl TierScratch {
    /// Bytes of a call with tiers of rows of at most `row_words_max` words: what was read, its
    /// codes, and rows on their way to the next tier.
    pub(crate) fn bytes_for(tier_count: usize, row_words_max: usize) -> u64 {
        let offered = OFFERED_WORDS_MAX.max(row_words_max);
        let fallen = if tier_count > 1 { 2 * (offered + OFFERED_WORDS_MAX) } else { 0 };
        ((2 * offered + fallen) * size_of::<f32>()) as u64
    }

    fn begin(&mut self) {
        self.keys.clear();
        self.row_words.clear();
        self.slots.clear();
        self.code_starts.clear();
        self.codes.clear();
        self.fallen.clear();
    }

    fn push(&mut self, key: RowKey, row_words: usize, code_start: Option<usize>) {
        self.keys.push(key);
        self.row_words.push(row_words);
        self.code_starts.push(code_start);
    }
}
