//! Lookups whose rows are all in memory, for threads that must not wait.
//!
//! ```text
//! gather ─▶ tiers, locks that are free ─▶ resident rows ─▶ rows stored nowhere ─▶ all there?
//!    no: nothing has happened         yes: tell the policies, count, pool as every lookup does
//! ```
//!
//! No page is read and no reader is waited for. When all rows are found, the policies are told as
//! ever: that waits, where it must, until another thread has moved its rows in or out of a tier.
#![expect(clippy::indexing_slicing, reason = "positions are those of the scratch")]

use tierbed_core::{Bags, Result};
use tierbed_kernels::FeatureLayout;

use super::chunks::{Asked, Chunk};
use super::{fill_unstored, LookupStats};
use crate::layers::Layers;
use crate::reader::Reader;
use crate::scratch::{Filled, Scratch};
use crate::snapshot::{Place, Snapshot};

impl Snapshot {
    /// As [`lookup_in`](Self::lookup_in), but only where that needs no page and no wait; `None`
    /// where it would, and then nothing is written, counted or told to a policy.
    pub(crate) fn lookup_resident_in(
        &self,
        layers: &Layers,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<Option<LookupStats>> {
        plan.check(&layers.schema, bags, out.len())?;
        if !self.tiers().are_plain() {
            return Ok(None);
        }
        let index_count = bags.indices.len();
        let Some(mut guard) = self.try_take_reader_for(index_count) else { return Ok(None) };
        let reader = guard.get();
        // Page files of deltas that left are closed here, too.
        reader.begin(layers);
        let asked = Asked { plan, bags, layers };
        let Some(chunk) = self.gather_resident(reader, asked)? else { return Ok(None) };
        let mut stats = LookupStats {
            index_count: index_count as u64,
            chunk_count: u64::from(index_count > 0),
            ..LookupStats::default()
        };
        stats.count_rows(&reader.scratch.filled);
        self.tiers().note_answer(&mut reader.scratch);
        self.settle(&mut reader.scratch, asked, &chunk, 0)?;
        if let Some(recorder) = self.recorder.get() {
            recorder.note(plan, bags);
        }
        if plan.is_pooled() {
            out.fill(0.0);
        }
        self.pool_chunk(&reader.scratch, asked, &chunk, out);
        drop(guard);
        self.scale_means(plan, bags, out);
        self.count(&stats);
        Ok(Some(stats))
    }

    /// Fills the scratch with all rows of a batch as one chunk, if they fit and are in memory.
    fn gather_resident(&self, reader: &mut Reader, asked: Asked<'_>) -> Result<Option<Chunk>> {
        let scratch = &mut reader.scratch;
        let chunk = asked.gather(scratch, &(0..asked.bags.batch_size()), 0);
        let is_here = chunk.taken.len() == asked.bags.indices.len()
            && self.tiers().try_answer(scratch, asked.layers)
            && self.fill_all_unstored(scratch, asked.layers)?;
        Ok(is_here.then_some(chunk))
    }

    /// Fills the rows that are stored nowhere; `false` when one that is not filled is stored.
    fn fill_all_unstored(&self, scratch: &mut Scratch, layers: &Layers) -> Result<bool> {
        for at in 0..scratch.keys.len() {
            if scratch.filled[at] != Filled::No {
                continue;
            }
            if self.place_of(scratch.keys[at], layers)? != Place::Nowhere {
                return Ok(false);
            }
            fill_unstored(scratch, at, layers)?;
        }
        Ok(true)
    }
}
