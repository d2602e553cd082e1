//! One batch in flight: what each rank requests, and what is looked up here for it.
//!
//! A batch may be divided into parts, ranges of each rank's samples that complete one after the
//! other: a consumer starts with the first while rows of the last are still read.

#![expect(
    clippy::indexing_slicing,
    reason = "ranks, parts and groups are those that the step was gathered for"
)]

use std::ops::Range;

use tierbed_core::{Bags, Result};

use crate::batch::{GroupBags, Source};
use crate::destinations::{row_bases, RowBase};
use crate::plan::{ExchangePlan, Group, GroupKind};

/// What follows a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wants {
    /// Whether a backward follows.
    pub backward: bool,
    /// Whether it returns gradients of weights.
    pub weight_grads: bool,
}

/// Returns the samples of part `part` of `part_count`, of a rank with `sample_count`.
#[must_use]
pub fn part_samples(sample_count: usize, part: usize, part_count: usize) -> Range<usize> {
    let bound = |part| sample_count * part / part_count.max(1);
    bound(part)..bound(part + 1)
}

/// A part of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) number: usize,
    /// Parts of the batch.
    pub(crate) count: usize,
}

impl Part {
    pub(crate) const WHOLE: Self = Self { number: 0, count: 1 };

    /// Returns its samples, of a rank with `sample_count`.
    pub(crate) fn samples(self, sample_count: usize) -> Range<usize> {
        part_samples(sample_count, self.number, self.count)
    }
}

/// The step that is gathered, and its rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepOf {
    pub(crate) rank: usize,
    pub(crate) number: u64,
    pub(crate) wants: Wants,
    pub(crate) part_count: usize,
}

/// One batch in flight.
#[derive(Debug)]
pub struct Step {
    pub(crate) number: u64,
    /// Number of its exchange, which says where its vectors are.
    pub(crate) output_epoch: u64,
    /// Parts that complete on their own.
    pub(crate) part_count: usize,
    /// First sample of each rank, then the number of samples.
    first_samples: Vec<usize>,
    /// Which ranks want gradients of weights.
    pub(crate) wanting: Vec<bool>,
    /// Bags of all samples per group, for the update.
    pub(crate) groups: Vec<GroupBags>,
    /// Per part and group what is looked up; `None` is what `groups` has.
    lookups: Vec<Vec<Option<GroupBags>>>,
    /// Where rows of row-wise features go, per rank.
    pub(crate) bases: Vec<Vec<RowBase>>,
    /// This rank's batch, where gradients of weights are wanted.
    pub(crate) own: Option<OwnBags>,
}

impl Step {
    /// Gathers what concerns `rank` of the bags of all.
    pub(crate) fn gather(plan: &ExchangePlan, sources: &[Source<'_>], of: StepOf) -> Self {
        let StepOf { rank, number, wants, part_count } = of;
        assert!(rank < sources.len(), "every rank published its bags");
        let mut first_samples = vec![0];
        let mut samples = 0;
        for source in sources {
            samples += source.bags.batch_size();
            first_samples.push(samples);
        }
        let wanting: Vec<bool> = sources.iter().map(|source| source.wants_weight_grads).collect();
        let keeps_origins = wanting.contains(&true);
        // A lookup of the whole batch has the bags of the update, but for mirrors: there a rank
        // looks up its own samples, and needs those of others only to update.
        let is_whole = |group: &Group| part_count == 1 && group.kind != GroupKind::Mirrors;
        let of_update = |group: &Group| match wants.backward || is_whole(group) {
            true => GroupBags::gather(group, sources, Part::WHOLE, keeps_origins),
            false => GroupBags::default(),
        };
        let groups = plan.groups(rank);
        let of_part = |part: usize| {
            let of_group = |group: &Group| {
                let is_own = group.kind == GroupKind::Mirrors;
                let of_ranks = if is_own { &sources[rank..=rank] } else { sources };
                let part = Part { number: part, count: part_count };
                (!is_whole(group)).then(|| GroupBags::gather(group, of_ranks, part, false))
            };
            groups.iter().map(of_group).collect()
        };
        Self {
            number,
            output_epoch: 0,
            part_count,
            first_samples,
            wanting,
            groups: groups.iter().map(of_update).collect(),
            lookups: (0..part_count).map(of_part).collect(),
            bases: sources.iter().map(|source| row_bases(plan, source)).collect(),
            own: None,
        }
    }

    /// Returns the number of samples of all ranks.
    #[must_use]
    pub fn sample_count(&self) -> usize {
        self.first_samples[self.first_samples.len() - 1]
    }

    /// Returns the samples of `rank`, as numbered across ranks.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn samples_of(&self, rank: usize) -> Range<usize> {
        self.first_samples[rank]..self.first_samples[rank + 1]
    }

    /// Returns the samples of `rank` in `part`, as that rank numbers them.
    pub(crate) fn part_of(&self, rank: usize, part: usize) -> Range<usize> {
        part_samples(self.samples_of(rank).len(), part, self.part_count)
    }

    /// Returns what is looked up for `group` in `part`.
    pub(crate) fn lookup(&self, part: usize, group: usize) -> &GroupBags {
        match &self.lookups[part][group] {
            Some(bags) => bags,
            None => &self.groups[group],
        }
    }
}

/// A copy of this rank's batch.
#[derive(Debug)]
pub(crate) struct OwnBags {
    pub(crate) indices: Vec<i64>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    feature_count: usize,
}

impl OwnBags {
    pub(crate) fn new(bags: &Bags<'_>) -> Self {
        Self {
            indices: bags.indices.to_vec(),
            offsets: bags.offsets.to_vec(),
            weights: bags.weights.map(<[f32]>::to_vec),
            feature_count: bags.feature_count,
        }
    }

    pub(crate) fn bags(&self) -> Result<Bags<'_>> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), self.feature_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_samples_in_order() {
        for (samples, parts) in [(7, 3), (2, 4), (0, 2), (5, 1)] {
            let all: Vec<usize> =
                (0..parts).flat_map(|part| part_samples(samples, part, parts)).collect();
            assert_eq!(all, (0..samples).collect::<Vec<_>>());
        }
    }
}
