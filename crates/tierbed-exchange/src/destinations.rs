//! Destinations of pooled vectors in the outputs of the requesting ranks.

#![expect(
    clippy::indexing_slicing,
    reason = "features are those of the group; positions are those of its bags"
)]

use std::ops::Range;

use bytemuck::Pod;
use tierbed_core::{Error, Result};
use tierbed_kernels::Destination;

use crate::batch::{feature_range, GroupBags, Source};
use crate::exchange::Place;
use crate::memory::Writer;
use crate::plan::{ExchangePlan, Group};
use crate::precision::Precision;

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

/// Places of pooled vectors: row and columns of the output of the sample's rank.
pub(crate) struct Outputs<'h> {
    ranks: Vec<RankOutput<'h>>,
    /// First byte in a row of the output and number of columns of each member.
    columns: Vec<(usize, usize)>,
    row_bytes: usize,
    /// Rank of the last vector: samples come in order, so it mostly has the next one too.
    cursor: usize,
}

struct RankOutput<'h> {
    writer: Writer<'h>,
    first_sample: usize,
    end_sample: usize,
    /// Byte of the row of its first sample.
    first_byte: usize,
}

impl<'h> Outputs<'h> {
    /// Sends `columns` of samples of each rank to the output of `step`; the samples of all these
    /// ranks are numbered one after the other.
    pub(crate) fn sender(
        place: &'h Place,
        samples: impl Iterator<Item = (usize, Range<usize>)>,
        columns: Vec<(usize, usize)>,
        step: u64,
    ) -> Sender<Self> {
        let precision = place.plan.output_precision();
        let row_bytes = precision.vector_bytes(place.plan.output_dim());
        let output_at = place.layout.output_at(step);
        let mut end = 0;
        let ranks = samples.map(|(rank, samples)| {
            let first_sample = end;
            end += samples.len();
            let first_byte = output_at + samples.start * row_bytes;
            let writer = place.pad.heap().region(rank).writer();
            RankOutput { writer, first_sample, end_sample: end, first_byte }
        });
        let ranks = ranks.collect();
        let in_bytes = |(first, dim)| (precision.vector_bytes(first), dim);
        let columns = columns.into_iter().map(in_bytes).collect();
        Sender::new(Self { ranks, columns, row_bytes, cursor: 0 }, precision)
    }
}

impl Places for Outputs<'_> {
    fn is_far(&self) -> bool {
        let samples = self.ranks.last().map_or(0, |rank| rank.end_sample);
        let dim: usize = self.columns.iter().map(|(_, dim)| dim).sum();
        samples * dim * size_of::<f32>() >= FAR_BYTES
    }

    #[inline]
    fn dim(&self, feature: usize) -> usize {
        self.columns[feature].1
    }

    #[inline]
    fn values<T: Pod>(&mut self, feature: usize, at: usize, count: usize) -> &mut [T] {
        let is_here = |rank: &RankOutput<'_>| (rank.first_sample..rank.end_sample).contains(&at);
        if !self.ranks.get(self.cursor).is_some_and(is_here) {
            self.cursor = self.ranks.partition_point(|rank| rank.end_sample <= at);
        }
        let (rank, first) = (&mut self.ranks[self.cursor], self.columns[feature].0);
        let byte = rank.first_byte + (at - rank.first_sample) * self.row_bytes + first;
        rank.writer.values(byte, count)
    }
}

/// Returns the columns of the members of `group` in the output.
pub(crate) fn columns_of(group: &Group) -> Vec<(usize, usize)> {
    group.members.iter().map(|member| (member.output_column, member.dim)).collect()
}

/// Places of single rows: one per index of a row-wise feature, in the sample's rank.
pub(crate) struct RowPlaces<'h> {
    writers: Vec<Writer<'h>>,
    /// Rank and byte of each index.
    places: Vec<(u32, usize)>,
    /// First index and dim of each member.
    members: Vec<(usize, usize)>,
}

impl<'h> RowPlaces<'h> {
    /// Sends the rows of `bags` to where those of `step` arrive.
    pub(crate) fn sender(
        place: &'h Place,
        group: &Group,
        bags: &GroupBags,
        bases: &[Vec<RowBase>],
        step: u64,
    ) -> Sender<Self> {
        let precision = place.plan.row_precision();
        let samples = bags.sample_count();
        let (mut places, mut members) = (Vec::with_capacity(bags.indices.len()), Vec::new());
        for (at, member) in group.members.iter().enumerate() {
            let range = feature_range(bags.offsets_of(at, samples));
            members.push((range.start, member.dim));
            let row_bytes = precision.vector_bytes(member.dim);
            for origin in &bags.origins[range] {
                let of_feature = |base: &&RowBase| base.feature == member.feature;
                let Some(base) = bases[origin.rank as usize].iter().find(of_feature) else {
                    panic!("a row-wise feature has a base")
                };
                let at = origin.position as usize - base.first_index;
                let byte = base.byte + at * row_bytes;
                places.push((origin.rank, place.layout.rows_at(step) + byte));
            }
        }
        let heap = place.pad.heap();
        let writers = (0..bases.len()).map(|rank| heap.region(rank).writer()).collect();
        Sender::new(Self { writers, places, members }, precision)
    }
}

impl Places for RowPlaces<'_> {
    #[inline]
    fn dim(&self, feature: usize) -> usize {
        self.members[feature].1
    }

    #[inline]
    fn values<T: Pod>(&mut self, feature: usize, at: usize, count: usize) -> &mut [T] {
        let (rank, byte) = self.places[self.members[feature].0 + at];
        self.writers[rank as usize].values(byte, count)
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
        let place = Place { plan, layout, pad, kernels: Kernels::detect() };
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
