//! Gradients in, rows stepped at their home. The write river of training.
//!
//! Per table: the uses of the batch are sorted by row, then by position; rows are taken in
//! pieces that fit the buffer; the gradients of a row's uses are summed in position order, then
//! one optimizer step changes the record in its slot. A row is stepped once per batch however
//! often it occurs ("exact" in FBGEMM's words), in the same order whatever the budget.

#![expect(clippy::indexing_slicing, reason = "positions are those of a batch that was checked")]

use tierbed_core::{Bags, Result, RowId, RowKey, TableId};
pub use tierbed_kernels::Grads;
use tierbed_kernels::{
    Feature, FeatureLayout, Groups, Kernels, Occurrence, Pooling, Prepared, Upstream,
};

use crate::window::engine::{built_mut, WindowEngine};
use crate::window::row_buffer::{RowBuffer, Want, TOGETHER};
use crate::window::scratch::{Scratch, Use};

impl WindowEngine {
    /// Applies one optimizer step for the batch `bags`.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range, or a batch too large for the budget: nothing is
    /// changed then. An error of the store in the middle poisons the engine: reopen it at the
    /// last checkpoint.
    pub fn update(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
    ) -> Result<()> {
        self.poison.check()?;
        layout.check(&self.schema, bags, grads.output.len())?;
        grads.check(bags)?;
        self.ensure_buffer()?;
        let tables = layout.tables();
        for &table in &tables {
            self.scratch
                .check_update(&self.schema.table(table)?.name, uses_of(layout, bags, table))?;
        }
        let result = self.step_tables(layout, bags, grads, &tables);
        self.poison.on_any(result)?;
        self.step_count += 1;
        Ok(())
    }

    fn step_tables(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        mut grads: Grads<'_>,
        tables: &[TableId],
    ) -> Result<()> {
        for &table in tables {
            let hyper = self.hypers.of_mut(table);
            hyper.step += 1;
            let prepared = Prepared::new(self.schema.table(table)?.optimizer, hyper);
            collect_uses(layout, bags, table, &mut self.scratch.uses);
            let mut first = 0;
            while first < self.scratch.uses.len() {
                let end = self.bring_rows(table, first)?;
                let buffer = built_mut(&mut self.buffer);
                let mut piece = Piece {
                    kernels: self.kernels,
                    layout,
                    bags,
                    table,
                    dim: self.schema.table(table)?.dim as usize,
                    uses: first..end,
                };
                if let Some(weights_grad) = grads.weights.as_deref_mut() {
                    piece.weight_grads(&self.scratch, buffer, grads.output, weights_grad);
                }
                piece.sum(&mut self.scratch, grads.output);
                piece.apply(&self.scratch, buffer, &prepared);
                first = end;
            }
        }
        Ok(())
    }

    // Brings the rows used from `first` on, as many as fit; their starts go to the scratch.
    // Returns the end of their uses.
    fn bring_rows(&mut self, table: TableId, first: usize) -> Result<usize> {
        let buffer = built_mut(&mut self.buffer);
        let (_, words) = buffer.arena(table.0);
        let rows_max = self
            .scratch
            .update_rows_max(self.schema.table(table)?.dim as usize)
            .min(buffer.row_capacity(table.0));
        assert!(self.scratch.misses.is_empty(), "rows of a round before were not filled");
        buffer.begin_round();
        self.scratch.starts.clear();
        let mut end = first;
        'rows: while self.scratch.starts.len() < rows_max {
            let rows = self.scratch.uses[end..].chunk_by(|a, b| a.row == b.row);
            let wanted = TOGETHER.min(rows_max - self.scratch.starts.len());
            let mut counts = [0; TOGETHER];
            let keys = rows.take(wanted).zip(&mut counts).map(|(uses, count)| {
                *count = uses.len();
                RowKey::new(table, RowId(uses[0].row))
            });
            let guesses = buffer.guess(keys);
            if counts[0] == 0 {
                break;
            }
            for (&guess, &count) in guesses.iter().zip(&counts).filter(|(_, &count)| count > 0) {
                let misses = &mut self.scratch.misses;
                match buffer.place_near(guess, Want::Now, &mut self.store, misses)? {
                    Some(slot) => self.scratch.starts.push(slot as usize * words),
                    None => break 'rows,
                }
                end += count;
            }
        }
        assert!(end > first, "a buffer holds at least one row of each length");
        buffer.fill(&mut self.scratch.misses, &self.schema, &mut self.store)?;
        Ok(end)
    }
}

fn uses_of(layout: &FeatureLayout, bags: &Bags<'_>, table: TableId) -> usize {
    let features = layout.features().iter().enumerate();
    features
        .filter(|(_, feature)| feature.table == table)
        .map(|(at, _)| layout.range(bags, at).len())
        .sum()
}

fn collect_uses(layout: &FeatureLayout, bags: &Bags<'_>, table: TableId, uses: &mut Vec<Use>) {
    uses.clear();
    for (at, feature) in layout.features().iter().enumerate() {
        if feature.table != table {
            continue;
        }
        for (bag, bounds) in bags.feature_offsets(at).windows(2).enumerate() {
            let &[start, end] = bounds else { continue };
            for position in start as usize..end as usize {
                let row = bags.indices[position] as u64;
                uses.push(Use { row, position: position as u32, bag: bag as u32 });
            }
        }
    }
    uses.sort_unstable();
}

/// The rows of one table that are in the buffer together, and their uses.
struct Piece<'a> {
    kernels: Kernels,
    layout: &'a FeatureLayout,
    bags: &'a Bags<'a>,
    table: TableId,
    dim: usize,
    uses: std::ops::Range<usize>,
}

impl Piece<'_> {
    // Sums the gradients of each row's uses, feature by feature: position order.
    fn sum(&mut self, scratch: &mut Scratch, grad: &[f32]) {
        scratch.sums.clear();
        scratch.sums.resize(scratch.starts.len() * self.dim, 0.0);
        let mut is_first = true;
        for (at, feature) in self.layout.features().iter().enumerate() {
            if feature.table != self.table {
                continue;
            }
            let range = self.layout.range(self.bags, at);
            let upstream = self.upstream(at, feature, grad);
            group(scratch, self.uses.clone(), &range);
            let row_count = scratch.bounds.len() - 1;
            assert_eq!(row_count, scratch.starts.len(), "each row in the buffer has its uses");
            let Scratch { occurrences, bounds, sums, .. } = &mut *scratch;
            if is_first {
                self.kernels.sum_grads_grouped(&upstream, Groups { occurrences, bounds }, sums);
            } else {
                for (bounds, sum) in bounds.windows(2).zip(sums.chunks_exact_mut(self.dim)) {
                    let &[start, end] = bounds else { continue };
                    self.kernels.add_grads(&upstream, &occurrences[start..end], sum);
                }
            }
            is_first = false;
        }
    }

    fn upstream<'b>(&'b self, at: usize, feature: &Feature, grad: &'b [f32]) -> Upstream<'b> {
        Upstream {
            grad,
            columns: feature.columns,
            pooling: feature.pooling,
            offsets: self.bags.feature_offsets(at),
            weights: self.bags.weights,
        }
    }

    fn apply(&self, scratch: &Scratch, buffer: &mut RowBuffer, prepared: &Prepared) {
        let Scratch { starts, sums, .. } = scratch;
        assert_eq!(sums.len(), starts.len() * self.dim, "each row in the buffer has a sum");
        let arena = buffer.arena_mut(self.table.0);
        self.kernels.apply_rows(prepared, arena, starts, sums);
        for &start in starts {
            buffer.finish_step(self.table.0, start);
        }
    }

    // The gradient of a weight is the row times the bag's gradient, over the count for "mean".
    fn weight_grads(
        &self,
        scratch: &Scratch,
        buffer: &RowBuffer,
        grad: &[f32],
        weights_grad: &mut [f32],
    ) {
        let arena = buffer.arena(self.table.0).0;
        let uses = &scratch.uses[self.uses.clone()];
        let rows = uses.chunk_by(|a, b| a.row == b.row).zip(&scratch.starts);
        for (uses_of_row, &start) in rows {
            let weights = &arena[start..start + self.dim];
            for one in uses_of_row {
                let position = one.position as usize;
                let (at, feature) = self.feature_of(position);
                if feature.pooling == Pooling::None {
                    continue;
                }
                let columns = feature.columns.range(one.bag as usize);
                let mut product = self.kernels.dot(weights, &grad[columns]);
                if feature.pooling == Pooling::Mean {
                    let (offsets, bag) = (self.bags.feature_offsets(at), one.bag as usize);
                    product /= (offsets[bag + 1] - offsets[bag]) as f32;
                }
                weights_grad[position] = product;
            }
        }
    }

    fn feature_of(&self, position: usize) -> (usize, &Feature) {
        let features = self.layout.features();
        let has = |at: &usize| self.layout.range(self.bags, *at).contains(&position);
        let at = (0..features.len()).find(has);
        let Some(at) = at else { panic!("no feature has index {position} of the batch") };
        (at, &features[at])
    }
}

// Lists, row after row, the uses among `uses` whose position is in `range`.
fn group(scratch: &mut Scratch, uses: std::ops::Range<usize>, range: &std::ops::Range<usize>) {
    scratch.occurrences.clear();
    scratch.bounds.clear();
    scratch.bounds.push(0);
    for uses_of_row in scratch.uses[uses].chunk_by(|a, b| a.row == b.row) {
        for one in uses_of_row.iter().filter(|one| range.contains(&(one.position as usize))) {
            scratch.occurrences.push(Occurrence { bag: one.bag, index: one.position });
        }
        scratch.bounds.push(scratch.occurrences.len());
    }
}
