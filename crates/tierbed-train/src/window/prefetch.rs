//! Prefetch of the next batches: their rows, brought in one sweep and kept until used.
//!
//! Batches are announced nearest first. Their rows are placed in the buffer with the number of
//! the last announced batch that uses them, and read together in file order: pages that several
//! batches share are read once. When no slot is left for them, the announcement ends early: the
//! window shortens by itself. A full buffer lets rows leave for the next batch, and for few rows
//! of later ones: a row that waits for its batch has the slot of one that is used before.
//!
//! Source: RecDB §4.2 (look-ahead, EV buffer). Differs: the whole window is not brought, because
//! the buffer also holds rows that were used often.

#![expect(clippy::indexing_slicing, reason = "positions are those of a batch that was checked")]

use std::collections::VecDeque;

use tierbed_core::store::Ahead;
use tierbed_core::{Bags, Result, RowKey, TrainStore};
use tierbed_kernels::FeatureLayout;

use crate::window::engine::{built_mut, WindowEngine};
use crate::window::row_buffer::Want;

/// What has been announced, and how much of it used.
#[derive(Debug, Clone, Default)]
pub(crate) struct Announced {
    layout: Option<FeatureLayout>,
    announced: u32,
    used: u32,
    // Of the batches not used yet, nearest first.
    access_counts: VecDeque<u64>,
    /// The caller says when batches were looked up, in lookups of other layouts.
    is_counted_by_caller: bool,
}

impl Announced {
    /// Counts a lookup of the announced layout.
    pub(crate) fn note_lookup(&mut self, layout: &FeatureLayout) {
        if !self.is_counted_by_caller && self.layout.as_ref() == Some(layout) {
            self.note_used(1);
        }
    }

    fn note_used(&mut self, count: u32) {
        for _ in 0..count.min(self.announced - self.used) {
            self.used += 1;
            self.access_counts.pop_front();
        }
    }

    /// Returns the number of the last announced batch that was used.
    pub(crate) fn batch_done(&self) -> u32 {
        self.used
    }

    fn push(&mut self, bags: &Bags<'_>) {
        self.announced += 1;
        self.access_counts.push_back(bags.indices.len() as u64);
        let ahead = (self.announced - self.used) as usize;
        assert_eq!(self.access_counts.len(), ahead, "each batch ahead has a count");
    }
}

impl WindowEngine {
    /// Brings the rows of `batches`, nearest first, and keeps them until they were looked up.
    ///
    /// Returns how many of the batches fit; the rest is to be announced again later. Batches are
    /// checked when their turn comes: one that is wrong ends the announcement before it.
    ///
    /// # Errors
    /// `Invalid` for ids out of range in the first batch, otherwise the store's. Values are never
    /// at stake: a row has one home, whoever brings it.
    pub fn prefetch(&mut self, layout: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        self.announce_batches(layout, batches, false)
    }

    /// As [`prefetch`](Self::prefetch) for batches that are looked up piece by piece, in layouts of
    /// their own: the caller tells by [`note_looked_up`](Self::note_looked_up) when one is done.
    ///
    /// # Errors
    /// As [`prefetch`](Self::prefetch).
    pub fn prefetch_pieces(
        &mut self,
        layout: &FeatureLayout,
        batches: &[Bags<'_>],
    ) -> Result<usize> {
        self.announce_batches(layout, batches, true)
    }

    /// Notes that `count` batches of [`prefetch_pieces`](Self::prefetch_pieces) were looked up.
    pub fn note_looked_up(&mut self, count: usize) {
        if self.ahead.is_counted_by_caller {
            self.ahead.note_used(u32::try_from(count).unwrap_or(u32::MAX));
            if let Some(buffer) = &mut self.buffer {
                buffer.set_batch_done(self.ahead.batch_done());
            }
        }
    }

    fn announce_batches(
        &mut self,
        layout: &FeatureLayout,
        batches: &[Bags<'_>],
        is_counted_by_caller: bool,
    ) -> Result<usize> {
        self.poison.check()?;
        if let Some(first) = batches.first() {
            layout.check(&self.schema, first, layout.output_len(first))?;
        }
        self.make_room()?;
        self.ensure_buffer()?;
        let is_other = self.ahead.layout.as_ref() != Some(layout)
            || self.ahead.is_counted_by_caller != is_counted_by_caller;
        if is_other || self.ahead.announced > u32::MAX / 2 {
            self.end_lookahead();
            self.ahead.layout = Some(layout.clone());
            self.ahead.is_counted_by_caller = is_counted_by_caller;
        }
        let mut fitted = 0;
        for bags in batches {
            // Batches that do not fit any more are not looked at; they are offered again.
            let is_wrong = || layout.check(&self.schema, bags, layout.output_len(bags)).is_err();
            if fitted > 0 && is_wrong() {
                break;
            }
            if !self.announce(layout, bags, self.ahead.announced + 1)? {
                break;
            }
            self.ahead.push(bags);
            fitted += 1;
        }
        self.fill_announced()?;
        assert!(self.ahead.used <= self.ahead.announced, "more batches were used than announced");
        self.tell_store(layout, &batches[..fitted])?;
        Ok(fitted)
    }

    /// Forgets what was announced; rows stay in the buffer, unprotected.
    pub fn end_lookahead(&mut self) {
        self.ahead = Announced::default();
        if let Some(buffer) = &mut self.buffer {
            buffer.forget_needs();
        }
    }

    // What the store may want to know of `batches`, which were announced just now.
    fn tell_store(&mut self, layout: &FeatureLayout, batches: &[Bags<'_>]) -> Result<()> {
        let visit = |visit: &mut dyn FnMut(RowKey)| {
            for bags in batches {
                for (at, feature) in layout.features().iter().enumerate() {
                    let ids = &bags.indices[layout.range(bags, at)];
                    ids.iter().for_each(|&id| visit(feature.row_key(id)));
                }
            }
        };
        self.store.observe(&Ahead {
            batches_buffered: self.ahead.announced - self.ahead.used,
            accesses_buffered: self.ahead.access_counts.iter().sum(),
            sample_count: batches.iter().map(|bags| bags.batch_size() as u64).sum(),
            access_count: batches.iter().map(|bags| bags.indices.len() as u64).sum(),
            visit_accesses: &visit,
        })
    }

    // Places the rows of one batch; `false` when they do not all fit. Rows placed before that
    // stay announced for this batch: it is the next one to be asked for anyway.
    fn announce(&mut self, layout: &FeatureLayout, bags: &Bags<'_>, until: u32) -> Result<bool> {
        let misses_max = self.scratch.lookup_indices_max();
        for (at, feature) in layout.features().iter().enumerate() {
            for position in layout.range(bags, at) {
                if self.scratch.misses.len() >= misses_max {
                    self.fill_announced()?;
                }
                let buffer = built_mut(&mut self.buffer);
                if self.scratch.misses.is_empty() {
                    buffer.begin_round();
                }
                let key = feature.row_key(bags.indices[position]);
                let misses = &mut self.scratch.misses;
                let want = Want::Ahead { until };
                if buffer.place(key, want, &mut self.store, misses)?.is_none() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn fill_announced(&mut self) -> Result<()> {
        if self.scratch.misses.is_empty() {
            return Ok(());
        }
        built_mut(&mut self.buffer).fill(&mut self.scratch.misses, &self.schema, &mut self.store)
    }
}

#[cfg(test)]
mod tests;
