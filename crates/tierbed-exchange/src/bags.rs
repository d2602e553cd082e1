//! The ids that all ranks request of this rank, gathered group by group.
//!
//! Those of this node come from its memory, those of others from their messages. Samples are
//! numbered across ranks: those of rank 0 first.

#![expect(clippy::indexing_slicing, reason = "offsets and indices are those of checked bags")]

use std::ops::Range;

use tierbed_core::Bags;
use tierbed_kernels::Pooling;

use crate::away::AwayRank;
use crate::batch::{feature_range, Source};
use crate::plan::{Group, GroupKind, Member};
use crate::row_set::RowSet;
use crate::step::Part;

/// The bags of one member of a group, of one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemberBags<'a> {
    /// Bounds, `[B + 1]`.
    pub(crate) offsets: &'a [i64],
    /// What the bounds are positions in.
    pub(crate) indices: &'a [i64],
    pub(crate) weights: Option<&'a [f32]>,
    /// Indices of each whole bag, `[B]`, where only those are here that a rank holds.
    pub(crate) counts: Option<&'a [u32]>,
}

impl<'a> MemberBags<'a> {
    /// Returns the bags of some samples.
    pub(crate) fn of_samples(self, samples: Range<usize>) -> Self {
        let offsets = &self.offsets[samples.start..=samples.end];
        Self { offsets, counts: self.counts.map(|counts| &counts[samples]), ..self }
    }

    /// Returns the positions of each bag's indices.
    pub(crate) fn bounds(self) -> impl Iterator<Item = Range<usize>> + 'a {
        self.offsets.windows(2).map(|bounds| bounds[0] as usize..bounds[1] as usize)
    }

    /// Returns the positions of all indices.
    pub(crate) fn range(self) -> Range<usize> {
        feature_range(self.offsets)
    }

    /// Returns the indices of the whole bag `bag`.
    pub(crate) fn count_of(self, bag: usize) -> u32 {
        match self.counts {
            Some(counts) => counts[bag],
            None => (self.offsets[bag + 1] - self.offsets[bag]) as u32,
        }
    }

    /// Copies the indices that name `rows`.
    pub(crate) fn only(self, rows: RowSet) -> HeldBags {
        let mut held = HeldBags {
            offsets: vec![0],
            indices: Vec::new(),
            weights: self.weights.map(|_| Vec::new()),
            counts: (0..self.offsets.len() - 1).map(|bag| self.count_of(bag)).collect(),
        };
        for bag in self.bounds() {
            for position in bag.filter(|&at| rows.contains(self.indices[at])) {
                held.indices.push(self.indices[position]);
                if let (Some(to), Some(weights)) = (&mut held.weights, self.weights) {
                    to.push(weights[position]);
                }
            }
            held.offsets.push(held.indices.len() as i64);
        }
        held
    }
}

/// The indices of a member that a rank holds.
#[derive(Debug)]
pub(crate) struct HeldBags {
    offsets: Vec<i64>,
    indices: Vec<i64>,
    weights: Option<Vec<f32>>,
    counts: Vec<u32>,
}

impl HeldBags {
    /// Returns the bags.
    pub(crate) fn bags(&self) -> MemberBags<'_> {
        MemberBags {
            offsets: &self.offsets,
            indices: &self.indices,
            weights: self.weights.as_deref(),
            counts: Some(&self.counts),
        }
    }
}

/// What one rank requests: of this node, or of another.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RankBags<'a> {
    /// All its bags, in memory that is shared.
    Here(Source<'a>),
    /// What it wants of this rank.
    Away(&'a AwayRank),
}

impl<'a> RankBags<'a> {
    pub(crate) fn rank(&self) -> usize {
        match self {
            Self::Here(source) => source.rank,
            Self::Away(away) => away.rank,
        }
    }

    pub(crate) fn sample_count(&self) -> usize {
        match self {
            Self::Here(source) => source.bags.batch_size(),
            Self::Away(away) => away.sample_count,
        }
    }

    pub(crate) fn has_weights(&self) -> bool {
        match self {
            Self::Here(source) => source.bags.weights.is_some(),
            Self::Away(away) => away.has_weights,
        }
    }

    pub(crate) fn wants_weight_grads(&self) -> bool {
        match self {
            Self::Here(source) => source.wants_weight_grads,
            Self::Away(away) => away.wants_weight_grads,
        }
    }

    /// Returns the bags of `member`, number `at` of the own group `group`.
    pub(crate) fn member(&self, group: usize, at: usize, member: &Member) -> MemberBags<'a> {
        match self {
            Self::Here(source) => source.member(member.feature),
            Self::Away(away) => away.of(group, at),
        }
    }
}

/// The bags of one group, of all ranks or of this one, gathered feature by feature.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupBags {
    /// Row ids, `[E]`.
    pub(crate) indices: Vec<i64>,
    /// Bag bounds, `[members * B + 1]`.
    pub(crate) offsets: Vec<i64>,
    /// Weights, `[E]`, where the batch has them and the group pools.
    pub(crate) weights: Option<Vec<f32>>,
    /// Where each index came from; kept where something goes back per index.
    pub(crate) origins: Vec<Origin>,
    member_count: usize,
}

/// An index, as its sample's rank numbers it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Origin {
    pub(crate) rank: u32,
    /// Position in that rank's batch, or in what it wants of this rank if it is on another node.
    pub(crate) position: u32,
    /// Sample across ranks.
    pub(crate) sample: u32,
    /// Indices of the whole bag.
    pub(crate) count: u32,
    /// Weight of the index, if it has one.
    pub(crate) weight: Option<f32>,
}

/// The bags of some samples of one rank.
struct RankPart<'a> {
    rank: usize,
    bags: MemberBags<'a>,
    /// Number of the first sample, across ranks.
    first_sample: usize,
}

impl GroupBags {
    /// Gathers what group number `at` needs from a part of the samples of each of `ranks`;
    /// `keeps_origins` for weights' gradients.
    pub(crate) fn gather(
        at: usize,
        group: &Group,
        ranks: &[RankBags<'_>],
        part: Part,
        keeps_origins: bool,
    ) -> Self {
        let is_rows = group.kind == GroupKind::Rows;
        let has_weights = !is_rows && ranks.iter().any(RankBags::has_weights);
        let mut gathered = Self {
            weights: has_weights.then(Vec::new),
            member_count: group.members.len(),
            ..Self::default()
        };
        gathered.offsets.push(0);
        for (number, member) in group.members.iter().enumerate() {
            let mut first_sample = 0;
            for of_rank in ranks {
                let samples = part.samples(of_rank.sample_count());
                let bags = of_rank.member(at, number, member).of_samples(samples.clone());
                if is_rows || keeps_origins {
                    let first_sample = first_sample + samples.start;
                    let part = RankPart { rank: of_rank.rank(), bags, first_sample };
                    gathered.add_one_by_one(&part, is_rows.then_some(member.rows));
                } else {
                    gathered.add_at_once(bags);
                }
                first_sample += of_rank.sample_count();
            }
        }
        gathered
    }

    /// Returns them as bags; they are as right as those they were gathered from.
    pub(crate) fn bags(&self) -> Bags<'_> {
        Bags {
            indices: &self.indices,
            offsets: &self.offsets,
            weights: self.weights.as_deref(),
            feature_count: self.member_count,
        }
    }

    /// Returns the number of samples `B`.
    pub(crate) fn sample_count(&self) -> usize {
        (self.offsets.len() - 1) / self.member_count.max(1)
    }

    /// Returns the `B + 1` offsets of member `at`, where `B` is `samples`.
    pub(crate) fn offsets_of(&self, at: usize, samples: usize) -> &[i64] {
        &self.offsets[at * samples..(at + 1) * samples + 1]
    }

    fn add_at_once(&mut self, bags: MemberBags<'_>) {
        let range = bags.range();
        let shift = self.indices.len() as i64 - range.start as i64;
        self.offsets.extend(bags.offsets.iter().skip(1).map(|&offset| offset + shift));
        self.indices.extend_from_slice(&bags.indices[range.clone()]);
        if let Some(weights) = &mut self.weights {
            match bags.weights {
                Some(given) => weights.extend_from_slice(&given[range]),
                None => weights.resize(weights.len() + range.len(), 1.0),
            }
        }
    }

    // Only rows of `held`, when given.
    fn add_one_by_one(&mut self, part: &RankPart<'_>, held: Option<RowSet>) {
        let bags = part.bags;
        for (bag, bounds) in bags.bounds().enumerate() {
            for position in bounds {
                let id = bags.indices[position];
                if held.is_some_and(|held| !held.contains(id)) {
                    continue;
                }
                let given = bags.weights.map(|weights| weights[position]);
                self.indices.push(id);
                if let Some(weights) = &mut self.weights {
                    weights.push(given.unwrap_or(1.0));
                }
                self.origins.push(Origin {
                    rank: part.rank as u32,
                    position: position as u32,
                    sample: (part.first_sample + bag) as u32,
                    count: bags.count_of(bag),
                    weight: given,
                });
            }
            self.offsets.push(self.indices.len() as i64);
        }
    }
}

/// Returns the gradient of one index from that of its bag: times its weight, over the count for
/// "mean"; the roundings are those of `tierbed_kernels::grad`.
pub(crate) fn index_grad(value: f32, pooling: Pooling, origin: &Origin) -> f32 {
    let value = origin.weight.map_or(value, |weight| weight * value);
    if pooling == Pooling::Mean {
        value / origin.count as f32
    } else {
        value
    }
}
