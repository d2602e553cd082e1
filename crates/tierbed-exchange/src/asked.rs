//! What a node asked of a holder on another one, and where its answer belongs.
//!
//! An answer has the vectors of one part of a batch, group by group of the holder; each group
//! begins at a multiple of 8 bytes:
//!
//! ```text
//! sums   samples of the node, rank by rank: the columns that the holder has, side by side
//! rows   per member the distinct rows that the node asked for, in the order of their first use
//! ```

#![expect(
    clippy::indexing_slicing,
    reason = "groups and members are those of the plan; positions come from checked bags"
)]

use std::ops::Range;

use crate::batch::Source;
use crate::destinations::RowBase;
use crate::memory::Region;
use crate::nodes::Nodes;
use crate::plan::{ExchangePlan, Group, GroupKind};
use crate::step::Part;
use crate::uniques::Uniques;

/// Groups begin at multiples of this.
const ALIGN_BYTES: usize = 8;

/// Where groups lie in a message, one behind the other.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sections {
    starts: Vec<usize>,
    bytes: usize,
}

impl Sections {
    /// Adds a group of `bytes`.
    pub(crate) fn push(&mut self, bytes: usize) {
        self.starts.push(self.bytes);
        self.bytes = (self.bytes + bytes).next_multiple_of(ALIGN_BYTES);
    }

    /// Returns where the next group begins.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns where `group` begins.
    pub(crate) fn start(&self, group: usize) -> usize {
        self.starts[group]
    }
}

/// A row that comes, and one index that waits for it.
#[derive(Debug, Clone, Copy)]
struct AskedRow {
    /// Rank of the index on this node.
    local: u32,
    /// Number of the row among those of the member.
    number: u32,
    /// Byte among the rows that the rank receives.
    to: usize,
}

/// Rows of one member.
#[derive(Debug, Clone, Default)]
struct AskedMember {
    rows: Vec<AskedRow>,
    row_bytes: usize,
    /// Byte of the first row in the group.
    first: usize,
}

/// What is asked for one part of the batch.
#[derive(Debug, Clone, Default)]
struct AskedPart {
    sections: Sections,
    /// Per group its members; none where vectors are pooled.
    members: Vec<Vec<AskedMember>>,
}

/// Indices of one rank that a holder has, for gradients of weights.
#[derive(Debug, Clone)]
pub(crate) struct AskedIndices {
    /// The rank on this node.
    pub(crate) local: usize,
    /// Positions in its batch.
    pub(crate) positions: Range<usize>,
}

/// What came for one part of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer<'a> {
    pub(crate) part: usize,
    pub(crate) bytes: &'a [u8],
}

/// What this node asked of `holder`.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) holder: usize,
    parts: Vec<AskedPart>,
    /// Per group of the holder and member: bags with rows there, by sample of the node. Empty where
    /// vectors are pooled.
    pub(crate) bags: Vec<Vec<Vec<u32>>>,
    /// Indices of pooled groups, in the order in which the holder has them.
    pub(crate) indices: Vec<AskedIndices>,
}

/// The bags of this node.
#[derive(Clone, Copy)]
pub(crate) struct NodeBags<'a> {
    pub(crate) plan: &'a ExchangePlan,
    pub(crate) nodes: Nodes,
    pub(crate) sources: &'a [Source<'a>],
    /// Where rows of row-wise features go, per rank of this node.
    pub(crate) bases: &'a [Vec<RowBase>],
}

impl NodeBags<'_> {
    /// Returns what is asked of `holder` in `part_count` parts.
    pub(crate) fn ask(&self, holder: usize, part_count: usize) -> Asked {
        assert!(!self.nodes.is_here(holder), "holders of this node read the bags themselves");
        let groups = self.plan.groups(holder);
        let part = |number| self.ask_part(groups, Part { number, count: part_count });
        let mut indices = Vec::new();
        for group in groups.iter().filter(|group| group.kind == GroupKind::Sums) {
            for member in &group.members {
                for (local, source) in self.sources.iter().enumerate() {
                    let positions = source.member(member.feature).range();
                    indices.push(AskedIndices { local, positions });
                }
            }
        }
        Asked {
            holder,
            parts: (0..part_count).map(part).collect(),
            bags: groups.iter().map(|group| self.bags_with_rows(group)).collect(),
            indices,
        }
    }

    fn ask_part(&self, groups: &[Group], part: Part) -> AskedPart {
        let mut asked = AskedPart::default();
        for group in groups {
            let samples: usize =
                self.sources.iter().map(|one| part.samples(one.bags.batch_size()).len()).sum();
            let mut members = Vec::new();
            let bytes = match group.kind {
                GroupKind::Mirrors => 0,
                GroupKind::Sums => samples * self.plan.output_precision().vector_bytes(group.width),
                GroupKind::Rows => {
                    let mut bytes = 0;
                    for at in 0..group.members.len() {
                        let member = self.ask_rows(group, at, part, &mut bytes);
                        members.push(member);
                    }
                    bytes
                }
            };
            asked.sections.push(bytes);
            asked.members.push(members);
        }
        asked
    }

    fn ask_rows(&self, group: &Group, at: usize, part: Part, bytes: &mut usize) -> AskedMember {
        let member = &group.members[at];
        let row_bytes = self.plan.row_precision().vector_bytes(member.dim);
        let mut asked = AskedMember { rows: Vec::new(), row_bytes, first: *bytes };
        let mut uniques = Uniques::default();
        for (local, source) in self.sources.iter().enumerate() {
            let of_feature = |base: &&RowBase| base.feature == member.feature;
            let Some(base) = self.bases[local].iter().find(of_feature) else {
                panic!("a row-wise feature has a base")
            };
            let samples = part.samples(source.bags.batch_size());
            let bags = source.member(member.feature).of_samples(samples);
            for position in bags.range() {
                let id = bags.indices[position];
                if member.rows.contains(id) {
                    let (number, _) = uniques.number(id);
                    let to = base.byte + (position - base.first_index) * row_bytes;
                    asked.rows.push(AskedRow { local: local as u32, number, to });
                }
            }
        }
        *bytes += uniques.count() * row_bytes;
        asked
    }

    // Bags with a row of the holder, member by member.
    fn bags_with_rows(&self, group: &Group) -> Vec<Vec<u32>> {
        if group.kind != GroupKind::Rows {
            return Vec::new();
        }
        let of_member = |member: &crate::plan::Member| {
            let mut found = Vec::new();
            let mut first_sample = 0;
            for source in self.sources {
                let bags = source.member(member.feature);
                for (bag, mut bounds) in bags.bounds().enumerate() {
                    if bounds.any(|at| member.rows.contains(bags.indices[at])) {
                        found.push((first_sample + bag) as u32);
                    }
                }
                first_sample += source.bags.batch_size();
            }
            found
        };
        group.members.iter().map(of_member).collect()
    }
}

impl Asked {
    /// Returns the bytes of the answer to `part`.
    pub(crate) fn answer_bytes(&self, part: usize) -> usize {
        self.parts[part].sections.bytes()
    }

    /// Returns where `group` of the holder begins in the answer to `part`.
    pub(crate) fn section(&self, part: usize, group: usize) -> usize {
        self.parts[part].sections.start(group)
    }

    /// Copies the rows of `group` in the `answer` to every index that waits for them;
    /// `rows_at` is where rows begin in the regions of this node's ranks, `regions`.
    pub(crate) fn place_rows(
        &self,
        group: usize,
        answer: Answer<'_>,
        rows_at: usize,
        regions: &[Region<'_>],
    ) {
        let Answer { part, bytes: answer } = answer;
        let of_part = &self.parts[part];
        for member in &of_part.members[group] {
            let first = of_part.sections.start(group) + member.first;
            let bytes = member.row_bytes;
            for row in &member.rows {
                let from = first + row.number as usize * bytes;
                let mut writer = regions[row.local as usize].writer();
                writer.values(rows_at + row.to, bytes).copy_from_slice(&answer[from..from + bytes]);
            }
        }
    }
}
