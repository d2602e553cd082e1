//! A cache tier whose rows are kept in a codec: codes in the words of a [`ShardedTier`].
//!
//! A code fills up to three bytes less than its words. The tier moves words and never looks at
//! them.
#![expect(clippy::indexing_slicing, reason = "codes lie where their starts say")]

use std::sync::{Arc, Mutex, PoisonError};

use tierbed_cache::{
    AdmissionBitmap, AdmissionRule, PolicyKind, RowClass, ShardedTier, TierGroup, TierOptions,
    TierStats, Visits,
};
use tierbed_core::{Result, RowKey};
use tierbed_kernels::{Codec, Kernels};

use super::CacheTier;

/// Rows of one table that a tier may meet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub(super) dim: usize,
    /// Rows that are stored.
    pub(super) row_count: u64,
    /// Rows of the table, stored or not: the exclusive upper bound of its ids.
    pub(super) table_rows: u64,
}

/// A tier of coded rows.
#[derive(Debug)]
pub(super) struct CodedTier {
    pub(super) codec: Codec,
    pub(super) policy: PolicyKind,
    pub(super) knows_groups: bool,
    kernels: Kernels,
    rows: Arc<ShardedTier>,
    admission: Option<Mutex<AdmissionBitmap>>,
    admission_bytes: u64,
}

/// Returns the rows that a tier of `capacity_bytes` may meet, of all `tables`.
pub(super) fn options_of(tier: &CacheTier, capacity_bytes: u64, tables: &[Rows]) -> TierOptions {
    let classes = tables.iter().map(|rows| RowClass {
        row_words: words_of(&tier.codec, rows.dim),
        row_count: rows.row_count,
    });
    TierOptions {
        capacity_bytes,
        classes: classes.collect(),
        tables: tables.iter().map(|rows| rows.table_rows).collect(),
        policy: tier.policy,
    }
}

/// Returns the bytes of a tier's admission where `all_rows` rows have a number.
pub(super) fn admission_bytes(tier: &CacheTier, all_rows: u64) -> u64 {
    match tier.admission {
        AdmissionRule::Always => 0,
        AdmissionRule::Bitmap { .. } => AdmissionBitmap::bytes_for(all_rows),
    }
}

impl CodedTier {
    /// Keeps codes in `rows`, which were made with [`options_of`] this tier; `all_rows` rows have
    /// a number, by which admission counts their uses.
    pub(super) fn new(tier: &CacheTier, rows: Arc<ShardedTier>, all_rows: u64) -> Result<Self> {
        Ok(Self {
            codec: tier.codec.clone(),
            policy: tier.policy,
            knows_groups: tier.policy.knows_groups(),
            kernels: Kernels::detect(),
            rows,
            admission: AdmissionBitmap::new(tier.admission, all_rows)?.map(Mutex::new),
            admission_bytes: admission_bytes(tier, all_rows),
        })
    }

    /// Returns the words of a coded row of `dim` numbers.
    pub(super) fn words(&self, dim: usize) -> usize {
        words_of(&self.codec, dim)
    }

    /// Hands the code of each of `keys` that is here to `found`, with its position and slot.
    pub(super) fn find(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        found: impl FnMut(usize, u32, &[f32]),
    ) {
        if self.knows_groups {
            self.rows.peek_many(keys, visits, found);
        } else {
            self.rows.get_many(keys, visits, found);
        }
    }

    /// As [`find`](Self::find), but waits for no lock and tells the policy nothing; `false` when
    /// another has a lock.
    pub(super) fn try_find(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        found: impl FnMut(usize, u32, &[f32]),
    ) -> bool {
        self.rows.try_peek_many(keys, visits, found)
    }

    /// Tells the policy of rows that [`try_find`](Self::try_find) found in `slots`, as
    /// [`find`](Self::find) does.
    pub(super) fn use_again(&self, keys: &[RowKey], slots: &[u32], visits: &mut Visits) {
        if !self.knows_groups {
            self.rows.use_again(keys, slots, visits);
        }
    }

    /// Decodes one row to `out`, if it is here; tells the policy nothing.
    pub(super) fn peek(&self, key: RowKey, visits: &mut Visits, out: &mut [f32]) -> bool {
        let mut is_found = false;
        self.rows.peek_many(&[key], visits, |_, _, words| {
            is_found = true;
            self.decode(words, out);
        });
        is_found
    }

    /// Tells whether a row is here; tells the policy nothing.
    pub(super) fn holds(&self, key: RowKey, visits: &mut Visits) -> bool {
        let mut is_found = false;
        self.rows.peek_many(&[key], visits, |_, _, _| is_found = true);
        is_found
    }

    /// Holds at most `capacity_bytes` from now on, admission included.
    pub(super) fn resize(&self, capacity_bytes: u64) {
        self.rows.resize(capacity_bytes.saturating_sub(self.admission_bytes));
    }

    /// Lists about `count` rows that would leave last.
    pub(super) fn hottest(&self, count: usize) -> Vec<RowKey> {
        self.rows.hottest(count)
    }

    /// Replaces the words of those of `keys` that are here; those without words leave. Returns how
    /// many were replaced.
    pub(super) fn replace<'a>(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        words_of: impl Fn(usize) -> Option<&'a [f32]>,
    ) -> u64 {
        self.rows.replace_many(keys, visits, words_of)
    }

    /// Decodes the words of a row to `out`, `[dim]`.
    pub(super) fn decode(&self, words: &[f32], out: &mut [f32]) {
        assert_eq!(words.len(), self.words(out.len()), "words of a coded row");
        if matches!(self.codec, Codec::F32) {
            out.copy_from_slice(words);
            return;
        }
        self.kernels.decode_row(&self.codec, bytemuck::cast_slice(words), out);
    }

    /// Appends the code of `row` to `words`; leaves them alone where it cannot be coded.
    pub(super) fn encode(&self, row: &[f32], words: &mut Vec<f32>) -> bool {
        let start = words.len();
        words.resize(start + self.words(row.len()), 0.0);
        let code_bytes = self.codec.code_bytes(row.len());
        let code: &mut [u8] = bytemuck::cast_slice_mut(&mut words[start..]);
        let is_coded = self.codec.encode(row, &mut code[..code_bytes]).is_ok();
        if !is_coded {
            words.truncate(start);
        }
        is_coded
    }

    /// Counts a use of the row with this number; tells whether it may enter.
    pub(super) fn admits(&self, number: u64) -> bool {
        let Some(bitmap) = &self.admission else { return true };
        bitmap.lock().unwrap_or_else(PoisonError::into_inner).note(number)
    }

    /// As [`ShardedTier::settle`]; the words are codes.
    pub(super) fn settle<'a>(
        &self,
        group: &TierGroup<'_>,
        visits: &mut Visits,
        code_of: impl FnMut(usize) -> Option<&'a [f32]>,
        left: impl FnMut(RowKey, &[f32]),
    ) -> Result<()> {
        self.rows.settle(group, visits, code_of, left)
    }

    /// Stores rows as they come, `words` one after the other, without asking the policy's groups.
    pub(super) fn preload(
        &self,
        keys: &[RowKey],
        rows: &[f32],
        dim_of: impl Fn(RowKey) -> usize,
        visits: &mut Visits,
    ) -> Result<()> {
        let (mut codes, mut starts, mut first) = (Vec::new(), Vec::new(), 0);
        for key in keys {
            let dim = dim_of(*key);
            let row = &rows[first..first + dim];
            let start = codes.len();
            starts.push(self.encode(row, &mut codes).then_some((start, self.words(dim))));
            first += dim;
        }
        assert_eq!(first, rows.len(), "weights of {} rows", keys.len());
        self.rows.insert_many(keys, visits, |at| {
            let (start, words) = starts[at]?;
            Some(&codes[start..start + words])
        })
    }

    /// Returns the most rows it can hold.
    pub(super) fn rows_max(&self) -> u64 {
        self.rows.rows_max()
    }

    pub(super) fn stats(&self) -> TierStats {
        let mut stats = self.rows.stats();
        stats.metadata_bytes += self.admission_bytes;
        stats.capacity_bytes += self.admission_bytes;
        stats
    }
}

fn words_of(codec: &Codec, dim: usize) -> usize {
    codec.code_bytes(dim).div_ceil(size_of::<f32>())
}
