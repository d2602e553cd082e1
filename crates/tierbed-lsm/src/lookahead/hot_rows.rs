//! Which rows will nearly every batch of the window ask for?
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

use tierbed_core::{Error, Result, RowKey};

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

/// Chooses the hot rows of a window. `accesses`: the row of every access, any order, reordered
/// here; `hot_before`: the rows that were hot until now. Ties go to the smaller row.
///
/// Cost: one sort of the accesses.
#[must_use]
pub fn pick_hot_rows(
    accesses: &mut [RowKey],
    sample_count: u64,
    hot_before: &BTreeSet<RowKey>,
    rule: &HotRule,
) -> BTreeSet<RowKey> {
    let k = (accesses.len() as f64 * rule.hot_ratio).floor() as usize;
    accesses.sort_unstable();
    let mut candidates: Vec<(u64, RowKey)> = accesses
        .chunk_by(|one, next| one == next)
        .filter_map(|run| {
            let row = *run.first()?;
            let frequency = run.len() as f64 / sample_count.max(1) as f64;
            let bound =
                if hot_before.contains(&row) { rule.frequency_keep } else { rule.frequency_min };
            (frequency > bound).then_some((run.len() as u64, row))
        })
        .collect();
    candidates.sort_unstable_by_key(|(count, row)| (std::cmp::Reverse(*count), *row));
    candidates.into_iter().take(k).map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, TableId};

    fn row(row: u64) -> RowKey {
        RowKey::new(TableId(0), RowId(row))
    }

    fn window(counts: &[(u64, usize)]) -> Vec<RowKey> {
        counts.iter().flat_map(|(id, count)| std::iter::repeat_n(row(*id), *count)).collect()
    }

    fn picked(counts: &[(u64, usize)], before: &[u64], rule: &HotRule) -> Vec<u64> {
        let before = before.iter().map(|id| row(*id)).collect();
        let hot = pick_hot_rows(&mut window(counts), 1000, &before, rule);
        hot.into_iter().map(|row| row.row.0).collect()
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
        // 6 of 1,000 is between keep (0.5 %) and min (1 %): whoever was hot stays, nobody joins.
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
