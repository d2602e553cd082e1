//! Division of a batch into parts that overlap, and into chunks that fit a scratch.
//!
//! A batch is cut into *parts* of some samples each, so that the pages of one part fly while the
//! part before is pooled and told to the tiers. Indices of a part are gone through feature by
//! feature; those that fit a scratch are a *chunk*.
//!
//! ```text
//! part 0   ask ─▶ pages fly ─────────▶ settle, pool
//! part 1              ask ─▶ pages fly ───────────▶ settle, pool
//! part 2                                    ask ─▶ pages fly …
//! ```
//!
//! Source: FlashEmbedding §3.4, whose host works on a sub-batch while the device reads another.
#![expect(clippy::indexing_slicing, reason = "samples and indices are those of the checked bags")]

use std::ops::Range;

use tierbed_core::Bags;
use tierbed_kernels::FeatureLayout;

use crate::layers::Layers;
use crate::scratch::Scratch;

/// Fewest indices of a part: below, the fixed cost of one more part exceeds what overlap saves.
const PART_INDICES_MIN: usize = 512;
/// Most parts of a batch: rows that several parts miss may be read by each.
const PARTS_MAX: usize = 8;

/// A batch and what to do with it.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) plan: &'a FeatureLayout,
    pub(super) bags: &'a Bags<'a>,
    pub(super) layers: &'a Layers,
}

/// Indices of some samples that are handled together.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    /// The samples of the part.
    pub(super) samples: Range<usize>,
    /// Of the part's indices, feature by feature, those that are here.
    pub(super) taken: Range<usize>,
}

/// Indices of one feature in a chunk.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub(super) feature: usize,
    /// Among all indices of the batch.
    pub(super) indices: Range<usize>,
    /// Position of the first in the chunk.
    pub(super) at: usize,
}

impl Asked<'_> {
    /// Cuts the samples into parts of about as many indices each.
    pub(super) fn parts(&self, has_two: bool) -> impl Iterator<Item = Range<usize>> {
        let (index_count, samples) = (self.bags.indices.len(), self.bags.batch_size());
        let part_count = match has_two {
            true => (index_count / PART_INDICES_MIN).clamp(1, PARTS_MAX).min(samples.max(1)),
            false => 1,
        };
        (0..part_count).map(move |at| at * samples / part_count..(at + 1) * samples / part_count)
    }

    /// Returns how many indices some samples have.
    pub(super) fn index_count(&self, samples: &Range<usize>) -> usize {
        (0..self.plan.features().len()).map(|at| self.indices(at, samples).len()).sum()
    }

    /// Returns the indices of feature `at` of some samples, among all.
    pub(super) fn indices(&self, at: usize, samples: &Range<usize>) -> Range<usize> {
        let offsets = self.bags.feature_offsets(at);
        assert!(samples.end < offsets.len(), "samples {samples:?} of {} offsets", offsets.len());
        offsets[samples.start] as usize..offsets[samples.end] as usize
    }

    /// Puts as many indices of a part from its `first` on into the scratch as fit.
    pub(super) fn gather(
        &self,
        scratch: &mut Scratch,
        samples: &Range<usize>,
        first: usize,
    ) -> Chunk {
        let index_count = self.index_count(samples);
        assert!(first <= index_count, "index {first} of a part of {index_count}");
        scratch.start(index_count - first);
        let chunk = |end| Chunk { samples: samples.clone(), taken: first..end };
        let (mut next, mut before) = (first, 0);
        for (at, feature) in self.plan.features().iter().enumerate() {
            let range = self.indices(at, samples);
            // Earlier chunks may have taken the feature, or some of it.
            let from = range.start + (next - before).min(range.len());
            before += range.len();
            for &id in &self.bags.indices[from..range.end] {
                if !scratch.add(feature.row_key(id), feature.columns.dim) {
                    return chunk(next);
                }
                next += 1;
            }
        }
        chunk(next)
    }

    /// Returns the features of a chunk and their indices.
    pub(super) fn spans<'a>(&'a self, chunk: &'a Chunk) -> impl Iterator<Item = Span> + 'a {
        let mut before = 0;
        (0..self.plan.features().len()).filter_map(move |feature| {
            let range = self.indices(feature, &chunk.samples);
            let (first, end) = (before, before + range.len());
            before = end;
            let (from, to) = (first.max(chunk.taken.start), end.min(chunk.taken.end));
            (from < to).then(|| Span {
                feature,
                indices: range.start + from - first..range.start + to - first,
                at: from - chunk.taken.start,
            })
        })
    }
}
