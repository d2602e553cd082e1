//! Replacement of rows that a delta brings, where tiers hold them.
//!
//! A few rows at a time, so that no lookup waits long for a lock. What a policy knows of a row
//! stays as it is.

use tierbed_cache::Visits;
use tierbed_core::RowKey;

use super::coded::CodedTier;

/// Rows on their way to the tiers that hold them.
pub(crate) struct Replacing<'a> {
    tiers: &'a [CodedTier],
    rows_max: usize,
    keys: Vec<RowKey>,
    /// Where the numbers of each row begin and end; none for rows that leave.
    bounds: Vec<Option<[usize; 2]>>,
    numbers: Vec<f32>,
    codes: Vec<f32>,
    visits: Visits,
    row_count: u64,
}

impl<'a> Replacing<'a> {
    pub(super) fn new(tiers: &'a [CodedTier], rows_max: usize) -> Self {
        Self {
            tiers,
            rows_max,
            keys: Vec::new(),
            bounds: Vec::new(),
            numbers: Vec::new(),
            codes: Vec::new(),
            visits: Visits::default(),
            row_count: 0,
        }
    }

    /// Gives a row new weights.
    pub(crate) fn push(&mut self, key: RowKey, weights: &[f32]) {
        let start = self.numbers.len();
        self.numbers.extend_from_slice(weights);
        self.add(key, Some([start, self.numbers.len()]));
    }

    /// Takes a row out.
    pub(crate) fn push_none(&mut self, key: RowKey) {
        self.add(key, None);
    }

    fn add(&mut self, key: RowKey, bounds: Option<[usize; 2]>) {
        self.keys.push(key);
        self.bounds.push(bounds);
        if self.keys.len() >= self.rows_max {
            self.flush();
        }
    }

    /// Ends; returns in how many places rows were replaced.
    pub(crate) fn finish(mut self) -> u64 {
        self.flush();
        self.row_count
    }

    fn flush(&mut self) {
        let Self { tiers, keys, bounds, numbers, codes, visits, .. } = self;
        assert_eq!(keys.len(), bounds.len(), "each row has its bounds");
        for tier in *tiers {
            codes.clear();
            let coded = bounds.iter().map(|bounds| {
                let [start, end] = (*bounds)?;
                let Some(row) = numbers.get(start..end) else {
                    panic!("row {start}..{end} of {} numbers", numbers.len());
                };
                let first = codes.len();
                // A row that the tier cannot code leaves.
                tier.encode(row, codes).then_some([first, codes.len()])
            });
            let coded: Vec<Option<[usize; 2]>> = coded.collect();
            self.row_count += tier.replace(keys, visits, |at| {
                let Some(Some([start, end])) = coded.get(at) else { return None };
                codes.get(*start..*end)
            });
        }
        keys.clear();
        bounds.clear();
        numbers.clear();
    }
}
