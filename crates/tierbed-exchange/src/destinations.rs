//! Destinations of pooled vectors in the outputs of the requesting ranks.

#![expect(
    clippy::indexing_slicing,
    reason = "features are those of the group; positions are those of its bags"
)]

use std::ops::Range;

use bytemuck::Pod;
use tierbed_core::{Error, Result};
use tierbed_kernels::Destination;

use crate::batch::{feature_range, Source};
use crate::exchange::Place;
use crate::memory::{Region, Writer};
use crate::plan::{ExchangePlan, Group};
use crate::precision::Precision;
use crate::row_lookup::{RowLookup, RowPlace};

/// From this size on, what a rank writes is taken to leave the caches before it is read: writing
/// past them then saves reading every line first.
const FAR_BYTES: usize = 4 << 20;

/// Where the vectors of a lookup lie.
pub(crate) trait Places {
    /// Returns the numbers of a vector of `feature`.
    fn dim(&self, feature: usize) -> usize;

    /// Whether there is more memory to write than caches hold.
    fn is_far(&self) -> bool {
        false
    }

    /// Returns the `count` values at the place of vector `at` of `feature`.
    fn values<T: Pod>(&mut self, feature: usize, at: usize, count: usize) -> &mut [T];
}

/// Puts vectors to their places, as they are or in fewer bytes.
pub(crate) struct Sender<P> {
    places: P,
    precision: Precision,
    /// The vector that is computed before it is narrowed.
    words: Vec<f32>,
    failure: Option<Error>,
}

impl<P> Sender<P> {
    fn new(places: P, precision: Precision) -> Self {
        Self { places, precision, words: Vec::new(), failure: None }
    }

    /// Returns the error of the first vector that could not be narrowed.
    pub(crate) fn into_result(self) -> Result<()> {
        self.failure.map_or(Ok(()), Err)
    }
}

impl<P: Places> Destination for Sender<P> {
    #[inline]
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let dim = self.places.dim(feature);
        if self.precision == Precision::F32 {
            return self.places.values(feature, at, dim);
        }
        self.words.resize(dim, 0.0);
        &mut self.words
    }

    fn is_far(&self) -> bool {
        self.precision == Precision::F32 && self.places.is_far()
    }

    #[inline]
    fn finish(&mut self, feature: usize, at: usize) {
        if self.precision == Precision::F32 {
            return;
        }
        let bytes = self.precision.vector_bytes(self.words.len());
        let to = self.places.values(feature, at, bytes);
        if let Err(error) = self.precision.write(&self.words, to) {
            self.failure.get_or_insert(error);
        }
    }
}

/// Places of pooled vectors: row and columns of the output of the sample's rank, or of the answer
/// to its node.
pub(crate) struct Outputs<'h> {
    ranks: Vec<RankOutput<'h>>,
    /// First column and number of columns of each member, in outputs.
    columns: Vec<(usize, usize)>,
    /// First column of each member in answers, which have the columns of the group.
    packed: Vec<usize>,
    precision: Precision,
    /// Rank of the last vector: samples come in order, so it mostly has the next one too.
    cursor: usize,
}

/// Where the vectors of some samples of one rank lie.
pub(crate) struct RankOutput<'h> {
    pub(crate) writer: Writer<'h>,
    pub(crate) samples: Range<usize>,
    /// Byte of the row of its first sample.
    pub(crate) first_byte: usize,
    pub(crate) row_bytes: usize,
    /// Whether a row has the columns of the group alone.
    pub(crate) is_packed: bool,
}

impl<'h> Outputs<'h> {
    /// Sends `columns` of samples of each rank to the output of `step`, ranks of this node only;
    /// the samples of all these ranks are numbered one after the other.
    pub(crate) fn sender(
        place: &'h Place,
        samples: impl Iterator<Item = (usize, Range<usize>)>,
        columns: Vec<(usize, usize)>,
        step: u64,
    ) -> Sender<Self> {
        let mut end = 0;
        let ranks = samples.map(|(rank, samples)| {
            let first_sample = end;
            end += samples.len();
            RankOutput::here(place, rank, samples.start, first_sample..end, step)
        });
        let ranks = ranks.collect();
        Self::over(place.plan.output_precision(), ranks, columns, Vec::new())
    }

    /// Sends the vectors of `group` to `ranks`.
    pub(crate) fn of_group(
        precision: Precision,
        ranks: Vec<RankOutput<'h>>,
        group: &Group,
    ) -> Sender<Self> {
        let packed = group.members.iter().map(|member| member.grad_column).collect();
        Self::over(precision, ranks, columns_of(group), packed)
    }

    fn over(
        precision: Precision,
        ranks: Vec<RankOutput<'h>>,
        columns: Vec<(usize, usize)>,
        packed: Vec<usize>,
    ) -> Sender<Self> {
        Sender::new(Self { ranks, columns, packed, precision, cursor: 0 }, precision)
    }
}

impl<'h> RankOutput<'h> {
    /// Names the rows of `rank`, of this node, from its sample `first` on; in the lookup they are
    /// `samples`.
    pub(crate) fn here(
        place: &'h Place,
        rank: usize,
        first: usize,
        samples: Range<usize>,
        step: u64,
    ) -> Self {
        let row_bytes = place.plan.output_precision().vector_bytes(place.plan.output_dim());
        let first_byte = place.layout.output_at(step) + first * row_bytes;
        let writer = place.region(rank).writer();
        Self { writer, samples, first_byte, row_bytes, is_packed: false }
    }

    /// Names the rows of the samples of `node` in the answer to it, from `first_byte` on.
    pub(crate) fn away(
        answer: Region<'h>,
        first_byte: usize,
        row_bytes: usize,
        samples: Range<usize>,
    ) -> Self {
        Self { writer: answer.writer(), samples, first_byte, row_bytes, is_packed: true }
    }
}

impl Places for Outputs<'_> {
    fn is_far(&self) -> bool {
        let samples = self.ranks.last().map_or(0, |rank| rank.samples.end);
        let dim: usize = self.columns.iter().map(|(_, dim)| dim).sum();
        samples * dim * size_of::<f32>() >= FAR_BYTES
    }

    #[inline]
    fn dim(&self, feature: usize) -> usize {
        self.columns[feature].1
    }

    #[inline]
    fn values<T: Pod>(&mut self, feature: usize, at: usize, count: usize) -> &mut [T] {
        let is_here = |rank: &RankOutput<'_>| rank.samples.contains(&at);
        if !self.ranks.get(self.cursor).is_some_and(is_here) {
            self.cursor = self.ranks.partition_point(|rank| rank.samples.end <= at);
        }
        let rank = &mut self.ranks[self.cursor];
        let column = if rank.is_packed { self.packed[feature] } else { self.columns[feature].0 };
        let first = self.precision.vector_bytes(column);
        let byte = rank.first_byte + (at - rank.samples.start) * rank.row_bytes + first;
        rank.writer.values(byte, count)
    }
}

/// Returns the columns of the members of `group` in the output.
pub(crate) fn columns_of(group: &Group) -> Vec<(usize, usize)> {
    group.members.iter().map(|member| (member.output_column, member.dim)).collect()
}

/// Places of single rows: one per index of a row-wise feature, in the sample's rank or in the
/// answer to another node.
pub(crate) struct RowPlaces<'h, 'l> {
    /// Those of this node's ranks, then the answers.
    writers: Vec<Writer<'h>>,
    lookup: &'l RowLookup,
    /// Dim of each member.
    dims: Vec<usize>,
    /// Ranks of this node, and where the rows that they receive begin.
    ranks_each: usize,
    rows_at: usize,
}

impl<'h, 'l> RowPlaces<'h, 'l> {
    /// Sends the rows of `lookup` to where those of `step` arrive, or into `answers`.
    pub(crate) fn sender(
        place: &'h Place,
        group: &Group,
        lookup: &'l RowLookup,
        answers: &[Region<'h>],
        step: u64,
    ) -> Sender<Self> {
        let ranks_each = place.nodes.ranks_each();
        let here = (0..ranks_each).map(|local| place.pad.heap().region(local));
        let places = Self {
            writers: here.chain(answers.iter().copied()).map(Region::writer).collect(),
            lookup,
            dims: group.members.iter().map(|member| member.dim).collect(),
            ranks_each,
            rows_at: place.layout.rows_at(step),
        };
        Sender::new(places, place.plan.row_precision())
    }
}

impl Places for RowPlaces<'_, '_> {
    #[inline]
    fn dim(&self, feature: usize) -> usize {
        self.dims[feature]
    }

    #[inline]
    fn values<T: Pod>(&mut self, feature: usize, at: usize, count: usize) -> &mut [T] {
        let RowPlace { target, byte } = self.lookup.places[self.lookup.first_of(feature) + at];
        let target = target as usize;
        let first = if target < self.ranks_each { self.rows_at } else { 0 };
        self.writers[target].values(first + byte, count)
    }
}

/// Where the rows of one feature begin among those that a rank receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBase {
    pub(crate) feature: usize,
    /// Byte of its first index's row.
    pub(crate) byte: usize,
    /// Position of its first index in the rank's batch.
    pub(crate) first_index: usize,
}

/// Returns the bases of all row-wise features of one rank's batch.
pub(crate) fn row_bases(plan: &ExchangePlan, source: &Source<'_>) -> Vec<RowBase> {
    let mut byte = 0;
    let base = |feature| {
        let range = feature_range(source.bags.feature_offsets(feature));
        let base = RowBase { feature, byte, first_index: range.start };
        byte += range.len() * plan.row_precision().vector_bytes(plan.table_of(feature).dim);
        base
    };
    plan.row_features().map(base).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::heap::{LocalHeap, SymmetricHeap};
    use crate::layout::{Layout, Limits};
    use crate::nodes::Nodes;
    use crate::pad::Pad;
    use crate::plan::{ShardedTable, Sharding};
    use tierbed_core::env::SystemClock;
    use tierbed_kernels::{Kernels, Pooling};

    /// Writes 5 samples by these counts per rank over NaN; returns both outputs, 3 and 2 samples.
    fn written(counts: [usize; 2]) -> Vec<Vec<f32>> {
        let table = ShardedTable { row_count: 9, dim: 2, sharding: Sharding::Whole { rank: 0 } };
        let plan = ExchangePlan::new(2, vec![table], vec![(0, Pooling::Sum)]).unwrap();
        let limits = Limits { samples_max: 5, indices_max: 8 };
        let layout = Layout::new(&plan, limits).unwrap();
        let heap = Arc::new(LocalHeap::new(2, layout.region_bytes()).unwrap());
        let at = layout.output_at(1);
        for rank in 0..2 {
            heap.region(rank).writer().values(at, 10).fill(f32::NAN);
        }
        let clock = Arc::new(SystemClock::default());
        let pad = Pad::new(heap.clone(), 0, clock, Duration::from_secs(1)).unwrap();
        let samples = counts.into_iter().map(|count| 0..count).enumerate();
        let columns = columns_of(&plan.groups(0)[0]);
        let place = Place { plan, layout, pad, nodes: Nodes::one(2), kernels: Kernels::detect() };
        let mut to = Outputs::sender(&place, samples, columns, 1);
        for sample in 0..5 {
            to.vector(0, sample).fill(sample as f32);
            to.finish(0, sample);
        }
        let words = [6, 4];
        (0..2).map(|rank| heap.region(rank).read::<f32>(at, words[rank]).to_vec()).collect()
    }

    #[test]
    fn every_element_of_every_rank_is_written_once() {
        assert_eq!(written([3, 2]), [vec![0.0, 0.0, 1.0, 1.0, 2.0, 2.0], vec![3.0, 3.0, 4.0, 4.0]]);
    }

    /// The mutation that a wrong boundary between ranks is: values go missing, others go astray.
    #[test]
    fn wrong_boundaries_between_ranks_show() {
        let found = written([2, 3]);
        assert!(found[0][4].is_nan());
        assert_eq!(found[1], [2.0, 2.0, 3.0, 3.0]);
    }

    #[test]
    fn ranks_without_samples_are_passed_over() {
        let found = written([0, 5]);
        assert!(found[0].iter().all(|value| value.is_nan()));
        assert_eq!(found[1], [0.0, 0.0, 1.0, 1.0]);
    }
}
