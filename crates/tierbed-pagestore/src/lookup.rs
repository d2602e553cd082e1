//! Here are bags, give me one vector each, from a snapshot.
//!
//! The indices of a batch are handled in chunks that fit a reader's scratch, in index order;
//! within a chunk each row is fetched once and each page read once. Pooling adds rows in index
//! order with the kernels of training, so the vectors have the bits of a lookup while training.

use serde::Serialize;
use tierbed_core::{Bags, Result};

use tierbed_kernels::{fill_initial, BagRange, FeaturePlan, Pooling, Rows};

use crate::reader::{PagesRead, Reader};
use crate::scratch::{AskedItem, Filled, Scratch, Wanted};
use crate::snapshot::{Place, Snapshot};
use crate::tiers::{Answer, Group};

/// What one lookup did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LookupStats {
    /// Indices asked for.
    pub index_count: u64,
    /// Rows fetched: unique in each chunk.
    pub row_count: u64,
    /// Of these, found in a tier of the row cache.
    pub rows_cached: u64,
    /// Of these, always in memory.
    pub rows_resident: u64,
    /// Of these, answered by a coarse code or another row.
    pub rows_surrogate: u64,
    /// Of these, answered by the default row of their table.
    pub rows_default: u64,
    /// Of these, read from pages.
    pub rows_read: u64,
    /// Of these, never written: their initial values were computed.
    pub rows_initial: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Of these, pages that could not be read or failed their checks.
    pub pages_failed: u64,
    /// Rows of such pages that replicas on other pages gave.
    pub rows_recovered: u64,
    /// Chunks the batch was handled in.
    pub chunk_count: u64,
}

impl LookupStats {
    pub(crate) fn add(&mut self, other: &Self) {
        self.index_count += other.index_count;
        self.row_count += other.row_count;
        self.rows_cached += other.rows_cached;
        self.rows_resident += other.rows_resident;
        self.rows_surrogate += other.rows_surrogate;
        self.rows_default += other.rows_default;
        self.rows_read += other.rows_read;
        self.rows_initial += other.rows_initial;
        self.pages_read += other.pages_read;
        self.pages_failed += other.pages_failed;
        self.rows_recovered += other.rows_recovered;
        self.chunk_count += other.chunk_count;
    }
}

/// A batch and what to do with it.
#[derive(Clone, Copy)]
struct Asked<'a> {
    plan: &'a FeaturePlan,
    bags: &'a Bags<'a>,
}

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
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        plan.check(self.schema(), bags, out.len())?;
        if plan.is_pooled() {
            out.fill(0.0);
        }
        let mut stats =
            LookupStats { index_count: bags.indices.len() as u64, ..Default::default() };
        if let Some(recorder) = self.recorder.get() {
            recorder.note(plan, bags);
        }
        let asked = Asked { plan, bags };
        let mut guard = self.take_reader();
        let reader = guard.get();
        let mut first = 0;
        while first < bags.indices.len() {
            let end = gather(reader, asked, first);
            self.fetch_cached(reader, asked, first, &mut stats)?;
            self.pool_chunk(reader, asked, first, out);
            stats.chunk_count += 1;
            first = end;
        }
        drop(guard);
        for (at, feature) in plan.features().iter().enumerate() {
            if feature.pooling == Pooling::Mean {
                self.kernels().mean_scale(bags.feature_offsets(at), feature.columns, out);
            }
        }
        self.count(&stats);
        Ok(stats)
    }

    /// Fills the scratch's rows: from the tiers, then from pages, then the tiers from those.
    fn fetch_cached(
        &self,
        reader: &mut Reader,
        asked: Asked<'_>,
        first: usize,
        stats: &mut LookupStats,
    ) -> Result<()> {
        self.tiers().answer(&mut reader.scratch);
        let read = self.fetch(reader, true)?;
        stats.pages_read += read.pages_read;
        stats.pages_failed += read.pages_failed;
        stats.rows_recovered += read.rows_recovered;
        let rows_read_before = stats.rows_read;
        for state in &reader.scratch.filled {
            stats.row_count += 1;
            match state {
                Filled::Cached => stats.rows_cached += 1,
                Filled::Resident => stats.rows_resident += 1,
                Filled::Surrogate => stats.rows_surrogate += 1,
                Filled::Default => stats.rows_default += 1,
                Filled::Read => stats.rows_read += 1,
                Filled::Initial | Filled::No => stats.rows_initial += 1,
            }
        }
        let rows_read = stats.rows_read - rows_read_before;
        if self.tiers().knows_groups() {
            return self.settle_samples(&mut reader.scratch, asked, first);
        }
        if rows_read == 0 && !self.tiers().wants_hits() {
            return Ok(());
        }
        let scratch = &mut reader.scratch;
        let every: Vec<u32> = (0..scratch.keys.len() as u32).collect();
        let row_count = every.len() as u32;
        let hit_count = row_count - rows_read as u32;
        let group = Group { positions: &every, row_count, hit_count };
        if rows_read > 0 {
            self.tiers().settle(&group, scratch)?;
        }
        self.tiers().note(&group, scratch);
        Ok(())
    }

    /// Tells the tiers which rows each sample asked for. A row that an earlier sample of the
    /// chunk had read came along for free.
    fn settle_samples(&self, scratch: &mut Scratch, asked: Asked<'_>, first: usize) -> Result<()> {
        let Asked { plan, bags } = asked;
        let end = first + scratch.ats.len();
        let mut positions = Vec::new();
        for sample in 0..bags.batch_size() {
            positions.clear();
            let (mark, mut hit_count) = (sample as u32 + 1, 0);
            for feature in 0..plan.features().len() {
                let offsets = bags.feature_offsets(feature);
                let bound = |at: usize| offsets.get(at).map_or(0, |&offset| offset as usize);
                let (from, to) = (bound(sample).max(first), bound(sample + 1).min(end));
                for at in from..to {
                    let Some(&row) = scratch.ats.get(at - first) else { continue };
                    let Some(by) = scratch.asked_by.get_mut(row as usize) else { continue };
                    if *by == mark {
                        continue;
                    }
                    let is_read = scratch.filled.get(row as usize) == Some(&Filled::Read);
                    hit_count += u32::from(*by != 0 || !is_read);
                    *by = mark;
                    positions.push(row);
                }
            }
            let row_count = positions.len() as u32;
            let group = Group { positions: &positions, row_count, hit_count };
            self.tiers().settle(&group, scratch)?;
            self.tiers().note(&group, scratch);
        }
        Ok(())
    }

    /// Fills the rows of the scratch that are not filled yet; returns the pages read. Misses may
    /// be answered approximately, where the options say so.
    pub(crate) fn fetch(&self, reader: &mut Reader, may_approximate: bool) -> Result<PagesRead> {
        let scratch = &mut reader.scratch;
        for at in 0..scratch.keys.len() {
            let (Some(&key), Some(Filled::No)) = (scratch.keys.get(at), scratch.filled.get(at))
            else {
                continue;
            };
            let place = self.place_of(key)?;
            if may_approximate && place != Place::Nowhere {
                let start = scratch.row_starts.get(at).copied().unwrap_or(0);
                let Scratch { words, visits, .. } = &mut *scratch;
                let out = words.get_mut(start..start + self.dim(key)).unwrap_or_default();
                let stand_in = match self.tiers().answer_miss(key, visits, out) {
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
            match place {
                Place::Page(page_id) => {
                    let parts = self.shape(key).map_or(1, |shape| shape.parts_per_row as u32);
                    scratch.wanted.extend((0..parts).map(|part| Wanted {
                        page_id: page_id + u64::from(part),
                        at: at as u32,
                        part,
                    }));
                }
                Place::Item { placement, item } => {
                    scratch.asked.push(AskedItem { placement, item, at: at as u32 });
                }
                Place::Nowhere => {
                    let table = self.schema().table(key.table)?;
                    let out = scratch.row_mut(at, 0, table.dim as usize);
                    fill_initial(&table.init, table.seed, key.row.0, out);
                    scratch.mark(at, Filled::Initial);
                }
            }
        }
        reader.read(&self.source())
    }

    /// Adds the rows of the chunk that starts at index `first` to their vectors.
    fn pool_chunk(&self, reader: &Reader, asked: Asked<'_>, first: usize, out: &mut [f32]) {
        let Asked { plan, bags } = asked;
        let scratch = &reader.scratch;
        let end = first + scratch.starts.len();
        for (at, feature) in plan.features().iter().enumerate() {
            let range = plan.range(bags, at);
            let (from, to) = (range.start.max(first), range.end.min(end));
            if from >= to {
                continue;
            }
            let starts = scratch.starts.get(from - first..to - first).unwrap_or_default();
            if feature.pooling == Pooling::None {
                let dim = feature.columns.dim;
                let out = out.get_mut(from * dim..to * dim).unwrap_or_default();
                self.kernels().gather_rows(&scratch.words, starts, dim, out);
                continue;
            }
            let weights = bags.weights.and_then(|weights| weights.get(from..to));
            let rows = Rows { arena: &scratch.words, starts, weights };
            let bags = BagRange { offsets: bags.feature_offsets(at), first_index: from };
            self.kernels().pool_add(rows, bags, feature.columns, out);
        }
    }
}

/// Puts as many indices from `first` on into the scratch as fit; returns the next one.
fn gather(reader: &mut Reader, asked: Asked<'_>, first: usize) -> usize {
    let Asked { plan, bags } = asked;
    reader.scratch.start(bags.indices.len() - first);
    let mut next = first;
    for (at, feature) in plan.features().iter().enumerate() {
        let range = plan.range(bags, at);
        for &id in bags.indices.get(next.max(range.start)..range.end).unwrap_or_default() {
            if !reader.scratch.add(feature.row_key(id), feature.columns.dim) {
                return next;
            }
            next += 1;
        }
    }
    next
}
