//! Lookup of bags in a snapshot: unique rows, tiers, page reads, pooling.
//!
//! The indices of a batch are handled in chunks that fit a reader's scratch; within a chunk each
//! row is fetched once and each page read once. Pooling adds rows in index order with the kernels
//! of training, so the vectors have the bits of a lookup while training.
#![expect(
    clippy::indexing_slicing,
    reason = "positions are those of the chunk that the scratch holds"
)]

mod chunks;
mod pending;
mod resident;
mod stats;

use tierbed_core::{Bags, Result};

use tierbed_kernels::{fill_initial, BagRange, FeatureLayout, Pooling, Rows};

pub use self::pending::{Begun, PendingLookup};
pub use self::stats::LookupStats;

use self::chunks::{Asked, Chunk, Span};
use crate::layers::{Layers, PagePlace};
use crate::reader::{PagesRead, Reader};
use crate::scratch::{AskedItem, Filled, Scratch, Wanted};
use crate::snapshot::{Place, Snapshot};
use crate::tiers::{Answer, Group};

impl Snapshot {
    /// Pools the rows of a batch into `out`, `[B, output_dim]` (or `[E, D]` unpooled), which is
    /// overwritten. May be called from several threads at once; calls beyond the number of
    /// readers wait.
    ///
    /// Duplicate indices count as often as they occur; vectors of empty bags are 0. Weights do
    /// not apply where pooling is none.
    ///
    /// # Errors
    /// `Invalid` for shapes that do not match and ids out of range, before anything is written;
    /// `Corruption` for pages that fail their checks, `Io` from the device.
    pub fn lookup(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        self.lookup_in(&self.layers(), plan, bags, out)
    }

    /// As [`lookup`](Self::lookup), in `layers`, which stay leased meanwhile.
    pub(crate) fn lookup_in(
        &self,
        layers: &Layers,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        plan.check(&layers.schema, bags, out.len())?;
        if plan.is_pooled() {
            out.fill(0.0);
        }
        let mut stats =
            LookupStats { index_count: bags.indices.len() as u64, ..Default::default() };
        if let Some(recorder) = self.recorder.get() {
            recorder.note(plan, bags);
        }
        let asked = Asked { plan, bags, layers };
        let mut guard = self.take_reader_for(bags.indices.len());
        let reader = guard.get();
        let done = self.look_up_chunks(reader, asked, out, &mut stats);
        if done.is_err() {
            reader.land_all();
        }
        done?;
        drop(guard);
        self.scale_means(plan, bags, out);
        self.count(&stats);
        Ok(stats)
    }

    /// Divides the sums of bags whose mean is asked for.
    fn scale_means(&self, plan: &FeatureLayout, bags: &Bags<'_>, out: &mut [f32]) {
        for (at, feature) in plan.features().iter().enumerate() {
            if feature.pooling == Pooling::Mean {
                self.kernels().mean_scale(bags.feature_offsets(at), feature.columns, out);
            }
        }
    }

    /// Handles chunk after chunk. Where the reader has two scratches, the pages of one chunk fly
    /// while the chunk before is completed.
    fn look_up_chunks(
        &self,
        reader: &mut Reader,
        asked: Asked<'_>,
        out: &mut [f32],
        stats: &mut LookupStats,
    ) -> Result<()> {
        reader.begin(asked.layers);
        let mut flying: Option<Chunk> = None;
        for samples in asked.parts(reader.has_two()) {
            let (mut first, end) = (0, asked.index_count(&samples));
            while first < end {
                let chunk = asked.gather(&mut reader.scratch, &samples, first);
                assert!(chunk.taken.end > first, "a row does not fit an empty scratch");
                first = chunk.taken.end;
                self.tiers().answer(&mut reader.scratch, asked.layers);
                self.ask(reader, asked.layers, true)?;
                if !reader.turn() {
                    stats.add(&self.complete(reader, asked, &chunk, out)?);
                } else if let Some(before) = flying.replace(chunk) {
                    reader.hand_over(&self.source(asked.layers));
                    stats.add(&self.complete(reader, asked, &before, out)?);
                }
            }
        }
        if let Some(chunk) = flying {
            reader.turn();
            stats.add(&self.complete(reader, asked, &chunk, out)?);
        }
        Ok(())
    }

    /// Waits for the pages of the chunk in the scratch, tells the tiers, and pools its rows.
    fn complete(
        &self,
        reader: &mut Reader,
        asked: Asked<'_>,
        chunk: &Chunk,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        let read = reader.finish(&self.source(asked.layers))?;
        let mut stats = LookupStats {
            pages_read: read.pages_read,
            pages_failed: read.pages_failed,
            rows_recovered: read.rows_recovered,
            chunk_count: 1,
            ..LookupStats::default()
        };
        stats.count_rows(&reader.scratch.filled);
        self.settle(&mut reader.scratch, asked, chunk, stats.rows_read)?;
        self.pool_chunk(&reader.scratch, asked, chunk, out);
        Ok(stats)
    }

    /// Tells the tiers which rows a chunk asked for, `rows_read` of them being read.
    fn settle(
        &self,
        scratch: &mut Scratch,
        asked: Asked<'_>,
        chunk: &Chunk,
        rows_read: u64,
    ) -> Result<()> {
        if self.tiers().knows_groups() {
            return self.settle_samples(scratch, asked, chunk);
        }
        if rows_read == 0 && !self.tiers().wants_hits() {
            return Ok(());
        }
        let every: Vec<u32> = (0..scratch.keys.len() as u32).collect();
        let row_count = every.len() as u32;
        assert!(rows_read <= u64::from(row_count), "{rows_read} of {row_count} rows were read");
        let hit_count = row_count - rows_read as u32;
        let group = Group { positions: &every, row_count, hit_count };
        if rows_read > 0 {
            self.tiers().settle(&group, scratch, asked.layers)?;
        }
        self.tiers().note(&group, scratch);
        Ok(())
    }

    /// Tells the tiers which rows each sample asked for. A row that an earlier sample of the
    /// chunk had read came along for free.
    fn settle_samples(&self, scratch: &mut Scratch, asked: Asked<'_>, chunk: &Chunk) -> Result<()> {
        assert_eq!(scratch.ats.len(), chunk.taken.len(), "indices of the chunk in the scratch");
        let spans: Vec<Span> = asked.spans(chunk).collect();
        let mut positions = Vec::new();
        for sample in chunk.samples.clone() {
            positions.clear();
            let (mark, mut hit_count) = (sample as u32 + 1, 0);
            for span in &spans {
                let indices = asked.indices(span.feature, &(sample..sample + 1));
                let from = indices.start.max(span.indices.start);
                for index in from..indices.end.min(span.indices.end) {
                    let at = span.at + index - span.indices.start;
                    let row = scratch.ats[at];
                    let by = &mut scratch.asked_by[row as usize];
                    if *by == mark {
                        continue;
                    }
                    let is_read = scratch.filled[row as usize] == Filled::Read;
                    hit_count += u32::from(*by != 0 || !is_read);
                    *by = mark;
                    positions.push(row);
                }
            }
            let row_count = positions.len() as u32;
            let group = Group { positions: &positions, row_count, hit_count };
            self.tiers().settle(&group, scratch, asked.layers)?;
            self.tiers().note(&group, scratch);
        }
        Ok(())
    }

    /// Fills the rows of the scratch that are not filled yet; returns the pages read. Misses may
    /// be answered approximately, where the options say so.
    pub(crate) fn fetch(
        &self,
        reader: &mut Reader,
        layers: &Layers,
        may_approximate: bool,
    ) -> Result<PagesRead> {
        reader.begin(layers);
        let asked = self.ask(reader, layers, may_approximate);
        let read = asked.and_then(|()| reader.finish(&self.source(layers)));
        if read.is_err() {
            reader.land_all();
        }
        read
    }

    /// Fills the rows of the scratch that are not filled yet, or asks for their pages.
    fn ask(&self, reader: &mut Reader, layers: &Layers, may_approximate: bool) -> Result<()> {
        let scratch = &mut reader.scratch;
        for at in 0..scratch.keys.len() {
            if scratch.filled[at] != Filled::No {
                continue;
            }
            let key = scratch.keys[at];
            let place = self.place_of(key, layers)?;
            if may_approximate && place != Place::Nowhere {
                let start = scratch.start_of(at);
                let Scratch { words, visits, .. } = &mut *scratch;
                let out = words.row_mut(start, self.dim(key, layers));
                let stand_in = match self.tiers().answer_miss(key, layers, visits, out) {
                    Answer::None => None,
                    Answer::Surrogate => Some(Filled::Surrogate),
                    Answer::Default => Some(Filled::Default),
                };
                if let Some(filled) = stand_in {
                    scratch.mark(at, filled);
                    if let Some(refresher) = self.refresher() {
                        refresher.ask(key);
                    }
                    continue;
                }
            }
            self.want(scratch, at, place, layers)?;
        }
        reader.submit(&self.source(layers));
        Ok(())
    }

    /// Notes which pages a row of the scratch comes from, or fills one that is stored nowhere.
    fn want(&self, scratch: &mut Scratch, at: usize, place: Place, layers: &Layers) -> Result<()> {
        match place {
            Place::Page(PagePlace { layer, page_id }) => {
                let table = self.source(layers).page_table(layer);
                let parts = table.shape(scratch.keys[at].table).parts_per_row as u8;
                scratch.expect(at, parts);
                let page_id = PagePlace { layer, page_id }.packed();
                scratch.wanted.extend((0..parts).map(|part| Wanted {
                    page_id: page_id + u64::from(part),
                    at: at as u32,
                    part: u32::from(part),
                }));
            }
            Place::Item { placement, item } => {
                scratch.expect(at, 1);
                scratch.asked.push(AskedItem { placement, item, at: at as u32 });
            }
            Place::Nowhere => fill_unstored(scratch, at, layers)?,
        }
        Ok(())
    }

    /// Adds the rows of a chunk to their vectors.
    fn pool_chunk(&self, scratch: &Scratch, asked: Asked<'_>, chunk: &Chunk, out: &mut [f32]) {
        assert_eq!(scratch.starts.len(), chunk.taken.len(), "indices of the chunk in the scratch");
        let Asked { plan, bags, .. } = asked;
        let arena = scratch.arena();
        for Span { feature: at, indices, at: first } in asked.spans(chunk) {
            let feature = &plan.features()[at];
            let starts = &scratch.starts[first..first + indices.len()];
            if feature.pooling == Pooling::None {
                let dim = feature.columns.dim;
                let out = &mut out[indices.start * dim..indices.end * dim];
                self.kernels().gather_rows(arena, starts, dim, out);
                continue;
            }
            let weights = bags.weights.map(|weights| &weights[indices.clone()]);
            let rows = Rows { arena, starts, weights };
            let bags = BagRange { offsets: bags.feature_offsets(at), first_index: indices.start };
            self.kernels().pool_add(rows, bags, feature.columns, out);
        }
    }
}

/// Fills a row that is stored nowhere.
fn fill_unstored(scratch: &mut Scratch, at: usize, layers: &Layers) -> Result<()> {
    // Where codes are kept, a row that is not there has none.
    if !scratch.keeps_codes {
        let key = scratch.keys[at];
        let table = layers.schema.table(key.table)?;
        let out = scratch.row_mut(at, 0, table.dim as usize);
        fill_initial(&table.init, table.seed, key.row.0, out);
    }
    scratch.mark(at, Filled::Initial);
    Ok(())
}
