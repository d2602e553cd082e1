//! Lookups whose callers do other things while pages are read.
//!
//! ```text
//! begin ─▶ rows in memory; pages of the others are asked for ─▶ all here? Done
//!                                                               │ no
//!          Pending: the caller waits for the ring ─▶ land ─▶ all here? finish
//!                        ▲                           │ no
//!                        └───────────────────────────┘
//! ```
//!
//! A thread that has others to answer hands such a lookup to nobody and sleeps for no page. A
//! lookup that must wait for something else is given back before anything was written, counted or
//! told to a policy.

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tierbed_core::{Bags, Result};
use tierbed_kernels::FeatureLayout;

use super::chunks::{Asked, Chunk};
use super::LookupStats;
use crate::layers::{Layers, LayersLease};
use crate::reader::Reader;
use crate::scratch::Filled;
use crate::snapshot::Snapshot;

/// What became of a lookup that was begun.
#[derive(Debug)]
pub enum Begun {
    /// All rows were in memory.
    Done(LookupStats),
    /// Pages are on their way.
    Pending(PendingLookup),
    /// Something else has to be waited for: nothing was written, counted or told to a policy.
    Left,
}

/// A lookup whose pages are on their way. Dropped, it leaves them to come for nobody.
pub struct PendingLookup {
    snapshot: Arc<Snapshot>,
    layers: LayersLease,
    chunk: Chunk,
    /// Some until dropped.
    reader: Option<Box<Reader>>,
    is_here: bool,
}

impl fmt::Debug for PendingLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingLookup").field("is_here", &self.is_here).finish_non_exhaustive()
    }
}

impl Snapshot {
    /// As [`lookup_in`](Self::lookup_in), without waiting.
    pub(crate) fn begin_lookup(
        self: &Arc<Self>,
        layers: &LayersLease,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<Begun> {
        plan.check(&layers.schema, bags, out.len())?;
        let is_plain = self.tiers().are_plain() && self.tiers().reads_misses();
        let reader = if is_plain { self.try_take_async() } else { None };
        let Some(reader) = reader else {
            let found = self.lookup_resident_in(layers, plan, bags, out)?;
            return Ok(found.map_or(Begun::Left, Begun::Done));
        };
        let mut pending = PendingLookup {
            snapshot: Arc::clone(self),
            layers: layers.clone(),
            chunk: Chunk { samples: 0..0, taken: 0..0 },
            reader: Some(reader),
            is_here: false,
        };
        let asked = Asked { plan, bags, layers };
        let Some(chunk) = self.ask_without_waiting(pending.reader(), asked)? else {
            return Ok(Begun::Left);
        };
        pending.chunk = chunk;
        if let Some(recorder) = self.recorder.get() {
            recorder.note(plan, bags);
        }
        if pending.land() {
            return pending.finish(plan, bags, out).map(Begun::Done);
        }
        Ok(Begun::Pending(pending))
    }

    /// Fills the scratch with all rows of a batch that are in memory, and asks for the pages of the
    /// others; `None` where that would have to wait.
    #[expect(clippy::indexing_slicing, reason = "positions are those of the scratch")]
    fn ask_without_waiting(&self, reader: &mut Reader, asked: Asked<'_>) -> Result<Option<Chunk>> {
        let (layers, source): (&Layers, _) = (asked.layers, self.source(asked.layers));
        reader.begin(layers);
        let scratch = &mut reader.scratch;
        let chunk = asked.gather(scratch, &(0..asked.bags.batch_size()), 0);
        let is_whole = chunk.taken.len() == asked.bags.indices.len();
        if !is_whole || !self.tiers().try_answer(scratch, layers) {
            return Ok(None);
        }
        for at in 0..scratch.keys.len() {
            if scratch.filled[at] == Filled::No {
                let place = self.place_of(scratch.keys[at], layers)?;
                self.want(scratch, at, place, layers)?;
            }
        }
        // An item of a placement is on one page.
        let pages_max = scratch.wanted.len() + scratch.asked.len();
        if pages_max > reader.room() {
            return Ok(None);
        }
        self.tiers().note_answer(&mut reader.scratch);
        reader.submit(&source);
        Ok(Some(chunk))
    }
}

impl PendingLookup {
    #[expect(clippy::expect_used, reason = "the reader leaves only when this is dropped")]
    fn reader(&mut self) -> &mut Reader {
        self.reader.as_mut().expect("a lookup has its reader")
    }

    /// Takes the pages that have come; returns whether all have, or one has failed.
    pub fn land(&mut self) -> bool {
        let Self { snapshot, layers, reader, is_here, .. } = self;
        let Some(reader) = reader else { panic!("a lookup has its reader") };
        *is_here = *is_here || reader.land_ready(&snapshot.source(layers));
        *is_here
    }

    /// Returns what waits for the ring of this lookup, which becomes readable when a page comes. It
    /// is kept with the ring: where `is_of` knows one of an earlier lookup, that is returned.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn notifier<T: Any + Send + Sync, E>(
        &mut self,
        is_of: impl FnOnce(&T) -> bool,
        make: impl FnOnce(BorrowedFd<'_>) -> std::result::Result<T, E>,
    ) -> std::result::Result<&T, E> {
        self.reader().notifier(is_of, make)
    }

    /// Pools the rows into `out`, as [`Snapshot::lookup`] does; plan and bags are those that the
    /// lookup was begun with. Waits for pages that have not come.
    ///
    /// # Errors
    /// `Corruption` for pages that fail their checks, `Io` from the device.
    ///
    /// # Panics
    /// For other bags.
    pub fn finish(
        mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        let Self { snapshot, layers, chunk, reader, .. } = &mut self;
        let Some(reader) = reader else { panic!("a lookup has its reader") };
        assert_eq!(chunk.taken.len(), bags.indices.len(), "bags of another lookup");
        let asked = Asked { plan, bags, layers };
        if plan.is_pooled() {
            out.fill(0.0);
        }
        let mut stats =
            LookupStats { index_count: bags.indices.len() as u64, ..LookupStats::default() };
        stats.add(&snapshot.complete(reader, asked, chunk, out)?);
        if bags.indices.is_empty() {
            stats.chunk_count = 0;
        }
        snapshot.scale_means(plan, bags, out);
        snapshot.count(&stats);
        Ok(stats)
    }
}

impl Drop for PendingLookup {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.snapshot.take_back_async(reader);
        }
    }
}
