//! Bags of the ranks of other nodes, as their messages told them.

#![expect(
    clippy::indexing_slicing,
    reason = "groups and members are those of the plan that both sides have"
)]

use tierbed_core::{Error, Result};

use crate::bags::MemberBags;
use crate::batch::{BatchOptions, Source};
use crate::message::{damaged, write_number, AwayMember, MemberForm, Reader};
use crate::nodes::Nodes;
use crate::plan::{ExchangePlan, Group, GroupKind};

const HAS_WEIGHTS: u8 = 1;
const WANTS_WEIGHT_GRADS: u8 = 2;

/// What a rank of another node wants of this rank.
#[derive(Debug, Clone)]
pub(crate) struct AwayRank {
    pub(crate) rank: usize,
    pub(crate) sample_count: usize,
    pub(crate) has_weights: bool,
    pub(crate) wants_weight_grads: bool,
    /// Per group of this rank its members.
    groups: Vec<Vec<AwayMember>>,
}

impl AwayRank {
    /// Returns the bags of member `at` of `group`.
    pub(crate) fn of(&self, group: usize, at: usize) -> MemberBags<'_> {
        self.groups[group][at].bags()
    }
}

/// A message from another node, of which the mirrors are still to be read.
#[derive(Debug)]
pub(crate) struct Heard<'a> {
    /// All ranks of the node.
    pub(crate) ranks: Vec<AwayRank>,
    /// For all ranks of this node: bags of mirrored tables of the rank on this rail.
    pub(crate) mirrors: &'a [u8],
}

/// Writes what `holder`, on another node, must know of the bags of `sources`, the ranks of this
/// node; `own` is among them.
pub(crate) fn write_message(
    plan: &ExchangePlan,
    holder: usize,
    sources: &[Source<'_>],
    own: usize,
    options: BatchOptions,
) -> Vec<u8> {
    let mut bags = Vec::new();
    write_number(options.part_count as u64, &mut bags);
    for source in sources {
        write_number(source.bags.batch_size() as u64, &mut bags);
        let has_weights = u8::from(source.bags.weights.is_some()) * HAS_WEIGHTS;
        let wants_grads = u8::from(source.wants_weight_grads) * WANTS_WEIGHT_GRADS;
        bags.push(has_weights | wants_grads);
    }
    let mut mirrors = Vec::new();
    for group in plan.groups(holder) {
        for member in &group.members {
            let (_, pooling) = plan.features()[member.feature];
            let form = MemberForm::of(group.kind, member, pooling);
            match group.kind {
                GroupKind::Mirrors => {
                    form.write(&sources[own].member(member.feature), &mut mirrors);
                }
                GroupKind::Sums => {
                    let of = |source: &Source<'_>| {
                        form.write(&source.member(member.feature), &mut bags);
                    };
                    sources.iter().for_each(of);
                }
                GroupKind::Rows => {
                    for source in sources {
                        let held = source.member(member.feature).only(member.rows);
                        form.write(&held.bags(), &mut bags);
                    }
                }
            }
        }
    }
    let mut message = plan.fingerprint().to_le_bytes().to_vec();
    message.extend((bags.len() as u64).to_le_bytes());
    message.extend(bags);
    message.extend(mirrors);
    message
}

/// Who reads a message.
#[derive(Clone, Copy)]
pub(crate) struct Hearer<'p> {
    pub(crate) plan: &'p ExchangePlan,
    pub(crate) nodes: Nodes,
    pub(crate) rank: usize,
    /// Parts of its own batch.
    pub(crate) part_count: usize,
}

impl Hearer<'_> {
    /// Reads what the ranks of `node` want.
    ///
    /// # Errors
    /// `Invalid` when that node has another plan or other parts, `Corruption` for a message that is
    /// none.
    pub(crate) fn read<'a>(self, node: usize, bytes: &'a [u8]) -> Result<Heard<'a>> {
        let Self { plan, nodes, rank, part_count } = self;
        let mut whole = Reader::new(bytes);
        let other = || nodes.ranks_of(node).start + nodes.local(rank);
        if whole.word()? != plan.fingerprint() {
            return Err(Error::invalid(format!("rank {} has another plan", other()))
                .with("rank", other())
                .with("remedy", "give all ranks the same tables, plan and limits"));
        }
        let length = usize::try_from(whole.word()?).map_err(|_| damaged())?;
        let mut reader = Reader::new(whole.take(length)?);
        let found = reader.count()?;
        if found != part_count {
            return Err(Error::invalid(format!("rank {} has other parts", other()))
                .with("rank", other())
                .with("found_parts", found)
                .with("expected_parts", part_count)
                .with("remedy", "all ranks divide a batch into equally many parts"));
        }
        let mut ranks = Vec::new();
        for rank in nodes.ranks_of(node) {
            let sample_count = reader.count()?;
            let flags = reader.byte()?;
            ranks.push(AwayRank {
                rank,
                sample_count,
                has_weights: flags & HAS_WEIGHTS != 0,
                wants_weight_grads: flags & WANTS_WEIGHT_GRADS != 0,
                groups: Vec::new(),
            });
        }
        for group in plan.groups(rank) {
            ranks.iter_mut().for_each(|rank| rank.groups.push(Vec::new()));
            if group.kind == GroupKind::Mirrors {
                continue;
            }
            for member in &group.members {
                let (_, pooling) = plan.features()[member.feature];
                let form = MemberForm::of(group.kind, member, pooling);
                for rank in &mut ranks {
                    let bags = form.read(&mut reader, rank.sample_count, rank.has_weights)?;
                    rank.groups.last_mut().ok_or_else(damaged)?.push(bags);
                }
            }
        }
        reader.finish()?;
        Ok(Heard { ranks, mirrors: whole.take(bytes.len() - 16 - length)? })
    }
}

/// Reads the bags of mirrored tables of `rank`, as they came to a rank of this node, which may be
/// another than `holder`.
///
/// # Errors
/// `Corruption` for bytes that are none.
pub(crate) fn read_mirrors(
    plan: &ExchangePlan,
    holder: usize,
    rank: &mut AwayRank,
    bytes: &[u8],
) -> Result<()> {
    let mut reader = Reader::new(bytes);
    let is_mirrors = |(_, group): &(usize, &Group)| group.kind == GroupKind::Mirrors;
    for (at, group) in plan.groups(holder).iter().enumerate().filter(is_mirrors) {
        for member in &group.members {
            let (_, pooling) = plan.features()[member.feature];
            let form = MemberForm::of(group.kind, member, pooling);
            let bags = form.read(&mut reader, rank.sample_count, rank.has_weights)?;
            rank.groups[at].push(bags);
        }
    }
    reader.finish()
}
