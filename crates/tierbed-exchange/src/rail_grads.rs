//! The backward of several nodes.
//!
//! ```text
//! put_grads   into the matrices of holders on this node; for other holders into the memory of the
//!             rank on their rail
//!             --- gradients along the rail ---> one for each bag with a row there
//! update      put what came into the own matrix (mirrors: into those of all ranks of the node);
//!             sum in the order of samples across ranks, and step
//!             --- gradients of weights along the rail --->
//! ```

#![expect(
    clippy::indexing_slicing,
    reason = "other nodes and groups are those of the plan; samples come from checked bags"
)]

use tierbed_core::{Error, Result};

use crate::asked::Sections;
use crate::backward::UpdateRows;
use crate::exchange::Exchange;
use crate::pad::Channel;
use crate::plan::{Group, GroupKind};
use crate::rails::{wrong_bytes, RailBytes};
use crate::step::Step;

/// Bytes of the gradient of a weight.
const WORD: usize = 4;

/// A backward under way.
#[derive(Debug)]
pub(crate) struct Stepping {
    step: Step,
    /// Gradients of weights to the other nodes.
    weight_grads: Vec<Vec<f32>>,
}

/// The gradient matrix of a group of a rank of this node.
#[derive(Clone, Copy)]
struct Matrix {
    rank: usize,
    group: usize,
}

/// Bytes of the gradients of a group.
struct GradBytes {
    sums: usize,
    mirrors: usize,
    /// Bags with rows there, per member.
    bags: Vec<usize>,
}

impl Exchange {
    /// Begins the backward of forward `step`: `grad` is `[samples, output_dim]` of this rank.
    /// Returns the bytes of gradients along the rail.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn put_all_grads(&mut self, step: u64, grad: &[f32]) -> Result<RailBytes> {
        let step = self.begin_backward(step, grad)?;
        let result = self.stage_grads(&step, grad);
        self.break_on_error(result)?;
        let other =
            |node: usize| (self.sent_sections(&step, node), self.come_sections(&step, node));
        let (sent, received): (Vec<_>, Vec<_>) = self.nodes().others().map(other).unzip();
        let bytes = |all: &[Sections]| all.iter().map(Sections::bytes).collect::<Vec<_>>();
        let bytes = RailBytes {
            sent: self.by_node(&bytes(&sent)),
            received: self.by_node(&bytes(&received)),
        };
        self.stepping = Some(Stepping { step, weight_grads: Vec::new() });
        Ok(bytes)
    }

    fn stage_grads(&self, step: &Step, grad: &[f32]) -> Result<()> {
        self.put_grads_here(step, grad)?;
        let nodes = self.nodes();
        let own = step.samples_of(self.rank());
        let of_node = step.samples_of_node(nodes, nodes.own());
        for node in nodes.others() {
            for holder in nodes.ranks_of(node) {
                let rail = nodes.first_rank() + nodes.local(holder);
                let mut writer = self.place.region(rail).writer();
                let mut at = self.place.layout.staged_at(self.grads_step, nodes.place_of(node));
                for group in self.place.plan.groups(holder) {
                    let row_bytes = self.place.plan.output_precision().vector_bytes(group.width);
                    if group.kind == GroupKind::Mirrors {
                        // Each rail brings the gradients of its own rank.
                        if rail == self.rank() {
                            self.put_group(&mut writer, group, grad, at)?;
                        }
                    } else {
                        let first = own.start - of_node.start;
                        self.put_group(&mut writer, group, grad, at + first * row_bytes)?;
                    }
                    at += of_node.len() * row_bytes;
                }
            }
        }
        self.signal_grads().map(drop)
    }

    /// Copies the gradients for the holders on this rank's rail to `to`, one behind the other.
    ///
    /// # Errors
    /// `Invalid` when no backward was begun, or `to` has another length.
    pub fn write_grads(&self, to: &mut [u8]) -> Result<()> {
        let step = &self.stepping()?.step;
        let nodes = self.nodes();
        let precision = self.place.plan.output_precision();
        let samples = step.samples_of_node(nodes, nodes.own()).len();
        let region = self.place.region(self.rank());
        let mut rest = to;
        for (asked, node) in step.asked.iter().zip(nodes.others()) {
            let sections = self.sent_sections(step, node);
            let bytes = sections.bytes();
            let found = rest.len();
            let (message, later) =
                rest.split_at_mut_checked(bytes).ok_or_else(|| wrong_bytes(found, bytes))?;
            rest = later;
            let mut at = self.place.layout.staged_at(self.grads_step, nodes.place_of(node));
            for (number, group) in self.place.plan.groups(asked.holder).iter().enumerate() {
                let row_bytes = precision.vector_bytes(group.width);
                let staged = region.read::<u8>(at, samples * row_bytes);
                let part = &mut message[sections.start(number)..];
                if group.kind == GroupKind::Rows {
                    self.pack_bags(group, &asked.bags[number], staged, part);
                } else {
                    let count = self.grad_bytes_sent(step, number, node).pooled();
                    part[..count].copy_from_slice(&staged[..count]);
                }
                at += samples * row_bytes;
            }
        }
        match rest {
            [] => Ok(()),
            _ => Err(wrong_bytes(rest.len(), 0)),
        }
    }

    // The gradients of some bags of each member, one behind the other.
    fn pack_bags(&self, group: &Group, bags: &[Vec<u32>], staged: &[u8], to: &mut [u8]) {
        let precision = self.place.plan.output_precision();
        let row_bytes = precision.vector_bytes(group.width);
        let mut end = 0;
        for (member, bags) in group.members.iter().zip(bags) {
            let (column, bytes) =
                (precision.vector_bytes(member.grad_column), precision.vector_bytes(member.dim));
            for &bag in bags {
                let from = bag as usize * row_bytes + column;
                to[end..end + bytes].copy_from_slice(&staged[from..from + bytes]);
                end += bytes;
            }
        }
    }

    /// Puts the gradients that came into the matrices, and steps the rows held here. Returns the
    /// bytes of gradients of weights along the rail; none where nobody wants any.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn update(&mut self, rows: &mut impl UpdateRows, from: &[u8]) -> Result<RailBytes> {
        self.check()?;
        let Some(mut stepping) = self.stepping.take() else {
            return Err(Error::invalid("no backward was begun"));
        };
        let result = self
            .place_grads(&stepping.step, from)
            .and_then(|()| self.update_groups(&stepping.step, rows));
        stepping.weight_grads = self.break_on_error(result)?;
        let sent: Vec<_> = stepping.weight_grads.iter().map(|grads| grads.len() * WORD).collect();
        let received: Vec<_> = self.weights_come(&stepping.step);
        self.stepping = Some(stepping);
        Ok(RailBytes { sent: self.by_node(&sent), received: self.by_node(&received) })
    }

    fn place_grads(&self, step: &Step, from: &[u8]) -> Result<()> {
        let nodes = self.nodes();
        let mut rest = from;
        for node in nodes.others() {
            let sections = self.come_sections(step, node);
            let (message, later) = rest
                .split_at_checked(sections.bytes())
                .ok_or_else(|| wrong_bytes(rest.len(), sections.bytes()))?;
            rest = later;
            for (number, group) in self.place.plan.groups(self.rank()).iter().enumerate() {
                let part = &message[sections.start(number)..];
                match group.kind {
                    GroupKind::Sums => {
                        let first = step.samples_of_node(nodes, node).start;
                        let count = self.grad_bytes_come(step, number, node).pooled();
                        let matrix = Matrix { rank: self.rank(), group: number };
                        self.fill_matrix(step, matrix, first, &part[..count]);
                    }
                    GroupKind::Rows => {
                        let bags = &step.away_bags[number][nodes.place_of(node)];
                        self.fill_bags(step, number, bags, part);
                    }
                    GroupKind::Mirrors => {
                        let sender = nodes.ranks_of(node).start + nodes.local(self.rank());
                        let first = step.samples_of(sender).start;
                        let count = self.grad_bytes_come(step, number, node).pooled();
                        for rank in nodes.ranks_of(nodes.own()) {
                            let groups = self.place.plan.groups(rank).iter();
                            let at = groups.clone().position(|one| one.kind == group.kind);
                            let Some(at) = at else { panic!("every rank has the mirrors") };
                            self.fill_matrix(
                                step,
                                Matrix { rank, group: at },
                                first,
                                &part[..count],
                            );
                        }
                    }
                }
            }
        }
        if !rest.is_empty() {
            return Err(wrong_bytes(from.len(), from.len() - rest.len()));
        }
        if self.place.plan.has_mirrors() {
            let epoch = self.grads_step as u32;
            self.place.pad.put_all(Channel::GuestGrads, epoch);
            self.place.pad.wait_all(Channel::GuestGrads, epoch)?;
        }
        Ok(())
    }

    // Byte of the first row of a group's matrix in the region of `rank`.
    fn matrix_at(&self, step: &Step, matrix: Matrix) -> usize {
        let Matrix { rank, group } = matrix;
        let precision = self.place.plan.output_precision();
        let before = self.place.plan.groups(rank).iter().take(group);
        let bytes = |group: &Group| precision.vector_bytes(step.sample_count() * group.width);
        self.place.layout.grads_at(self.grads_step) + before.map(bytes).sum::<usize>()
    }

    // Writes whole rows of a matrix, from sample `first` on.
    fn fill_matrix(&self, step: &Step, matrix: Matrix, first: usize, rows: &[u8]) {
        let Matrix { rank, group } = matrix;
        let width = self.place.plan.groups(rank)[group].width;
        let row_bytes = self.place.plan.output_precision().vector_bytes(width);
        let at = self.matrix_at(step, matrix) + first * row_bytes;
        self.place.region(rank).writer().values(at, rows.len()).copy_from_slice(rows);
    }

    // Writes the columns of members in the rows of bags; the rest of such a row is not looked at.
    fn fill_bags(&self, step: &Step, group: usize, bags: &[Vec<u32>], part: &[u8]) {
        let precision = self.place.plan.output_precision();
        let own = &self.place.plan.groups(self.rank())[group];
        let row_bytes = precision.vector_bytes(own.width);
        let base = self.matrix_at(step, Matrix { rank: self.rank(), group });
        let mut writer = self.place.region(self.rank()).writer();
        let mut end = 0;
        for (member, bags) in own.members.iter().zip(bags) {
            let (column, bytes) =
                (precision.vector_bytes(member.grad_column), precision.vector_bytes(member.dim));
            for &sample in bags {
                let at = base + sample as usize * row_bytes + column;
                writer.values(at, bytes).copy_from_slice(&part[end..end + bytes]);
                end += bytes;
            }
        }
    }

    /// Copies the gradients of weights for other nodes to `to`, one behind the other.
    ///
    /// # Errors
    /// `Invalid` when no backward was begun, or `to` has another length.
    pub fn write_weight_grads(&self, to: &mut [u8]) -> Result<()> {
        let words = self.stepping()?.weight_grads.concat();
        if to.len() != words.len() * WORD {
            return Err(wrong_bytes(to.len(), words.len() * WORD));
        }
        for (to, word) in to.chunks_exact_mut(WORD).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Ok(())
    }

    /// Ends the backward: takes the gradients of weights that came, and fills those of this rank's
    /// batch, `[E]`, where its forward wanted them.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn finish_backward(
        &mut self,
        from: &[u8],
        grad: &[f32],
        weight_grads: Option<&mut [f32]>,
    ) -> Result<()> {
        self.check()?;
        let Some(Stepping { step, .. }) = self.stepping.take() else {
            return Err(Error::invalid("no backward was begun"));
        };
        let result = self.place_weight_grads(&step, from).and_then(|()| match weight_grads {
            Some(out) => self.read_weight_grads(&step, grad, out),
            None => Ok(()),
        });
        self.break_on_error(result)
    }

    fn place_weight_grads(&self, step: &Step, from: &[u8]) -> Result<()> {
        let expected: usize = self.weights_come(step).iter().sum();
        if from.len() != expected {
            return Err(wrong_bytes(from.len(), expected));
        }
        if !step.wanting.contains(&true) {
            return Ok(());
        }
        let mut words = from.as_chunks::<WORD>().0.iter();
        let first = self.nodes().first_rank();
        for asked in step.asked.iter().flat_map(|asked| &asked.indices) {
            if !step.wanting[first + asked.local] {
                continue;
            }
            let mut writer = self.place.region(first + asked.local).writer();
            for (position, word) in asked.positions.clone().zip(&mut words) {
                let at = self.place.layout.weight_grads_at() + position * WORD;
                writer.values(at, 1).fill(f32::from_le_bytes(*word));
            }
        }
        let epoch = self.grads_step as u32;
        self.place.pad.put_all(Channel::WeightGrads, epoch);
        self.place.pad.wait_all(Channel::WeightGrads, epoch)
    }

    // Bytes of gradients of weights from each other node.
    fn weights_come(&self, step: &Step) -> Vec<usize> {
        let first = self.nodes().first_rank();
        let bytes = |asked: &crate::asked::Asked| {
            let wanted = asked.indices.iter().filter(|one| step.wanting[first + one.local]);
            wanted.map(|one| one.positions.len() * WORD).sum()
        };
        step.asked.iter().map(bytes).collect()
    }

    fn stepping(&self) -> Result<&Stepping> {
        self.stepping.as_ref().ok_or_else(|| Error::invalid("no backward was begun"))
    }

    fn sent_sections(&self, step: &Step, node: usize) -> Sections {
        let holder = step.asked[self.nodes().place_of(node)].holder;
        let groups = self.place.plan.groups(holder);
        self.sections(groups, |number| self.grad_bytes_sent(step, number, node))
    }

    fn come_sections(&self, step: &Step, node: usize) -> Sections {
        let groups = self.place.plan.groups(self.rank());
        self.sections(groups, |number| self.grad_bytes_come(step, number, node))
    }

    fn sections(&self, groups: &[Group], bytes: impl Fn(usize) -> GradBytes) -> Sections {
        let mut sections = Sections::default();
        for (number, group) in groups.iter().enumerate() {
            let bytes = bytes(number);
            let precision = self.place.plan.output_precision();
            let of_bags = group.members.iter().zip(&bytes.bags);
            let of_bags = of_bags.map(|(member, bags)| bags * precision.vector_bytes(member.dim));
            sections.push(bytes.pooled() + of_bags.sum::<usize>());
        }
        sections
    }

    fn grad_bytes_sent(&self, step: &Step, number: usize, node: usize) -> GradBytes {
        let nodes = self.nodes();
        let asked = &step.asked[nodes.place_of(node)];
        let group = &self.place.plan.groups(asked.holder)[number];
        let own = step.samples_of(self.rank()).len();
        let of_node = step.samples_of_node(nodes, nodes.own()).len();
        self.grad_bytes(group, of_node, own, asked.bags[number].iter().map(Vec::len).collect())
    }

    fn grad_bytes_come(&self, step: &Step, number: usize, node: usize) -> GradBytes {
        let nodes = self.nodes();
        let group = &self.place.plan.groups(self.rank())[number];
        let sender = nodes.ranks_of(node).start + nodes.local(self.rank());
        let bags = step.away_bags[number].get(nodes.place_of(node));
        let counts = bags.map_or_else(Vec::new, |bags| bags.iter().map(Vec::len).collect());
        let of_node = step.samples_of_node(nodes, node).len();
        self.grad_bytes(group, of_node, step.samples_of(sender).len(), counts)
    }

    fn grad_bytes(&self, group: &Group, node: usize, rank: usize, bags: Vec<usize>) -> GradBytes {
        let row_bytes = self.place.plan.output_precision().vector_bytes(group.width);
        let of = |kind: GroupKind, samples: usize| {
            if group.kind == kind {
                samples * row_bytes
            } else {
                0
            }
        };
        GradBytes { sums: of(GroupKind::Sums, node), mirrors: of(GroupKind::Mirrors, rank), bags }
    }
}

impl GradBytes {
    /// Returns the bytes of whole rows.
    fn pooled(&self) -> usize {
        self.sums + self.mirrors
    }
}
