//! The backward exchange: gradients to the ranks that hold the rows.
//!
//! Each rank writes the gradient of its output straight into the holders' matrices, which have
//! the samples of all ranks: `[B, width]` per group, nothing to permute. Then each holder sums
//! per row, in the order of samples across ranks, and steps its rows: a row has one writer, and
//! the bits are those of one process with the whole batch.
//!
//! Differs: PGAS §V plans remote atomic additions per row; those move a gradient per index
//! instead of one per bag, and the order of additions would be that of their arrival.

#![expect(
    clippy::indexing_slicing,
    reason = "columns come from the plan, samples and positions from checked bags"
)]

use std::borrow::Cow;

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::Pooling;

use crate::arrivals::Received;
use crate::bags::{index_grad, GroupBags};
use crate::exchange::Exchange;
use crate::memory::{Region, Writer};
use crate::pad::Channel;
use crate::plan::{Group, GroupKind};
use crate::precision::Precision;
use crate::step::{Step, StepRows};

/// Bytes of an element.
const WORD: usize = 4;

/// Who steps the rows this rank holds.
pub trait UpdateRows {
    /// Prepares for the updates of all groups; `rows` lists all rows of the step.
    ///
    /// # Errors
    /// Whatever keeps it from writing rows.
    fn begin(&mut self, _rows: impl FnOnce() -> StepRows) -> Result<()> {
        Ok(())
    }

    /// Ends the step: all groups were updated.
    ///
    /// # Errors
    /// Whatever keeps it from writing rows.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// Applies one optimizer step to the rows of `bags`, those of the rank's `group`.
    ///
    /// `grads` are `[B, width]`, or `[E, dim]` in a group of rows. `weight_grads`, `[E]`, receive
    /// the gradient of the weights where they are wanted, from rows before the step.
    ///
    /// # Errors
    /// Whatever keeps it from writing rows.
    fn update(
        &mut self,
        group: usize,
        bags: &Bags<'_>,
        grads: &[f32],
        weight_grads: Option<&mut [f32]>,
    ) -> Result<()>;
}

impl Exchange {
    /// Steps the rows of forward `step` together: `grad` is `[samples, output_dim]` of this rank.
    /// `weight_grads`, `[E]` of this rank's batch, are written when the forward wanted them.
    ///
    /// # Errors
    /// `Invalid` when the step is not waiting for its backward or a shape is wrong: nothing has
    /// happened then. Later errors break the exchange, as in [`forward`](Self::forward).
    pub fn backward(
        &mut self,
        step: u64,
        grad: &[f32],
        weight_grads: Option<&mut [f32]>,
        rows: &mut impl UpdateRows,
    ) -> Result<()> {
        let step = self.begin_backward(step, grad)?;
        let result = self.put_and_update(&step, grad, weight_grads, rows);
        self.break_on_error(result)
    }

    /// Takes the step that waits for `grad`.
    ///
    /// # Errors
    /// As [`backward`](Self::backward), when nothing has happened.
    pub(crate) fn begin_backward(&mut self, step: u64, grad: &[f32]) -> Result<Step> {
        self.check()?;
        let Some(at) = self.kept.iter().position(|kept| kept.number == step) else {
            return Err(Error::invalid("this forward is not waiting for its backward")
                .with("step", step)
                .with("remedy", "run backward once, before the next forward but one"));
        };
        let samples = self.kept[at].samples_of(self.rank()).len();
        if grad.len() != samples * self.place.plan.output_dim() {
            return Err(Error::invalid("gradient has the wrong size")
                .with("expected_values", samples * self.place.plan.output_dim())
                .with("found_values", grad.len()));
        }
        // Here the rank that gave it is known, and no holder of rows has seen it.
        tierbed_kernels::check_finite(grad)?;
        self.grads_step += 1;
        Ok(self.kept.swap_remove(at))
    }

    fn put_and_update(
        &self,
        step: &Step,
        grad: &[f32],
        weight_grads: Option<&mut [f32]>,
        rows: &mut impl UpdateRows,
    ) -> Result<()> {
        assert_eq!(self.nodes().count(), 1, "several nodes send each other gradients");
        self.put_grads_here(step, grad)?;
        let epoch = self.signal_grads()?;
        self.update_groups(step, rows)?;
        if step.wanting.contains(&true) {
            self.place.pad.put_all(Channel::WeightGrads, epoch);
            self.place.pad.wait_all(Channel::WeightGrads, epoch)?;
        }
        match weight_grads {
            Some(out) => self.read_weight_grads(step, grad, out),
            None => Ok(()),
        }
    }

    /// Writes gradients into the matrices of the holders on this node, the next rank's first.
    pub(crate) fn put_grads_here(&self, step: &Step, grad: &[f32]) -> Result<()> {
        let ranks = self.place.pad.rank_count();
        for distance in 1..=ranks {
            let local = (self.place.pad.rank() + distance) % ranks;
            self.put_grads(step, grad, self.nodes().first_rank() + local)?;
        }
        Ok(())
    }

    /// Waits until the ranks of this node have written all gradients.
    pub(crate) fn signal_grads(&self) -> Result<u32> {
        let epoch = self.grads_step as u32;
        self.place.pad.put_all(Channel::Grads, epoch);
        self.place.pad.wait_all(Channel::Grads, epoch)?;
        Ok(epoch)
    }

    /// Steps the rows of every group by its matrix; returns the gradients of weights that go to
    /// other nodes, in the order of these.
    pub(crate) fn update_groups(
        &self,
        step: &Step,
        rows: &mut impl UpdateRows,
    ) -> Result<Vec<Vec<f32>>> {
        rows.begin(|| step.rows(&self.place.plan, self.rank()))?;
        let is_wanted = step.wanting.contains(&true);
        let mut away = vec![Vec::new(); self.nodes().count() - 1];
        let mut at = self.place.layout.grads_at(self.grads_step);
        let region = self.place.region(self.rank());
        let precision = self.place.plan.output_precision();
        let groups = self.place.plan.groups(self.rank()).iter().zip(&step.groups);
        for (number, (group, bags)) in groups.enumerate() {
            let shape = Shape { samples: step.sample_count(), width: group.width };
            let grads = self.read_grads(region, at, shape);
            at += precision.vector_bytes(step.sample_count() * group.width);
            if group.kind == GroupKind::Rows {
                let grads = self.grads_per_index(group, bags, &grads);
                rows.update(number, &bags.bags(), &grads, None)?;
                continue;
            }
            let wants = is_wanted && bags.weights.is_some();
            let mut of_weights = vec![0.0; if wants { bags.indices.len() } else { 0 }];
            let place = wants.then_some(of_weights.as_mut_slice());
            rows.update(number, &bags.bags(), &grads, place)?;
            if wants {
                let grads = WeightGrads { group, bags, values: &of_weights };
                self.put_weight_grads(step, &grads, &mut away);
            }
        }
        rows.finish()?;
        Ok(away)
    }

    // Writes the columns that `holder` wants of this rank's samples.
    fn put_grads(&self, step: &Step, grad: &[f32], holder: usize) -> Result<()> {
        let mut writer = self.place.region(holder).writer();
        let own = step.samples_of(self.rank());
        let mut base = self.place.layout.grads_at(self.grads_step);
        for group in self.place.plan.groups(holder) {
            let row_bytes = self.place.plan.output_precision().vector_bytes(group.width);
            self.put_group(&mut writer, group, grad, base + own.start * row_bytes)?;
            base += step.sample_count() * row_bytes;
        }
        Ok(())
    }

    /// Writes the columns of `group` of this rank's gradients, sample by sample, from byte `at` on.
    pub(crate) fn put_group(
        &self,
        writer: &mut Writer<'_>,
        group: &Group,
        grad: &[f32],
        at: usize,
    ) -> Result<()> {
        let precision = self.place.plan.output_precision();
        let runs = runs_of(group);
        let row_bytes = precision.vector_bytes(group.width);
        let rows = grad.chunks_exact(self.place.plan.output_dim());
        for (to, row) in (0..).map(|sample| at + sample * row_bytes).zip(rows) {
            for run in &runs {
                let from = &row[run.output_column..run.output_column + run.len];
                let byte = to + precision.vector_bytes(run.grad_column);
                precision.write(from, writer.values(byte, precision.vector_bytes(run.len)))?;
            }
        }
        Ok(())
    }

    // The gradients of a group, `[B, width]`, as they arrived.
    fn read_grads<'h>(&self, region: Region<'h>, at: usize, shape: Shape) -> Cow<'h, [f32]> {
        let Shape { samples, width } = shape;
        let precision = self.place.plan.output_precision();
        if precision == Precision::F32 {
            return Cow::Borrowed(region.read(at, samples * width));
        }
        let bytes = region.read(at, precision.vector_bytes(samples * width));
        Cow::Owned(precision.read(self.place.kernels, bytes, samples, width))
    }

    // The gradient of each held index, from those of the bags: `[E, dim]`.
    fn grads_per_index(&self, group: &Group, bags: &GroupBags, grads: &[f32]) -> Vec<f32> {
        let mut per_index = Vec::new();
        let samples = bags.sample_count();
        for (at, member) in group.members.iter().enumerate() {
            let (_, pooling) = self.place.plan.features()[member.feature];
            let range = crate::batch::feature_range(bags.offsets_of(at, samples));
            for origin in &bags.origins[range] {
                let start = origin.sample as usize * group.width + member.grad_column;
                let of_bag = &grads[start..start + member.dim];
                per_index.extend(of_bag.iter().map(|&value| index_grad(value, pooling, origin)));
            }
        }
        per_index
    }

    // Sends the gradient of each weight to the rank whose index it is, or lists it for its node.
    fn put_weight_grads(&self, step: &Step, grads: &WeightGrads<'_>, away: &mut [Vec<f32>]) {
        let nodes = self.nodes();
        for (origin, &value) in grads.bags.origins.iter().zip(grads.values) {
            let rank = origin.rank as usize;
            let is_mine = grads.group.kind == GroupKind::Sums || rank == self.rank();
            if !is_mine || !step.wanting[rank] {
                continue;
            }
            if nodes.is_here(rank) {
                let at = self.place.layout.weight_grads_at() + origin.position as usize * WORD;
                self.place.region(rank).writer().values(at, 1).fill(value);
            } else {
                away[nodes.place_of(rank / nodes.ranks_each())].push(value);
            }
        }
    }

    /// Reads the gradients of this rank's weights.
    pub(crate) fn read_weight_grads(
        &self,
        step: &Step,
        grad: &[f32],
        out: &mut [f32],
    ) -> Result<()> {
        let Some(own) = &step.own else {
            return Err(Error::invalid("the forward did not want gradients of weights"));
        };
        if out.len() != own.indices.len() {
            return Err(Error::invalid("gradient of weights must have one value per index")
                .with("indices", own.indices.len())
                .with("found", out.len()));
        }
        let region = self.place.region(self.rank());
        out.copy_from_slice(region.read(self.place.layout.weight_grads_at(), out.len()));
        // Rows of row-wise features are here already, as they were before the step.
        let rank = self.rank();
        let source = own.source(rank)?;
        let samples = 0..source.bags.batch_size();
        for received in self.place.received(&source, samples, step.output_epoch) {
            self.fill_weight_grads(&received, grad, out);
        }
        Ok(())
    }

    // Gradients of the weights of a row-wise feature: rows times the gradients of their bags.
    fn fill_weight_grads(&self, received: &Received<'_>, grad: &[f32], out: &mut [f32]) {
        let plan = &self.place.plan;
        let dim = plan.table_of(received.feature).dim;
        let first = plan.first_column(received.feature);
        let (_, pooling) = plan.features()[received.feature];
        let mut starts = received.starts.iter();
        for (bag, bounds) in received.offsets.windows(2).enumerate() {
            let (start, end) = (bounds[0], bounds[1]);
            let at = bag * plan.output_dim() + first;
            let of_bag = &grad[at..at + dim];
            for (position, &word) in (start as usize..end as usize).zip(&mut starts) {
                let row = &received.arena[word..word + dim];
                let product = self.place.kernels.dot(row, of_bag);
                let is_mean = pooling == Pooling::Mean;
                out[position] = if is_mean { product / (end - start) as f32 } else { product };
            }
        }
    }
}

/// Gradients of the weights of a group.
struct WeightGrads<'a> {
    group: &'a Group,
    bags: &'a GroupBags,
    /// One per index.
    values: &'a [f32],
}

/// Rows and columns of a gradient matrix.
#[derive(Clone, Copy)]
struct Shape {
    samples: usize,
    width: usize,
}

/// Columns that lie side by side in output and matrix.
pub(crate) struct Run {
    pub(crate) output_column: usize,
    pub(crate) grad_column: usize,
    pub(crate) len: usize,
}

/// Returns the columns of `group` that lie side by side.
pub(crate) fn runs_of(group: &Group) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for member in &group.members {
        match runs.last_mut() {
            Some(run) if run.output_column + run.len == member.output_column => {
                run.len += member.dim;
            }
            _ => runs.push(Run {
                output_column: member.output_column,
                grad_column: member.grad_column,
                len: member.dim,
            }),
        }
    }
    runs
}
