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

/// What one lookup did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LookupStats {
    /// Indices asked for.
    pub index_count: u64,
    /// Rows fetched: unique in each chunk.
    pub row_count: u64,
    /// Of these, found in the row cache.
    pub rows_cached: u64,
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
            self.fetch_cached(reader, &mut stats)?;
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

    /// Fills the scratch's rows: from the cache, then from pages, then the cache from those.
    fn fetch_cached(&self, reader: &mut Reader, stats: &mut LookupStats) -> Result<()> {
        let scratch = &mut reader.scratch;
        let (keys, words) = (&scratch.keys, &mut scratch.words);
        let (starts, filled) = (&scratch.row_starts, &mut scratch.filled);
        self.cache().get_many(keys, &mut scratch.visits, |at, row| {
            let place = starts.get(at).and_then(|&start| words.get_mut(start..start + row.len()));
            if let (Some(place), Some(state)) = (place, filled.get_mut(at)) {
                place.copy_from_slice(row);
                *state = Filled::Cached;
            }
        });
        let read = self.fetch(reader)?;
        stats.pages_read += read.pages_read;
        stats.pages_failed += read.pages_failed;
        stats.rows_recovered += read.rows_recovered;
        let rows_read_before = stats.rows_read;
        for state in &reader.scratch.filled {
            stats.row_count += 1;
            match state {
                Filled::Cached => stats.rows_cached += 1,
                Filled::Read => stats.rows_read += 1,
                Filled::Initial | Filled::No => stats.rows_initial += 1,
            }
        }
        if stats.rows_read == rows_read_before {
            return Ok(());
        }
        let Scratch { keys, words, row_starts, filled, visits, .. } = &mut reader.scratch;
        self.cache().insert_many(keys, visits, |at| {
            let is_read = filled.get(at) == Some(&Filled::Read);
            let key = keys.get(at).filter(|_| is_read)?;
            let start = row_starts.get(at).copied()?;
            words.get(start..start + self.dim(*key))
        })
    }

    /// Fills the rows of the scratch that are not filled yet; returns the pages read.
    pub(crate) fn fetch(&self, reader: &mut Reader) -> Result<PagesRead> {
        let scratch = &mut reader.scratch;
        for at in 0..scratch.keys.len() {
            let (Some(&key), Some(Filled::No)) = (scratch.keys.get(at), scratch.filled.get(at))
            else {
                continue;
            };
            match self.place_of(key)? {
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
