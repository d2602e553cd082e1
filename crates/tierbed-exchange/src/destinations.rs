//! Where does each vector go? Into the output of its sample's rank, or its index's place there.

use tierbed_kernels::Destination;

use crate::batch::{feature_range, GroupBags, Source};
use crate::heap::SymmetricHeap;
use crate::layout::Layout;
use crate::memory::Writer;
use crate::plan::{ExchangePlan, Group};

/// Bytes of an element.
const WORD: usize = 4;

/// Places of pooled vectors: row and columns of the output of the sample's rank.
pub(crate) struct Outputs<'h> {
    ranks: Vec<RankOutput<'h>>,
    /// First column and number of columns of each member.
    columns: Vec<(usize, usize)>,
    stride: usize,
    output_at: usize,
    /// Rank of the last vector: samples come in order, so it mostly has the next one too.
    cursor: usize,
}

struct RankOutput<'h> {
    writer: Writer<'h>,
    first_sample: usize,
    end_sample: usize,
}

impl<'h> Outputs<'h> {
    /// Writes to the ranks of `sources` (sample counts by rank), in the output of `step`.
    pub(crate) fn new(
        (plan, layout): (&ExchangePlan, &Layout),
        heap: &'h dyn SymmetricHeap,
        samples: impl Iterator<Item = (usize, usize)>,
        columns: Vec<(usize, usize)>,
        step: u64,
    ) -> Self {
        let mut end = 0;
        let ranks = samples.map(|(rank, count)| {
            let first_sample = end;
            end += count;
            RankOutput { writer: heap.region(rank).writer(), first_sample, end_sample: end }
        });
        Self {
            ranks: ranks.collect(),
            columns,
            stride: plan.output_dim(),
            output_at: layout.output_at(step),
            cursor: 0,
        }
    }
}

/// Returns the columns of the members of `group` in the output.
pub(crate) fn columns_of(group: &Group) -> Vec<(usize, usize)> {
    group.members.iter().map(|member| (member.output_column, member.dim)).collect()
}

impl Destination for Outputs<'_> {
    #[inline]
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let is_here = |rank: &RankOutput<'_>| (rank.first_sample..rank.end_sample).contains(&at);
        if !self.ranks.get(self.cursor).is_some_and(is_here) {
            self.cursor = self.ranks.partition_point(|rank| rank.end_sample <= at);
        }
        let (Some(rank), Some(&(first, dim))) =
            (self.ranks.get_mut(self.cursor), self.columns.get(feature))
        else {
            panic!("no sample {at} or no feature {feature}");
        };
        let word = (at - rank.first_sample) * self.stride + first;
        rank.writer.values(self.output_at + word * WORD, dim)
    }
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
    pub(crate) fn new(
        (plan, layout): (&ExchangePlan, &Layout),
        heap: &'h dyn SymmetricHeap,
        (group, bags): (&Group, &GroupBags),
        sources: &[Source<'_>],
        step: u64,
    ) -> Self {
        let samples = bags.sample_count();
        let bases: Vec<Vec<RowBase>> =
            sources.iter().map(|source| row_bases(plan, source)).collect();
        let (mut places, mut members) = (Vec::with_capacity(bags.indices.len()), Vec::new());
        for (at, member) in group.members.iter().enumerate() {
            let range = feature_range(bags.offsets_of(at, samples));
            members.push((range.start, member.dim));
            for origin in bags.origins.get(range).unwrap_or(&[]) {
                let base = bases
                    .get(origin.rank as usize)
                    .and_then(|bases| bases.iter().find(|base| base.feature == member.feature));
                let Some(base) = base else { panic!("a row-wise feature has a base") };
                let word = base.word + (origin.position as usize - base.first_index) * member.dim;
                places.push((origin.rank, layout.rows_at(step) + word * WORD));
            }
        }
        let writers = sources.iter().map(|source| heap.region(source.rank).writer()).collect();
        Self { writers, places, members }
    }
}

impl Destination for RowPlaces<'_> {
    #[inline]
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let place = self.members.get(feature).and_then(|&(first, dim)| {
            let &(rank, byte) = self.places.get(first + at)?;
            Some((self.writers.get_mut(rank as usize)?, byte, dim))
        });
        let Some((writer, byte, dim)) = place else { panic!("no index {at}") };
        writer.values(byte, dim)
    }
}

/// Where the rows of one feature begin among those that a rank receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBase {
    pub(crate) feature: usize,
    /// Word of its first index's row.
    pub(crate) word: usize,
    /// Position of its first index in the rank's batch.
    pub(crate) first_index: usize,
}

/// Returns the bases of all row-wise features of one rank's batch.
pub(crate) fn row_bases(plan: &ExchangePlan, source: &Source<'_>) -> Vec<RowBase> {
    let mut word = 0;
    let base = |feature| {
        let range = feature_range(source.bags.feature_offsets(feature));
        let base = RowBase { feature, word, first_index: range.start };
        word += range.len() * plan.table_of(feature).dim;
        base
    };
    plan.row_features().map(base).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::LocalHeap;
    use crate::layout::Limits;
    use crate::plan::{ShardedTable, Sharding};
    use tierbed_kernels::Pooling;

    /// Writes 5 samples by these counts per rank over NaN; returns both outputs, 3 and 2 samples.
    fn written(counts: [usize; 2]) -> Vec<Vec<f32>> {
        let table = ShardedTable { row_count: 9, dim: 2, sharding: Sharding::Whole { rank: 0 } };
        let plan = ExchangePlan::new(2, vec![table], vec![(0, Pooling::Sum)]).unwrap();
        let limits = Limits { samples_max: 5, indices_max: 8 };
        let layout = Layout::new(&plan, limits).unwrap();
        let heap = LocalHeap::new(2, layout.region_bytes()).unwrap();
        let at = layout.output_at(1);
        for rank in 0..2 {
            heap.region(rank).writer().values(at, 10).fill(f32::NAN);
        }
        let samples = counts.into_iter().enumerate();
        let columns = columns_of(&plan.groups(0)[0]);
        let mut to = Outputs::new((&plan, &layout), &heap, samples, columns, 1);
        for sample in 0..5 {
            to.vector(0, sample).fill(sample as f32);
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
