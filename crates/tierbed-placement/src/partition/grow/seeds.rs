//! Lazy priority queue of seeds: most seeds are never grown twice.
//!
//! A heap holds what each seed promised when it was last looked at; promises only get worse, as
//! rows are taken and reads are saved. A page is taken as soon as it saves nearly what the best
//! promise left says, so that few pages are grown in vain.

#![expect(clippy::indexing_slicing, reason = "seeds are rows of the block")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::page::{Grown, Growth};
use crate::progress::Meter;

/// A page is taken when it saves this share of the best promise.
const ACCEPTED_SHARE: f32 = 0.85;

/// Pages that save fewer reads than this are left to the partitioner of the rest.
const SAVING_MIN: f32 = 3.0;

/// Seeds grown to learn how savings relate to what rows owe.
const TRIAL_COUNT: usize = 100;

/// A row that owes less cannot seed a page worth taking.
const OWED_MIN: f32 = 1.5;

/// A heap of seeds by promise; of equal promises the lowest row.
#[derive(Debug, Default)]
pub(crate) struct Seeds {
    heap: BinaryHeap<(u32, Reverse<u32>)>,
}

impl Seeds {
    /// Promises are not negative, so their bits are in order.
    pub(crate) fn push(&mut self, row: u32, promise: f32) {
        self.heap.push((promise.max(0.0).to_bits(), Reverse(row)));
    }

    pub(crate) fn pop(&mut self) -> Option<(u32, f32)> {
        let (promise, Reverse(row)) = self.heap.pop()?;
        Some((row, f32::from_bits(promise)))
    }

    /// Returns the best promise.
    pub(crate) fn best(&self) -> Option<f32> {
        self.heap.peek().map(|&(promise, _)| f32::from_bits(promise))
    }
}

/// Grows pages until no seed is worth one. A row is on one page at most; pages may be short.
///
/// `meter` counts rows that were grown, and ends growth early when the build is cancelled.
pub(crate) fn grow_pages(
    growth: &mut Growth<'_>,
    rows_per_page: usize,
    meter: &Meter<'_, '_, '_>,
) -> Vec<Vec<u32>> {
    let row_count = growth.residual.pins.row_count();
    let mut taken = vec![false; row_count];
    let mut seeds = first_seeds(growth, rows_per_page);
    let mut pages: Vec<Vec<u32>> = Vec::new();
    let Some(mut bar) = seeds.best() else { return pages };
    while let Some((seed, promise)) = seeds.pop() {
        // The bar follows the best promise left, but falls by steps: a page that saves nearly as
        // much as the best one may is taken now, instead of growing that one too.
        if promise < bar {
            bar = promise.max(bar * ACCEPTED_SHARE);
        }
        if taken[seed as usize] {
            continue;
        }
        let Grown { rows, saving } = growth.grow(seed, rows_per_page, Some(&taken));
        if saving < SAVING_MIN {
            continue;
        }
        // Its promise was out of date: it waits with what it would save today.
        if saving < bar * ACCEPTED_SHARE {
            seeds.push(seed, saving);
            continue;
        }
        growth.accept(&rows, pages.len() as u32);
        for &row in &rows {
            taken[row as usize] = true;
        }
        let is_enough = !meter.advance(rows.len() as u64);
        pages.push(rows);
        if is_enough {
            break;
        }
    }
    pages
}

/// Promises every row what it owes, scaled so that no trial beats its promise.
fn first_seeds(growth: &mut Growth<'_>, rows_per_page: usize) -> Seeds {
    let row_count = growth.residual.pins.row_count() as u32;
    let mut owed: Vec<(u32, f32)> = (0..row_count)
        .map(|row| (row, growth.owed(row)))
        .filter(|&(_, owed)| owed > OWED_MIN)
        .collect();
    owed.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    // A promise that is too low would hide a seed for good, one that is too high costs a page grown
    // in vain. So the highest ratio of the trials scales all.
    let mut scale = 1.0f32;
    for &(row, owed) in owed.iter().take(TRIAL_COUNT) {
        scale = scale.max(growth.grow(row, rows_per_page, None).saving / owed);
    }
    let mut seeds = Seeds::default();
    for (row, owed) in owed {
        seeds.push(row, owed * scale);
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_come_by_promise_then_by_row() {
        let mut seeds = Seeds::default();
        for (row, promise) in [(4, 1.5), (2, 7.0), (9, 0.0), (1, 1.5), (3, -2.0)] {
            seeds.push(row, promise);
        }
        assert_eq!(seeds.best(), Some(7.0));
        let rows: Vec<u32> = std::iter::from_fn(|| seeds.pop()).map(|(row, _)| row).collect();
        assert_eq!(rows, [2, 1, 4, 3, 9]);
    }
}
