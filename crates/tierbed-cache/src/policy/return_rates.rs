//! Estimated return rates of new rows, per table.
//!
//! Tables differ: of one every second row is used again soon, of another one in ten. Which rows of
//! a table come back is unknown at their first use; how many do is counted here, for one row of
//! sixteen by its hash. New rows of the sample wait in an array of prints, as many as came while
//! one or two cachefuls of new rows did; a row that is asked for while it waits has come back.
//!
//! ```text
//! new row in the sample ─▶ waiting[place] = print   first_uses of its table + 1
//! any row in the sample ─▶ waiting[place] = print?  returns of its table + 1, waits no longer
//! ```
//!
//! The table of a row is in its hash: see [`Group::hashes`](super::Group::hashes).
#![expect(clippy::indexing_slicing, reason = "places and classes are scaled to their arrays")]

use tierbed_core::env::unmix64;

/// One of so many rows is in the sample; a power of two.
const SAMPLE_ONE_IN: usize = 16;
/// Least rows that wait.
const WAITING_MIN: usize = 64;
/// Tables with counts of their own; further ones share them.
const CLASSES: usize = 256;
/// First uses of all tables, or returns, after which counts are halved.
const FADE_AFTER: u32 = 1000;
/// First uses that a table is taken to have had at the common rate before its own count.
const PRIOR: f32 = 8.0;
/// From this part of the common rate on a table's rate is as high.
const ALIKE: f32 = 0.999;
/// No table weighs less.
const WEIGHT_MIN: f32 = 0.1;

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    first_uses: u16,
    returns: u16,
}

/// Counts of first uses and returns by table.
#[derive(Debug, Clone)]
pub(super) struct ReturnRates {
    /// Prints of rows in the sample that were used once; 0: empty.
    waiting: Box<[u16]>,
    tables: Box<[Counts; CLASSES]>,
    /// Of all tables together.
    first_uses: u32,
    returns: u32,
}

impl Default for ReturnRates {
    fn default() -> Self {
        let tables = Box::new([Counts::default(); CLASSES]);
        Self { waiting: Box::default(), tables, first_uses: 0, returns: 0 }
    }
}

impl ReturnRates {
    /// Returns its bytes for a cache of `slot_count` slots.
    pub(super) fn bytes_for(slot_count: usize) -> usize {
        waiting_for(slot_count) * size_of::<u16>() + CLASSES * size_of::<Counts>()
    }

    /// Waits for as many rows as suit a cache of `slot_count` slots. Where that changes, rows that
    /// wait are forgotten; rates stay.
    pub(super) fn resize(&mut self, slot_count: usize) {
        let wanted = waiting_for(slot_count);
        if wanted != self.waiting.len() {
            self.waiting = vec![0; wanted].into_boxed_slice();
        }
    }

    /// Notes that the row of `hash` was asked for.
    pub(super) fn note_use(&mut self, hash: u64) {
        let Some((at, print)) = self.place(hash) else { return };
        if self.waiting[at] == print {
            self.waiting[at] = 0;
            self.tables[class_of(hash)].returns += 1;
            self.returns += 1;
            self.fade();
        }
    }

    /// Notes that this was the first use of the row of `hash`.
    pub(super) fn note_first(&mut self, hash: u64) {
        let Some((at, print)) = self.place(hash) else { return };
        self.waiting[at] = print;
        self.tables[class_of(hash)].first_uses += 1;
        self.first_uses += 1;
        self.fade();
    }

    /// Returns the rate of return of the table of `hash` as a part of the common rate: 1 where it
    /// is as high or higher, at least a tenth.
    pub(super) fn weight(&self, hash: u64) -> f32 {
        if self.returns == 0 {
            return 1.0;
        }
        let common = self.returns as f32 / self.first_uses.max(1) as f32;
        let table = self.tables[class_of(hash)];
        let returns = f32::from(table.returns) + PRIOR * common;
        let rate = returns / (f32::from(table.first_uses) + PRIOR);
        // Of a single table both are the same, but for rounding.
        if rate > ALIKE * common {
            return 1.0;
        }
        (rate / common).max(WEIGHT_MIN)
    }

    /// Halves all counts when there are many.
    fn fade(&mut self) {
        if self.first_uses.max(self.returns) < FADE_AFTER {
            return;
        }
        (self.first_uses, self.returns) = (0, 0);
        for table in self.tables.iter_mut() {
            table.first_uses /= 2;
            table.returns /= 2;
            self.first_uses += u32::from(table.first_uses);
            self.returns += u32::from(table.returns);
        }
    }

    /// Where a row of the sample waits, and its print.
    fn place(&self, hash: u64) -> Option<(usize, u16)> {
        if hash as usize & (SAMPLE_ONE_IN - 1) != 0 || self.waiting.is_empty() {
            return None;
        }
        // A power of two; the bits above those of the sample, and below those that choose shards.
        let at = (hash >> SAMPLE_ONE_IN.ilog2()) as usize & (self.waiting.len() - 1);
        Some((at, ((hash >> 24) as u16).max(1)))
    }
}

/// Rows that wait: in the sample, as many as a cacheful of new rows and up to twice that.
fn waiting_for(slot_count: usize) -> usize {
    (slot_count / SAMPLE_ONE_IN).max(WAITING_MIN).next_power_of_two()
}

/// The counts of the table of a row.
fn class_of(hash: u64) -> usize {
    crate::tier::unpacked(unmix64(hash)).table.0 as usize % CLASSES
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::{mix64, SplitMix64};
    use tierbed_core::{RowId, RowKey, TableId};

    use super::*;
    use crate::tier::packed;

    fn hash(table: u32, row: u64) -> u64 {
        mix64(packed(RowKey::new(TableId(table), RowId(row))))
    }

    /// New rows of table 0 come back every second time, those of table 1 one in eight; of 16
    /// groups with a row of each.
    fn learn(rates: &mut ReturnRates, rows: std::ops::Range<u64>) {
        let mut rng = SplitMix64::new(1);
        for row in rows {
            for (table, one_in) in [(0, 2), (1, 8)] {
                rates.note_use(hash(table, row));
                rates.note_first(hash(table, row));
                if rng.below(one_in) == 0 {
                    rates.note_use(hash(table, row));
                }
            }
        }
    }

    #[test]
    fn a_table_whose_rows_seldom_return_weighs_less() {
        let mut rates = ReturnRates::default();
        assert_eq!(rates.weight(hash(1, 5)), 1.0);
        rates.resize(16 << 10);
        learn(&mut rates, 0..20_000);
        assert_eq!(rates.weight(hash(0, 1 << 30)), 1.0);
        // One in eight of rows that return by 5/16 in common.
        let weight = rates.weight(hash(1, 1 << 30));
        assert!((0.25..0.55).contains(&weight), "{weight}");
        // A table without counts takes the average of all.
        assert_eq!(rates.weight(hash(77, 1)), 1.0);
    }

    #[test]
    fn rates_follow_what_changes_and_outlive_a_change_of_size() {
        let mut rates = ReturnRates::default();
        rates.resize(16 << 10);
        learn(&mut rates, 0..20_000);
        let before = rates.weight(hash(1, 0));
        rates.resize(64 << 10);
        assert_eq!(rates.weight(hash(1, 0)), before);
        // From now on the rows of table 1 return, too.
        for row in 20_000..60_000 {
            (0..2).for_each(|table| rates.note_first(hash(table, row)));
            (0..2).for_each(|table| rates.note_use(hash(table, row)));
        }
        assert!(rates.weight(hash(1, 0)) > 0.95);
    }

    #[test]
    fn one_table_changes_nothing() {
        let mut rates = ReturnRates::default();
        rates.resize(4096);
        for row in 0..50_000 {
            rates.note_first(hash(0, row));
            (row % 3 == 0).then(|| rates.note_use(hash(0, row)));
            assert_eq!(rates.weight(hash(0, row)), 1.0);
        }
    }

    #[test]
    fn bytes_are_those_it_says() {
        for slot_count in [0, 100, 16_384, 20_000] {
            let mut rates = ReturnRates::default();
            rates.resize(slot_count);
            let bytes = size_of_val(&*rates.waiting) + size_of_val(&*rates.tables);
            assert_eq!(ReturnRates::bytes_for(slot_count), bytes);
        }
    }
}
