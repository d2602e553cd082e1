//! Group accesses: what a tier is given for each group that was asked for.
//!
//! When the whole group is there: policies want to know how many rows were missing before they hear
//! of any. Rows that are here are used, and the others offered.

use std::hint::black_box;

use tierbed_core::{Result, RowKey};

use super::search::NOWHERE;
use super::{hash_of, Insertion, RowTier};
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
        self.slots.get(position).copied().unwrap_or(NOWHERE)
    }

    #[inline]
    fn row(&self, position: usize) -> Option<(RowKey, usize)> {
        Some((*self.keys.get(position)?, *self.row_words.get(position)?))
    }
}

/// Gives the row of a position, or none to leave it out.
pub(crate) type RowOf<'r, 'a> = dyn FnMut(usize) -> Option<&'a [f32]> + 'r;

impl RowTier {
    /// Tells the policies of `group`, of which the rows at `positions` belong here, and offers them
    /// those that are not here. Rows that leave for others, and those that do not come in, go to
    /// `left`.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub(crate) fn settle(
        &mut self,
        (group, positions): (&TierGroup<'_>, &[u32]),
        row_of: &mut RowOf<'_, '_>,
        left: &mut dyn FnMut(RowKey, &[f32]),
    ) -> Result<()> {
        self.begin_group(group, positions);
        let is_told_of_hits = self.layout.policy.knows_groups();
        for &position in positions {
            let position = position as usize;
            let Some(&key) = group.keys.get(position) else { continue };
            let hash = hash_of(key);
            let slot = self.find_again(group.slot(position), hash, key).unwrap_or(NOWHERE);
            // Other policies heard of hits when the rows were looked up.
            let is_here =
                if is_told_of_hits { self.use_found(slot).is_some() } else { slot != NOWHERE };
            if is_here {
                continue;
            }
            if let Some(row) = row_of(position) {
                let (number, pool_at) = self.place_for(key, row)?;
                self.tick = self.tick.wrapping_add(1);
                if self.take_in((hash, number), pool_at, row, left) == Insertion::Bypassed {
                    left(key, row);
                }
            }
        }
        self.pools.iter_mut().for_each(|pool| pool.policy.end_group());
        Ok(())
    }

    fn begin_group(&mut self, group: &TierGroup<'_>, positions: &[u32]) {
        let rows = positions.iter().filter_map(|&at| group.row(at as usize));
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
        let (Some(tier), Some(key)) = (tiers.get(tier), group.keys.get(position as usize)) else {
            continue;
        };
        if group.slot(position as usize) == NOWHERE {
            words ^= tier.index.first_word(hash_of(*key));
        }
    }
    black_box(words);
}
