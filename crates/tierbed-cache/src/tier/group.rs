//! Group accesses: what a tier is given for each group that was asked for.
//!
//! A group is reported when all of it is there: policies want to know how many rows were missing
//! before the first of them is used. Rows that are cached are touched, the others are offered.

#![expect(
    clippy::indexing_slicing,
    reason = "positions are those of the group, tiers those of the call"
)]

use std::hint::black_box;

use tierbed_core::{Result, RowKey};

use super::search::NOWHERE;
use super::{hash_of, Insertion, NewRow, RowTier};
use crate::policy::Group;

/// The rows of a group that a tier deals with.
#[derive(Debug, Clone, Copy)]
pub struct TierGroup<'a> {
    /// Their keys, each once.
    pub keys: &'a [RowKey],
    /// Words of each, `[keys]`.
    pub row_words: &'a [usize],
    /// Slots in which the first of them were when they were looked up, at most `[keys]`: where to
    /// look first.
    pub slots: &'a [u32],
    /// Rows of the whole group, those of other tiers too.
    pub row_count: u32,
    /// How many of them needed no read.
    pub hit_count: u32,
}

impl TierGroup<'_> {
    /// Where the row at `position` was found, if it was.
    #[inline]
    fn slot(&self, position: usize) -> u32 {
        match self.slots.get(position) {
            Some(slot) => *slot,
            None => NOWHERE,
        }
    }

    #[inline]
    fn row(&self, position: usize) -> (RowKey, usize) {
        (self.keys[position], self.row_words[position])
    }
}

/// Gives the row of a position, or none to leave it out.
pub(crate) type RowOf<'r, 'a> = dyn FnMut(usize) -> Option<&'a [f32]> + 'r;

impl RowTier {
    /// Reports `group` to the policies, of which the rows at `positions` belong here, and offers
    /// them those that are not here. Rows that leave for others, and those that do not come in, go
    /// to `left`.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub(crate) fn settle(
        &mut self,
        group: &TierGroup<'_>,
        positions: &[u32],
        row_of: &mut RowOf<'_, '_>,
        left: &mut dyn FnMut(RowKey, &[f32]),
    ) -> Result<()> {
        self.begin_group(group, positions);
        let reports_hits = self.layout.policy.knows_groups();
        for &position in positions {
            let position = position as usize;
            let key = group.keys[position];
            let hash = hash_of(key);
            let slot = self.find_again(group.slot(position), hash, key).unwrap_or(NOWHERE);
            // For other policies hits were counted when the rows were looked up.
            let is_here =
                if reports_hits { self.use_found(slot).is_some() } else { slot != NOWHERE };
            if is_here {
                continue;
            }
            if let Some(row) = row_of(position) {
                let (number, pool_at) = self.place_for(key, row)?;
                self.tick = self.tick.wrapping_add(1);
                let new = NewRow { hash, number, pool_at, row };
                if self.take_in(new, left) == Insertion::Bypassed {
                    left(key, row);
                }
            }
        }
        self.pools.iter_mut().for_each(|pool| pool.policy.end_group());
        Ok(())
    }

    fn begin_group(&mut self, group: &TierGroup<'_>, positions: &[u32]) {
        let rows = positions.iter().map(|&at| group.row(at as usize));
        for pool in &mut self.pools {
            self.hashes.clear();
            let own = rows.clone().filter(|(_, words)| *words == pool.row_words);
            self.hashes.extend(own.map(|(key, _)| hash_of(key)));
            pool.policy.begin_group(&Group {
                hashes: &self.hashes,
                row_count: group.row_count,
                hit_count: group.hit_count,
            });
        }
    }
}

/// Reads what [`RowTier::settle`] of a group will look at first in each of `tiers`, all at once.
pub(crate) fn warm(
    tiers: &[RowTier],
    group: &TierGroup<'_>,
    rows: impl Iterator<Item = (usize, u32)>,
) {
    let mut words = 0;
    for (tier, position) in rows {
        if group.slot(position as usize) == NOWHERE {
            words ^= tiers[tier].index.first_word(hash_of(group.keys[position as usize]));
        }
    }
    black_box(words);
}
