//! A collective (all-to-all) exchange over the same memory: the comparison, not the product.
//!
//! Three steps, as collective libraries do them: each rank pools into a matrix of its own, copies
//! a block of it to every rank (an all-to-all over the same heap and the same signals), and then
//! copies what it received into columns side by side (*unpack*). Source: PGAS §II-C.

#![expect(
    clippy::indexing_slicing,
    reason = "columns come from the plan; matrices have the sizes that were checked"
)]

use tierbed_core::{Error, Result};
use tierbed_kernels::{Columns, Matrix};

use crate::exchange::{Exchange, LookupRows};
use crate::pad::Channel;
use crate::plan::{GroupKind, Member};
use crate::precision::Precision;
use crate::step::Step;

/// Bytes of an element.
const WORD: usize = 4;

impl Exchange {
    /// Returns the columns that `rank` pools for all samples.
    ///
    /// # Errors
    /// `Unsupported` unless every table is held whole, and numbers travel as f32.
    pub fn pooled_width(&self, rank: usize) -> Result<usize> {
        let is_f32 = self.place.plan.output_precision() == Precision::F32;
        match self.place.plan.groups(rank) {
            [] => Ok(0),
            [group] if group.kind == GroupKind::Sums && is_f32 => Ok(group.width),
            _ => Err(Error::unsupported("the comparison exchanges whole tables, in f32")),
        }
    }

    /// Pools into a matrix of this rank and sends nothing: `local` is `[B, width]`, with the
    /// samples of all ranks.
    ///
    /// # Errors
    /// As [`pooled_width`](Self::pooled_width), `Invalid` for another length, those of `rows`.
    pub fn compute_only(
        &self,
        step: &Step,
        rows: &mut impl LookupRows,
        local: &mut [f32],
    ) -> Result<()> {
        let width = self.pooled_width(self.rank())?;
        if local.len() != step.sample_count() * width {
            return Err(Error::invalid("the matrix must be [samples of all ranks, width]")
                .with("expected_values", step.sample_count() * width)
                .with("found_values", local.len()));
        }
        let Some(group) = self.place.plan.groups(self.rank()).first() else { return Ok(()) };
        let columns =
            |member: &Member| Columns { stride: width, first: member.grad_column, dim: member.dim };
        let mut to = Matrix::new(local, group.members.iter().map(columns));
        rows.lookup(0, &step.lookup(0, 0), &mut to)
    }

    /// Copies blocks of `local` to all ranks and waits for theirs, over the memory and signals of
    /// the one-sided exchange; they lie in the output's buffer, not yet unpacked.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange) and [`compute_only`](Self::compute_only).
    pub fn all_to_all(&mut self, step: &mut Step, local: &[f32]) -> Result<()> {
        self.check()?;
        let arrivals = self.expect(step);
        let (rank, epoch) = (self.rank(), step.output_epoch);
        let width = self.pooled_width(rank)?;
        assert!(local.len() == step.sample_count() * width, "[samples of all ranks, width]");
        let at = self.place.layout.output_at(epoch);
        for peer in 0..self.place.pad.rank_count() {
            let samples = step.samples_of(peer);
            let block = &local[samples.start * width..samples.end * width];
            let first = samples.len() * self.columns_before(rank)?;
            let mut writer = self.place.pad.heap().region(peer).writer();
            writer.values(at + first * WORD, block.len()).copy_from_slice(block);
        }
        self.place.pad.put_all(Channel::Outputs, arrivals.signal(0));
        let result = arrivals.wait_for_all();
        self.break_on_error(result)
    }

    /// Copies the received blocks into columns side by side: `out` is `[samples, output_dim]`.
    ///
    /// # Errors
    /// As [`pooled_width`](Self::pooled_width).
    pub fn unpack(&self, step: &Step, out: &mut [f32]) -> Result<()> {
        let samples = step.samples_of(self.rank()).len();
        let region = self.place.pad.heap().region(self.rank());
        let at = self.place.layout.output_at(step.output_epoch);
        let stride = self.place.plan.output_dim();
        for peer in 0..self.place.pad.rank_count() {
            let width = self.pooled_width(peer)?;
            let before = self.columns_before(peer)?;
            let Some(group) = self.place.plan.groups(peer).first() else { continue };
            let block = region.read::<f32>(at + samples * before * WORD, samples * width);
            for (row, to) in block.chunks_exact(width).zip(out.chunks_exact_mut(stride)) {
                for member in &group.members {
                    let from = &row[member.grad_column..member.grad_column + member.dim];
                    to[member.output_column..member.output_column + member.dim]
                        .copy_from_slice(from);
                }
            }
        }
        Ok(())
    }

    fn columns_before(&self, rank: usize) -> Result<usize> {
        (0..rank).map(|peer| self.pooled_width(peer)).sum()
    }
}
