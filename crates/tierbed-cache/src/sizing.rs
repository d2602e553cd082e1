//! Slabs that fit a byte budget, every byte of metadata counted.
//!
//! ```text
//! capacity >= slabs * (slab_bytes + per-slab tables) + index for the most rows they can hold
//!             + what the policies keep whatever the slots + scores of rows that left
//! slab     =  slots * (row words * 4 + slot metadata)           slot metadata: key, policy, and
//!                                                               a tick where sizes differ
//! ```
//!
//! The index is allocated once, for the most rows that can ever be held at once, however slabs are
//! divided, but never more rows of a class than its tables have.

use tierbed_core::{Error, Result};

use crate::index::SlotIndex;
use crate::key_numbers::KeyNumbers;
use crate::policy::{EvictionPolicy, PolicyKind, ScoreTable, SLABS_MAX, SLOT_BITS};
use crate::slab::{Slab, SlotKind, SLAB_OVERHEAD_BYTES};

const SLAB_BYTES_MAX: u64 = 64 << 10;
const SLAB_BYTES_MIN: u64 = 4 << 10;
/// Scores of rows that are not here, per eight rows that may be, for policies that want them: with
/// one more the metadata of a row would be more than 16 bytes.
const SCORES_PER_EIGHT_ROWS: u64 = 15;
/// Slabs a tier should at least be made of, so that several row sizes find room.
const SLABS_WANTED: u64 = 64;

/// Rows of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowClass {
    /// 4-byte words per row.
    pub row_words: usize,
    /// Rows of this size that exist: the cache never holds more.
    pub row_count: u64,
}

/// What a tier may hold.
#[derive(Debug, Clone)]
pub struct TierOptions {
    /// Bytes of rows, index and metadata together. Too few for one slab: the tier holds nothing.
    pub capacity_bytes: u64,
    /// The row sizes that will come. Equal sizes are added up.
    pub classes: Vec<RowClass>,
    /// Rows of each table, by its number: with fewer than some 2^32 in all, keys are kept in four
    /// bytes instead of eight, and no other rows may come. Empty: rows of any tables may come.
    pub tables: Vec<u64>,
    /// Who leaves when it is full.
    pub policy: PolicyKind,
}

impl TierOptions {
    /// Returns the most rows that fit at once; 0 where not even one slab does.
    ///
    /// # Errors
    /// `Invalid` when a class has rows of no words or larger than a slab.
    pub fn rows_max(&self) -> Result<u64> {
        Ok(Layout::new(self)?.rows_max)
    }
}

/// How the capacity is laid out.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) slab_bytes: u64,
    pub(crate) slab_count: u32,
    /// Most slabs there ever were.
    slab_count_peak: u32,
    /// Bytes of the tables of slabs.
    table_bytes: u64,
    /// Most rows held at once.
    pub(crate) rows_max: u64,
    /// Bytes the policies of all classes keep whatever the slots.
    pub(crate) policy_bytes: u64,
    pub(crate) policy: PolicyKind,
    pub(crate) slot_kind: SlotKind,
    /// Bytes of the numbers of keys.
    key_numbers_bytes: u64,
    /// Row words and slots per slab of each class, by growing row words.
    pub(crate) classes: Vec<ClassLayout>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ClassLayout {
    pub(crate) row_words: usize,
    pub(crate) row_count: u64,
    pub(crate) slots_per_slab: u32,
}

impl Layout {
    /// # Errors
    /// `Invalid` when a class has rows of no words or larger than a slab.
    pub(crate) fn new(options: &TierOptions) -> Result<Self> {
        Self::with_capacity(options, options.capacity_bytes)
    }

    /// Lays out `capacity_bytes` so that a tier may grow to the capacity of `options`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn with_capacity(options: &TierOptions, capacity_bytes: u64) -> Result<Self> {
        let policy = options.policy.build();
        let mut classes = merged(&options.classes)?;
        let slot_kind = SlotKind {
            has_long_keys: !KeyNumbers::are_short(&options.tables),
            has_ticks: classes.len() > 1,
        };
        let slot_bytes = |class: &ClassLayout| slot_bytes(class, policy.as_ref(), slot_kind);
        let largest = classes.last().map_or(0, slot_bytes);
        let wanted = (options.capacity_bytes / SLABS_WANTED).max(1);
        let slab_bytes = (1 << wanted.ilog2())
            .clamp(SLAB_BYTES_MIN, SLAB_BYTES_MAX)
            .max((largest + SLAB_OVERHEAD_BYTES).next_power_of_two());
        if slab_bytes > SLAB_BYTES_MAX {
            return Err(Error::invalid("rows too large for a cache slab")
                .with("row_bytes", largest)
                .with("slab_bytes_max", SLAB_BYTES_MAX));
        }
        // Slabs are as many as have numbers: a large tier has larger ones, as far as all their
        // slots have numbers.
        let smallest = classes.first().map_or(0, slot_bytes);
        let numbered = (smallest << SLOT_BITS).max(1).ilog2();
        let needed = options.capacity_bytes.div_ceil(u64::from(SLABS_MAX)).next_power_of_two();
        let slab_bytes = slab_bytes.max(needed.min(1 << numbered));
        for class in &mut classes {
            let slots = (slab_bytes - SLAB_OVERHEAD_BYTES) / slot_bytes(class);
            class.slots_per_slab = slots.min(1 << SLOT_BITS) as u32;
        }
        let mut layout = Self {
            slab_bytes,
            slab_count: 0,
            slab_count_peak: 0,
            table_bytes: 0,
            rows_max: 0,
            policy_bytes: 0,
            policy: options.policy,
            slot_kind,
            key_numbers_bytes: KeyNumbers::bytes_for(&options.tables),
            classes,
        };
        layout.fit(capacity_bytes, policy.as_ref());
        Ok(layout)
    }

    /// Finds the most slabs that fit, by bisection: the bytes grow with the slabs.
    pub(crate) fn fit(&mut self, capacity_bytes: u64, policy: &dyn EvictionPolicy) {
        let slabs_max = u64::from(SLABS_MAX);
        // No more slabs than the rows that exist can fill.
        let slabs_useful =
            self.classes.iter().map(|c| c.row_count.div_ceil(u64::from(c.slots_per_slab)));
        let slabs_useful = slabs_useful.fold(0u64, u64::saturating_add);
        let mut most = (capacity_bytes / self.slab_bytes).min(slabs_max).min(slabs_useful);
        let mut least = 0;
        while least < most {
            let middle = (least + most).div_ceil(2);
            if self.bytes_with(middle, policy) <= capacity_bytes {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        self.slab_count = least as u32;
        // A tier without a slab begins anew.
        self.slab_count_peak = match least {
            0 => 0,
            _ => self.slab_count_peak.max(self.slab_count),
        };
        self.table_bytes = self.table_bytes_with(least, policy);
        self.policy_bytes = if least > 0 { self.policy_bytes_with(least, policy) } else { 0 };
        self.rows_max = self.rows_in(least);
    }

    /// Tables of slabs stay as long as they ever were.
    fn table_bytes_with(&self, slab_count: u64, policy: &dyn EvictionPolicy) -> u64 {
        slab_count.max(u64::from(self.slab_count_peak)) * self.table_bytes_per_slab(policy)
    }

    /// Returns the bytes of a tier besides its slabs, with an index of `index_bytes`.
    pub(crate) fn fixed_bytes(&self, index_bytes: usize) -> u64 {
        let scores_bytes = ScoreTable::bytes_for(self.score_count(self.rows_max));
        let key_numbers_bytes = if self.slab_count > 0 { self.key_numbers_bytes } else { 0 };
        index_bytes as u64 + self.policy_bytes + scores_bytes + self.table_bytes + key_numbers_bytes
    }

    fn bytes_with(&self, slab_count: u64, policy: &dyn EvictionPolicy) -> u64 {
        slab_count * self.slab_bytes
            + self.table_bytes_with(slab_count, policy)
            + self.key_numbers_bytes
            + index_bytes(self.rows_in(slab_count))
            + ScoreTable::bytes_for(self.score_count(self.rows_in(slab_count)))
            + self.policy_bytes_with(slab_count, policy)
    }

    /// Bytes the policies keep beside those of each slot: any class may have all slabs that there
    /// ever were.
    fn policy_bytes_with(&self, slab_count: u64, policy: &dyn EvictionPolicy) -> u64 {
        let slab_count = slab_count.max(u64::from(self.slab_count_peak));
        let slots = self.classes.iter().map(|class| slab_count * u64::from(class.slots_per_slab));
        slots
            .map(|slots| policy.bytes_fixed(usize::try_from(slots).unwrap_or(usize::MAX)) as u64)
            .sum()
    }

    /// The most rows that so many slabs can have, however they are divided among the classes.
    fn rows_in(&self, slab_count: u64) -> u64 {
        // Of each class: slabs that its rows fill, and one that the last rows are in.
        let full = self.classes.iter().map(|class| {
            let slots = u64::from(class.slots_per_slab);
            (slots, class.row_count / slots.max(1))
        });
        let partial = self.classes.iter().map(|class| {
            let slots = u64::from(class.slots_per_slab);
            (class.row_count % slots.max(1), 1)
        });
        let mut slabs: Vec<(u64, u64)> = full.chain(partial).collect();
        slabs.sort_unstable_by(|a, b| b.cmp(a));
        let (mut slabs_left, mut rows) = (slab_count, 0);
        for (slots, count) in slabs {
            let taken = slabs_left.min(count);
            rows += taken * slots;
            slabs_left -= taken;
        }
        rows
    }

    /// Scores remembered besides those of the rows held, with room for `rows` of them.
    pub(crate) fn score_count(&self, rows: u64) -> u64 {
        let all = self.classes.iter().fold(0u64, |sum, class| sum.saturating_add(class.row_count));
        if self.policy.remembers_scores() {
            scores_for(rows).min(all)
        } else {
            0
        }
    }

    /// Bytes per slab outside the slab itself: the slab table, and what each pool keeps.
    fn table_bytes_per_slab(&self, policy: &dyn EvictionPolicy) -> u64 {
        let per_pool = policy.bytes_per_slab() + size_of::<u32>();
        (size_of::<Option<Slab>>() + self.classes.len() * per_pool) as u64
    }
}

/// Scores of rows that are not here that a tier with room for `rows` remembers, at most.
pub(crate) fn scores_for(rows: u64) -> u64 {
    rows * SCORES_PER_EIGHT_ROWS / 8
}

/// Bytes of the index.
pub(crate) fn index_bytes(rows: u64) -> u64 {
    SlotIndex::bytes_for(usize::try_from(rows).unwrap_or(usize::MAX)) as u64
}

fn slot_bytes(class: &ClassLayout, policy: &dyn EvictionPolicy, kind: SlotKind) -> u64 {
    let row_and_policy = class.row_words * size_of::<f32>() + policy.bytes_per_slot();
    row_and_policy as u64 + kind.bytes()
}

fn merged(classes: &[RowClass]) -> Result<Vec<ClassLayout>> {
    let mut merged: Vec<ClassLayout> = Vec::new();
    for class in classes {
        if class.row_words == 0 {
            return Err(Error::invalid("rows must have at least one word"));
        }
        match merged.iter_mut().find(|known| known.row_words == class.row_words) {
            Some(known) => known.row_count = known.row_count.saturating_add(class.row_count),
            None => merged.push(ClassLayout {
                row_words: class.row_words,
                row_count: class.row_count,
                slots_per_slab: 0,
            }),
        }
    }
    merged.sort_by_key(|class| class.row_words);
    Ok(merged)
}
