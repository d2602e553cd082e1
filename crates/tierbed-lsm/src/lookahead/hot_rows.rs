//! Hot rows: those that nearly every batch of the look-ahead window asks for.
//!
//! hot: `access_count / sample_count > frequency_min` in the window, and among the
//! `top-k = lookahead_count x hot_ratio` most accessed. Pure.
//!
//! Source: RecDB §4.2 (Hot Key Identifier: threshold 1 %, since a batch of more than 128 samples
//! then meets the row more than 1.28 times; `top-k = lookahead_num x p`).
//!
//! Differs: the paper derives the ratio `p` offline and leaves open of what frequency is a
//! share; here `p` is an option, `lookahead_num` counts the accesses of the window, and
//! frequency is per sample. A hot row stays hot until its frequency falls below
//! `frequency_keep` (the paper only says that keys are evicted "once their access frequency
//! diminishes"), so that a row near the threshold does not move in every window.

use std::collections::BTreeSet;

use tierbed_core::store::{Ahead, RowUses};
use tierbed_core::{Budget, Error, Reservation, Result, RowKey};

/// The rule of hotness.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HotRule {
    /// A row becomes hot above this many accesses per sample.
    pub frequency_min: f64,
    /// A hot row stays hot down to this many accesses per sample.
    pub frequency_keep: f64,
    /// Most hot rows per access in the window: RecDB's `p`.
    pub hot_ratio: f64,
}

impl Default for HotRule {
    /// RecDB's threshold; hot rows at most 1 % of the accesses, kept down to half the threshold.
    fn default() -> Self {
        Self { frequency_min: 0.01, frequency_keep: 0.005, hot_ratio: 0.01 }
    }
}

impl HotRule {
    /// Checks the ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self) -> Result<()> {
        let is_ordered = (0.0..=self.frequency_min).contains(&self.frequency_keep)
            && self.frequency_min.is_finite();
        if !is_ordered || !(0.0..=1.0).contains(&self.hot_ratio) {
            return Err(Error::invalid("hot rule out of range")
                .with("frequency_min", self.frequency_min)
                .with("frequency_keep", self.frequency_keep)
                .with("hot_ratio", self.hot_ratio)
                .with("expected", "0 <= frequency_keep <= frequency_min, 0 <= hot_ratio <= 1"));
        }
        Ok(())
    }
}

/// What was announced since the hot rows were chosen last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window<'a> {
    /// Its unique rows with their accesses, ascending.
    pub rows: &'a [RowUses],
    /// Its accesses.
    pub access_count: u64,
    /// Its samples.
    pub sample_count: u64,
}

/// Chooses the hot rows of a window. `hot_before`: the rows that were hot until now. Ties go to
/// the smaller row.
///
/// Cost: one sort of the rows above the threshold.
#[must_use]
pub fn pick_hot_rows(
    window: &Window<'_>,
    hot_before: &BTreeSet<RowKey>,
    rule: &HotRule,
) -> BTreeSet<RowKey> {
    debug_assert!(window.rows.is_sorted_by(|a, b| a.key < b.key), "rows ascend, each once");
    let k = (window.access_count as f64 * rule.hot_ratio).floor() as usize;
    let is_candidate = |uses: &&RowUses| {
        let frequency = f64::from(uses.access_count) / window.sample_count.max(1) as f64;
        // Seldom both: few rows are between the two thresholds.
        frequency > rule.frequency_min
            || (frequency > rule.frequency_keep && hot_before.contains(&uses.key))
    };
    let mut candidates: Vec<RowUses> = window.rows.iter().filter(is_candidate).copied().collect();
    candidates.sort_unstable_by_key(|uses| (std::cmp::Reverse(uses.access_count), uses.key));
    candidates.into_iter().take(k).map(|uses| uses.key).collect()
}

/// Gathers what is announced until it says something about frequency.
///
/// A short announcement does not: with fewer than `1 / frequency_min` samples a single access
/// stands above the threshold. So short ones are joined.
#[derive(Debug)]
pub(crate) struct HotRowIdentifier {
    rule: HotRule,
    rows: Vec<RowUses>,
    access_count: u64,
    sample_count: u64,
    memory: Reservation,
}

impl HotRowIdentifier {
    /// Builds an identifier that has seen nothing.
    ///
    /// # Errors
    /// None today: an empty reservation always fits.
    pub(crate) fn new(rule: HotRule, budget: &Budget) -> Result<Self> {
        let memory = budget.reserve("window accesses", 0)?;
        Ok(Self { rule, rows: Vec::new(), access_count: 0, sample_count: 0, memory })
    }

    /// Takes note of what is ahead; returns the hot rows when enough is known.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the accesses for a moment; what was gathered is
    /// forgotten.
    pub(crate) fn observe(
        &mut self,
        ahead: &Ahead<'_>,
        hot_before: &BTreeSet<RowKey>,
    ) -> Result<Option<BTreeSet<RowKey>>> {
        // The keys, their unique rows, both lists while they are joined, and the candidates.
        let row_bytes = (size_of::<RowKey>() + 3 * size_of::<RowUses>()) as u64;
        let gathered_bytes = 2 * size_of_val(self.rows.as_slice()) as u64;
        let result = self.memory.resize_optional(row_bytes * ahead.access_count + gathered_bytes);
        if let Err(error) = result {
            self.forget();
            return Err(error);
        }
        self.rows = joined(&self.rows, &ahead.unique_rows());
        debug_assert!(self.rows.is_sorted_by(|a, b| a.key < b.key), "a row was joined twice");
        self.access_count += ahead.access_count;
        self.sample_count += ahead.sample_count;
        if self.sample_count as f64 * self.rule.frequency_min < 1.0 {
            self.rows.shrink_to_fit();
            // Less than a moment ago, so it fits.
            self.memory.resize(size_of_val(self.rows.as_slice()) as u64)?;
            return Ok(None);
        }
        let (access_count, sample_count) = (self.access_count, self.sample_count);
        let window = Window { rows: &self.rows, access_count, sample_count };
        let hot = pick_hot_rows(&window, hot_before, &self.rule);
        self.forget();
        Ok(Some(hot))
    }

    fn forget(&mut self) {
        self.rows = Vec::new();
        (self.access_count, self.sample_count) = (0, 0);
        // Giving back cannot fail.
        let _ = self.memory.resize(0);
    }
}

// Adds the counts of two ascending lists.
fn joined(one: &[RowUses], other: &[RowUses]) -> Vec<RowUses> {
    let mut out: Vec<RowUses> = Vec::with_capacity(one.len() + other.len());
    let (mut one, mut other) = (one.iter().copied().peekable(), other.iter().copied().peekable());
    loop {
        let is_first = match (one.peek(), other.peek()) {
            (Some(first), Some(second)) => first.key <= second.key,
            (first, _) => first.is_some(),
        };
        let Some(next) = (if is_first { one.next() } else { other.next() }) else { return out };
        match out.last_mut() {
            Some(last) if last.key == next.key => {
                last.access_count = last.access_count.saturating_add(next.access_count);
            }
            _ => out.push(next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, TableId};

    fn row(row: u64) -> RowKey {
        RowKey::new(TableId(0), RowId(row))
    }

    fn uses(counts: &[(u64, u32)]) -> Vec<RowUses> {
        let mut rows: Vec<_> = counts
            .iter()
            .map(|(id, count)| RowUses { key: row(*id), access_count: *count })
            .collect();
        rows.sort_unstable_by_key(|uses| uses.key);
        rows
    }

    fn picked(counts: &[(u64, u32)], before: &[u64], rule: &HotRule) -> Vec<u64> {
        let before = before.iter().map(|id| row(*id)).collect();
        let rows = uses(counts);
        let access_count = rows.iter().map(|uses| u64::from(uses.access_count)).sum();
        let window = Window { rows: &rows, access_count, sample_count: 1000 };
        pick_hot_rows(&window, &before, rule).into_iter().map(|row| row.row.0).collect()
    }

    fn announced(
        identifier: &mut HotRowIdentifier,
        accesses: &[u64],
        sample_count: u64,
    ) -> Result<Option<Vec<u64>>> {
        let visit = |visit: &mut dyn FnMut(RowKey)| accesses.iter().for_each(|id| visit(row(*id)));
        let ahead = Ahead {
            batches_buffered: 1,
            accesses_buffered: accesses.len() as u64,
            sample_count,
            access_count: accesses.len() as u64,
            visit_accesses: &visit,
        };
        let hot = identifier.observe(&ahead, &BTreeSet::new())?;
        Ok(hot.map(|rows| rows.into_iter().map(|row| row.row.0).collect()))
    }

    #[test]
    fn short_announcements_are_joined_until_one_access_is_below_the_threshold() {
        let rule = HotRule { frequency_min: 0.01, frequency_keep: 0.01, hot_ratio: 1.0 };
        let budget = Budget::new(10_000);
        let mut identifier = HotRowIdentifier::new(rule, &budget).unwrap();
        assert_eq!(announced(&mut identifier, &[5, 3], 60).unwrap(), None);
        assert!(budget.report().used_bytes > 0, "what is kept is counted");
        assert_eq!(announced(&mut identifier, &[5, 9], 60).unwrap(), Some(vec![5]));
        assert_eq!(budget.report().used_bytes, 0);
        assert_eq!(announced(&mut identifier, &[3, 3], 100).unwrap(), Some(vec![3]));
    }

    #[test]
    fn a_window_that_memory_does_not_hold_is_an_error_and_leaves_nothing_behind() {
        let budget = Budget::new(1000);
        let mut identifier = HotRowIdentifier::new(HotRule::default(), &budget).unwrap();
        assert_eq!(announced(&mut identifier, &[1], 1).unwrap(), None);
        assert!(announced(&mut identifier, &[1; 100], 100).is_err());
        assert_eq!(budget.report().used_bytes, 0);
    }

    #[test]
    fn the_papers_threshold_is_one_percent_of_the_samples() {
        // 1,000 samples: 10 accesses are exactly 1 % and not above it, 11 are.
        let rule = HotRule { hot_ratio: 1.0, ..HotRule::default() };
        assert_eq!(picked(&[(1, 10), (2, 11), (3, 500)], &[], &rule), [2, 3]);
    }

    #[test]
    fn at_most_k_rows_the_most_accessed_first() {
        // 60 accesses x 0.05 = 3 rows at most; 7 and 8 tie, the smaller row wins.
        let rule = HotRule { hot_ratio: 0.05, ..HotRule::default() };
        let counts = [(9, 15), (8, 14), (7, 14), (5, 17)];
        assert_eq!(picked(&counts, &[], &rule), [5, 7, 9]);
    }

    #[test]
    fn a_hot_row_is_demoted_below_the_lower_threshold_only() {
        let rule = HotRule { hot_ratio: 1.0, ..HotRule::default() };
        // 6 of 1,000 is between keep (0.5 %) and min (1 %): hot rows stay, none is added.
        assert_eq!(picked(&[(1, 6), (2, 6), (3, 5)], &[1, 3], &rule), [1]);
        assert!(picked(&[], &[1], &rule).is_empty());
    }

    #[test]
    fn rules_out_of_range_are_refused() {
        assert!(HotRule::default().check().is_ok());
        for rule in [
            HotRule { frequency_keep: 0.02, ..HotRule::default() },
            HotRule { hot_ratio: 1.5, ..HotRule::default() },
            HotRule { frequency_min: f64::NAN, ..HotRule::default() },
        ] {
            assert!(rule.check().is_err(), "{rule:?}");
        }
    }
}
