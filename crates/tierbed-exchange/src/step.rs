//! One batch in flight: what each rank requests, and what is looked up here for it.
//!
//! A batch may be divided into parts, ranges of each rank's samples that complete one after the
//! other: a consumer starts with the first while rows of the last are still read.

#![expect(
    clippy::indexing_slicing,
    reason = "ranks, parts and groups are those that the step was gathered for"
)]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::{Bags, Result};

use crate::asked::{Asked, Sections};
use crate::bags::{GroupBags, RankBags};
use crate::batch::{feature_range, Source};
use crate::nodes::Nodes;
use crate::plan::{ExchangePlan, Group, GroupKind};
use crate::row_lookup::{Asking, RowLookup};

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
    pub(crate) wants: Wants,
    pub(crate) part_count: usize,
}

/// What is looked up for a group.
#[derive(Debug)]
pub(crate) enum GroupLookup {
    /// The bags of its update.
    OfUpdate,
    /// Other bags: those of a part, or of this rank alone.
    Own(GroupBags),
    /// Single rows.
    Rows(RowLookup),
}

/// What is looked up for one part of a batch.
#[derive(Debug)]
pub(crate) struct PartLookup {
    pub(crate) groups: Vec<GroupLookup>,
    /// The answer to each of the other nodes, in their order.
    pub(crate) answers: Vec<Sections>,
}

/// One batch in flight.
#[derive(Debug)]
pub struct Step {
    pub(crate) number: u64,
    /// Number of its exchange, which says where its vectors are.
    pub(crate) output_epoch: u64,
    pub(crate) wants: Wants,
    /// Announced batches that are done when this one is looked up.
    pub(crate) passed: usize,
    /// Parts that complete on their own.
    pub(crate) part_count: usize,
    /// First sample of each rank, then the number of samples.
    first_samples: Vec<usize>,
    /// Which ranks want gradients of weights.
    pub(crate) wanting: Vec<bool>,
    /// Bags of all samples per group, for the update.
    pub(crate) groups: Vec<GroupBags>,
    pub(crate) lookups: Vec<PartLookup>,
    /// What this node asked of the others on this rank's rail, in their order.
    pub(crate) asked: Vec<Asked>,
    /// Per group, other node and member: bags of that node with rows here, by sample across ranks.
    pub(crate) away_bags: Vec<Vec<Vec<Vec<u32>>>>,
    /// This rank's batch, where more than its published bags is needed.
    pub(crate) own: Option<Arc<OwnBags>>,
}

/// All rows of a step that a rank holds: one bag per feature of each of its groups.
#[derive(Debug, Clone)]
pub struct StepRows {
    /// Row ids, `[E]`.
    pub indices: Vec<i64>,
    /// Bounds of the features, `[F + 1]`.
    pub offsets: Vec<i64>,
}

/// What a step is gathered from.
pub(crate) struct Gathering<'a> {
    pub(crate) asking: Asking<'a>,
    pub(crate) asked: Vec<Asked>,
    pub(crate) own: Option<OwnBags>,
}

impl Step {
    /// Gathers what concerns a rank of the bags of all.
    pub(crate) fn gather(from: Gathering<'_>, of: StepOf) -> Self {
        let StepOf { rank, wants, part_count } = of;
        let Asking { plan, nodes, ranks, .. } = from.asking;
        assert_eq!(ranks.len(), plan.rank_count(), "every rank told its bags");
        let mut first_samples = vec![0];
        let mut samples = 0;
        for of_rank in ranks {
            samples += of_rank.sample_count();
            first_samples.push(samples);
        }
        let wanting: Vec<bool> = ranks.iter().map(RankBags::wants_weight_grads).collect();
        let keeps_origins = wanting.contains(&true);
        // A lookup of the whole batch has the bags of the update, but for mirrors: there a rank
        // looks up its own samples, and needs those of others only to update.
        let is_whole = |group: &Group| part_count == 1 && group.kind == GroupKind::Sums;
        let of_update = |(at, group): (usize, &Group)| match wants.backward || is_whole(group) {
            true => GroupBags::gather(at, group, ranks, Part::WHOLE, keeps_origins),
            false => GroupBags::default(),
        };
        let groups = plan.groups(rank);
        let of_part = |number: usize| {
            let part = Part { number, count: part_count };
            let mut answers = vec![Sections::default(); nodes.count() - 1];
            let mut of_group = |(at, group): (usize, &Group)| match group.kind {
                GroupKind::Rows => {
                    let lookup = RowLookup::list(at, group, from.asking, part, &mut answers);
                    GroupLookup::Rows(lookup)
                }
                GroupKind::Mirrors => {
                    answers.iter_mut().for_each(|answer| answer.push(0));
                    let own = &ranks[rank..=rank];
                    GroupLookup::Own(GroupBags::gather(at, group, own, part, false))
                }
                GroupKind::Sums => {
                    for (answer, node) in answers.iter_mut().zip(nodes.others()) {
                        let of_node = &ranks[nodes.ranks_of(node)];
                        let counts = of_node.iter().map(RankBags::sample_count);
                        let samples: usize = counts.map(|count| part.samples(count).len()).sum();
                        answer.push(samples * plan.output_precision().vector_bytes(group.width));
                    }
                    match is_whole(group) {
                        true => GroupLookup::OfUpdate,
                        false => GroupLookup::Own(GroupBags::gather(at, group, ranks, part, false)),
                    }
                }
            };
            let groups = groups.iter().enumerate().map(&mut of_group).collect();
            PartLookup { groups, answers }
        };
        Self {
            number: 0,
            output_epoch: 0,
            wants,
            passed: 0,
            part_count,
            lookups: (0..part_count).map(of_part).collect(),
            groups: groups.iter().enumerate().map(of_update).collect(),
            away_bags: away_bags(groups, from.asking, &first_samples),
            first_samples,
            wanting,
            asked: from.asked,
            own: from.own.map(Arc::new),
        }
    }

    /// Lists all rows of the step that `rank`, whose step this is, holds by `plan`.
    pub(crate) fn rows(&self, plan: &ExchangePlan, rank: usize) -> StepRows {
        let mut rows = StepRows { indices: Vec::new(), offsets: vec![0] };
        for (bags, group) in self.groups.iter().zip(plan.groups(rank)) {
            let samples = bags.sample_count();
            for at in 0..group.members.len() {
                let range = feature_range(bags.offsets_of(at, samples));
                rows.indices.extend_from_slice(&bags.indices[range]);
                rows.offsets.push(rows.indices.len() as i64);
            }
        }
        rows
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

    /// Returns the samples of `node`, as numbered across ranks.
    pub(crate) fn samples_of_node(&self, nodes: Nodes, node: usize) -> Range<usize> {
        let ranks = nodes.ranks_of(node);
        self.first_samples[ranks.start]..self.first_samples[ranks.end]
    }

    /// Returns the bags that are looked up for `group` in `part`.
    pub(crate) fn lookup(&self, part: usize, group: usize) -> Bags<'_> {
        match &self.lookups[part].groups[group] {
            GroupLookup::OfUpdate => self.groups[group].bags(),
            GroupLookup::Own(bags) => bags.bags(),
            GroupLookup::Rows(rows) => rows.bags(),
        }
    }
}

// Lists, group by group, the bags of other nodes that have rows here.
fn away_bags(
    groups: &[Group],
    from: Asking<'_>,
    first_samples: &[usize],
) -> Vec<Vec<Vec<Vec<u32>>>> {
    let of_member = |at: usize, number: usize, group: &Group, node: usize| {
        let mut found = Vec::new();
        for rank in from.nodes.ranks_of(node) {
            let bags = from.ranks[rank].member(at, number, &group.members[number]);
            let filled = bags.bounds().enumerate().filter(|(_, bounds)| !bounds.is_empty());
            found.extend(filled.map(|(bag, _)| (first_samples[rank] + bag) as u32));
        }
        found
    };
    let of_group = |(at, group): (usize, &Group)| {
        if group.kind != GroupKind::Rows {
            return Vec::new();
        }
        let of_node = |node| {
            (0..group.members.len()).map(|number| of_member(at, number, group, node)).collect()
        };
        from.nodes.others().map(of_node).collect()
    };
    groups.iter().enumerate().map(of_group).collect()
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

    /// Returns whether these are the bags of `batch`.
    pub(crate) fn is_of(&self, batch: &Bags<'_>) -> bool {
        let has_its_weights = match (self.weights.as_deref(), batch.weights) {
            (Some(own), Some(given)) => {
                own.iter().map(|one| one.to_bits()).eq(given.iter().map(|one| one.to_bits()))
            }
            (own, given) => own.is_none() && given.is_none(),
        };
        self.feature_count == batch.feature_count
            && self.offsets == batch.offsets
            && self.indices == batch.indices
            && has_its_weights
    }

    /// Returns the batch of `rank` as if it were published.
    pub(crate) fn source(&self, rank: usize) -> Result<Source<'_>> {
        Ok(Source { rank, bags: self.bags()?, wants_weight_grads: true, part_count: 1 })
    }

    fn bags(&self) -> Result<Bags<'_>> {
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
