//! Single rows that are looked up for the ranks that divide a table by rows.
//!
//! A rank of this node gets a row for each index, straight where it waits for it. Another node gets
//! each row once per part of a batch, in the order of first use; what waits for it there is copied
//! there ([`crate::asked`]).

#![expect(
    clippy::indexing_slicing,
    reason = "ranks and members are those of the plan; positions come from checked bags"
)]

use tierbed_core::Bags;

use crate::asked::Sections;
use crate::bags::RankBags;
use crate::destinations::RowBase;
use crate::nodes::Nodes;
use crate::plan::{ExchangePlan, Group};
use crate::step::Part;
use crate::uniques::Uniques;

/// Where a row goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace {
    /// A rank of this node by its number there; behind them, another node by its place among the
    /// others.
    pub(crate) target: u32,
    /// Byte among the rows of the rank, or in the answer to the node.
    pub(crate) byte: usize,
}

/// The rows of one group and part.
#[derive(Debug, Default)]
pub(crate) struct RowLookup {
    /// Row ids, member by member.
    indices: Vec<i64>,
    /// Bounds of the members.
    offsets: Vec<i64>,
    /// Of each index.
    pub(crate) places: Vec<RowPlace>,
}

/// For whom rows are looked up.
#[derive(Clone, Copy)]
pub(crate) struct Asking<'a> {
    pub(crate) plan: &'a ExchangePlan,
    pub(crate) nodes: Nodes,
    pub(crate) ranks: &'a [RankBags<'a>],
    /// Where rows go, per rank of this node.
    pub(crate) bases: &'a [Vec<RowBase>],
}

impl RowLookup {
    /// Lists the rows of group `at`, and gives it a section in each of the `answers`.
    pub(crate) fn list(
        at: usize,
        group: &Group,
        of: Asking<'_>,
        part: Part,
        answers: &mut [Sections],
    ) -> Self {
        let mut lookup = Self { offsets: vec![0], ..Self::default() };
        let starts: Vec<usize> = answers.iter().map(Sections::bytes).collect();
        let mut bytes = vec![0; answers.len()];
        for (number, member) in group.members.iter().enumerate() {
            let row_bytes = of.plan.row_precision().vector_bytes(member.dim);
            let mut uniques = Uniques::default();
            let mut last_node = of.nodes.own();
            for rank in of.ranks {
                let node = rank.rank() / of.nodes.ranks_each();
                if node != last_node {
                    (uniques, last_node) = (Uniques::default(), node);
                }
                let samples = part.samples(rank.sample_count());
                let bags = rank.member(at, number, member).of_samples(samples);
                let is_here = node == of.nodes.own();
                for position in bags.range() {
                    let id = bags.indices[position];
                    if is_here {
                        if member.rows.contains(id) {
                            lookup.push(
                                id,
                                of.place_here(rank.rank(), member.feature, position, row_bytes),
                            );
                        }
                    } else if uniques.number(id).1 {
                        let other = of.nodes.place_of(node);
                        let target = (of.nodes.ranks_each() + other) as u32;
                        lookup.push(id, RowPlace { target, byte: starts[other] + bytes[other] });
                        bytes[other] += row_bytes;
                    }
                }
            }
            lookup.offsets.push(lookup.indices.len() as i64);
        }
        for (answer, bytes) in answers.iter_mut().zip(bytes) {
            answer.push(bytes);
        }
        lookup
    }

    /// Returns them as one bag per member.
    pub(crate) fn bags(&self) -> Bags<'_> {
        Bags {
            indices: &self.indices,
            offsets: &self.offsets,
            weights: None,
            feature_count: self.offsets.len() - 1,
        }
    }

    /// Returns the position of the first row of `member`.
    pub(crate) fn first_of(&self, member: usize) -> usize {
        self.offsets[member] as usize
    }

    fn push(&mut self, id: i64, place: RowPlace) {
        self.indices.push(id);
        self.places.push(place);
    }
}

impl Asking<'_> {
    fn place_here(
        self,
        rank: usize,
        feature: usize,
        position: usize,
        row_bytes: usize,
    ) -> RowPlace {
        let local = self.nodes.local(rank);
        let of_feature = |base: &&RowBase| base.feature == feature;
        let Some(base) = self.bases[local].iter().find(of_feature) else {
            panic!("a row-wise feature has a base")
        };
        let byte = base.byte + (position - base.first_index) * row_bytes;
        RowPlace { target: local as u32, byte }
    }
}
