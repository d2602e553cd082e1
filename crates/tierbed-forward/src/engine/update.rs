//! Gradients in, rows stepped in their places.
//!
//! Per table: the distinct rows of the batch are numbered by first appearance, their uses are
//! gathered in position order by counting, summed, and applied in one step per row. Additions
//! happen in the order `tierbed::Engine` adds in, and rows do not depend on each other, so the
//! bits are the same.

use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_kernels::{Feature, FeaturePlan, Groups, Occurrence, Pooling, Prepared, Upstream};

use super::scratch::UPDATE_ROWS_MAX;
use super::ForwardEngine;
use crate::plan::Batch;

const NO_ROW: u32 = u32::MAX;

/// The gradients of one batch.
#[derive(Debug)]
pub struct Grads<'a> {
    /// Of the output: `[B, output_dim]`, or `[E, D]` without pooling.
    pub output: &'a [f32],
    /// Receives the gradient of the weights, `[E]`, from the rows before the step.
    pub weights: Option<&'a mut [f32]>,
}

/// What one table's step looks at.
#[derive(Clone, Copy)]
struct Work<'a> {
    plan: &'a FeaturePlan,
    bags: &'a Bags<'a>,
    table: TableId,
    dim: usize,
    grad: &'a [f32],
}

impl<'a> Work<'a> {
    /// Returns the features of the table, with their positions.
    fn features(self) -> impl Iterator<Item = (usize, &'a Feature)> {
        let features = self.plan.features().iter().enumerate();
        features.filter(move |(_, feature)| feature.table == self.table)
    }

    fn upstream(&self, at: usize, feature: &Feature) -> Upstream<'a> {
        Upstream {
            grad: self.grad,
            columns: feature.columns,
            pooling: feature.pooling,
            offsets: self.bags.feature_offsets(at),
            weights: self.bags.weights,
        }
    }
}

impl ForwardEngine {
    /// Applies one optimizer step for `bags`, which are the next batch of the plan, and goes on
    /// to the batch after it.
    ///
    /// # Errors
    /// `Invalid` for a batch that is not the planned one, or shapes out of range: nothing is
    /// changed then. An error of the disk poisons the engine: reopen it at the last checkpoint.
    pub fn update(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        mut grads: Grads<'_>,
    ) -> Result<()> {
        self.poison.check()?;
        plan.check(&self.schema, bags, grads.output.len())?;
        check_weights_grad(bags, &grads)?;
        let batch = self.find_batch(plan, bags)?;
        let mut tables: Vec<TableId> =
            plan.features().iter().map(|feature| feature.table).collect();
        tables.sort_unstable();
        tables.dedup();
        for table in tables {
            let dim = self.schema.table(table)?.dim as usize;
            let work = Work { plan, bags, table, dim, grad: grads.output };
            let result = self.step_table(work, batch, grads.weights.as_deref_mut());
            self.poison.on_any(result)?;
        }
        self.counters.step_count += 1;
        self.finish_batch()
    }

    fn step_table(
        &mut self,
        work: Work<'_>,
        batch: Batch,
        weights_grad: Option<&mut [f32]>,
    ) -> Result<()> {
        let Some(hyper) = self.hypers.get_mut(work.table.0 as usize) else { return Ok(()) };
        hyper.step += 1;
        let prepared = Prepared::new(self.schema.table(work.table)?.optimizer, hyper);
        self.number_rows(work, batch)?;
        self.counters.row_update_count += self.scratch.starts.len() as u64;
        if let Some(weights_grad) = weights_grad {
            self.weight_grads(work, weights_grad);
        }
        let row_count = self.scratch.starts.len();
        let is_shared = work.features().count() > 1;
        let piece_rows = if is_shared { row_count.max(1) } else { UPDATE_ROWS_MAX };
        if !is_shared {
            self.group_feature(work, 0);
        }
        for first in (0..row_count).step_by(piece_rows) {
            let rows = first..(first + piece_rows).min(row_count);
            self.sum_rows(work, rows.clone(), is_shared);
            self.apply_rows(work.table, rows, &prepared);
        }
        Ok(())
    }

    // Numbers the distinct rows of the table; `starts` gets their records.
    fn number_rows(&mut self, work: Work<'_>, mut batch: Batch) -> Result<()> {
        let current = &self.river.current;
        let table = work.table.0 as usize;
        let Some(entries) = current.plan.tables().get(table) else { return Ok(()) };
        let words = self.river.home(table).map_or(0, |home| home.words);
        let first = current.table_start(table);
        let scratch = &mut self.scratch;
        if scratch.row_of_entry.len() < entries.count as usize {
            scratch.row_of_entry.resize(entries.count as usize, NO_ROW);
        }
        let row_of_entry =
            scratch.row_of_entry.get_mut(..entries.count as usize).unwrap_or(&mut []);
        scratch.starts.clear();
        scratch.entries.clear();
        scratch.row_of_index.clear();
        let unknown = || Error::corruption("plan names an unknown entry");
        for (at, feature) in work.plan.features().iter().enumerate() {
            let count = work.plan.range(work.bags, at).len();
            let mapping = current.plan.mapping(&mut batch, feature.table.0 as usize, count);
            if feature.table != work.table {
                continue;
            }
            for index in 0..count {
                let entry = mapping.get(index).ok_or_else(unknown)?;
                let row = row_of_entry.get_mut(entry as usize).ok_or_else(unknown)?;
                if *row == NO_ROW {
                    *row = scratch.starts.len() as u32;
                    scratch.starts.push(first + entry as usize * words);
                    scratch.entries.push(entry as u32);
                }
                scratch.row_of_index.push(*row);
            }
        }
        for &entry in &scratch.entries {
            if let Some(row) = row_of_entry.get_mut(entry as usize) {
                *row = NO_ROW;
            }
        }
        Ok(())
    }

    // Gathers the uses of each row in the table's feature number `nth`, in position order.
    fn group_feature(&mut self, work: Work<'_>, nth: usize) {
        let scratch = &mut self.scratch;
        let mut skipped = 0;
        for (number, (at, _)) in work.features().enumerate() {
            let range = work.plan.range(work.bags, at);
            if number < nth {
                skipped += range.len();
                continue;
            }
            let rows = scratch.row_of_index.get(skipped..skipped + range.len()).unwrap_or(&[]);
            let row_count = scratch.starts.len();
            // bounds[r + 1] counts row r, then points to its next free place, then to its end.
            scratch.bounds.clear();
            scratch.bounds.resize(row_count + 2, 0);
            for &row in rows {
                if let Some(count) = scratch.bounds.get_mut(row as usize + 2) {
                    *count += 1;
                }
            }
            let mut sum = 0;
            for bound in &mut scratch.bounds {
                sum += *bound;
                *bound = sum;
            }
            scratch.occurrences.clear();
            scratch.occurrences.resize(rows.len(), Occurrence { bag: 0, index: 0 });
            let mut rows = rows.iter();
            for (bag, bounds) in work.bags.feature_offsets(at).windows(2).enumerate() {
                let &[start, end] = bounds else { continue };
                for (index, &row) in (start as u32..end as u32).zip(rows.by_ref()) {
                    let Some(place) = scratch.bounds.get_mut(row as usize + 1) else { continue };
                    if let Some(use_of_row) = scratch.occurrences.get_mut(*place) {
                        *use_of_row = Occurrence { bag: bag as u32, index };
                    }
                    *place += 1;
                }
            }
            scratch.bounds.truncate(row_count + 1);
            return;
        }
    }

    fn sum_rows(&mut self, work: Work<'_>, rows: std::ops::Range<usize>, is_shared: bool) {
        // Old sums are overwritten by the first feature.
        self.scratch.sums.resize(rows.len() * work.dim, 0.0);
        for (nth, (at, feature)) in work.features().enumerate() {
            if is_shared {
                self.group_feature(work, nth);
            }
            let upstream = work.upstream(at, feature);
            let scratch = &mut self.scratch;
            let bounds = scratch.bounds.get(rows.start..=rows.end).unwrap_or(&[]);
            let (occurrences, sums) = (&scratch.occurrences, &mut scratch.sums);
            if nth == 0 {
                self.kernels.sum_grads_grouped(&upstream, Groups { occurrences, bounds }, sums);
                continue;
            }
            for (bounds, sum) in bounds.windows(2).zip(sums.chunks_exact_mut(work.dim)) {
                let &[start, end] = bounds else { continue };
                let uses_of_row = occurrences.get(start..end).unwrap_or(&[]);
                self.kernels.add_grads(&upstream, uses_of_row, sum);
            }
        }
    }

    fn apply_rows(&mut self, table: TableId, rows: std::ops::Range<usize>, prepared: &Prepared) {
        let Some(home) = self.river.home(table.0 as usize) else { return };
        let arena = self.river.current.arena_mut();
        let starts = self.scratch.starts.get(rows).unwrap_or(&[]);
        self.kernels.apply_rows(prepared, arena, starts, &self.scratch.sums);
        for &start in starts {
            if let Some(count) = arena.get_mut(start + home.words - 1) {
                *count = f32::from_bits(count.to_bits().saturating_add(1));
            }
        }
    }

    // The gradient of a weight is the row times the bag's gradient, over the count for "mean".
    fn weight_grads(&self, work: Work<'_>, weights_grad: &mut [f32]) {
        let arena = self.river.current.arena();
        let mut rows = self.scratch.row_of_index.iter();
        for (at, feature) in work.features() {
            for (bag, bounds) in work.bags.feature_offsets(at).windows(2).enumerate() {
                let &[start, end] = bounds else { continue };
                for (index, &row) in (start as usize..end as usize).zip(rows.by_ref()) {
                    if feature.pooling == Pooling::None {
                        continue;
                    }
                    let first = self.scratch.starts.get(row as usize).copied().unwrap_or(0);
                    let weights = arena.get(first..first + work.dim).unwrap_or(&[]);
                    let columns = feature.columns.range(bag);
                    let grad = work.grad.get(columns).unwrap_or(&[]);
                    let mut product = self.kernels.dot(weights, grad);
                    if feature.pooling == Pooling::Mean {
                        product /= (end - start) as f32;
                    }
                    if let Some(place) = weights_grad.get_mut(index) {
                        *place = product;
                    }
                }
            }
        }
    }
}

fn check_weights_grad(bags: &Bags<'_>, grads: &Grads<'_>) -> Result<()> {
    let Some(weights_grad) = &grads.weights else { return Ok(()) };
    if bags.weights.is_none() || weights_grad.len() != bags.indices.len() {
        return Err(Error::invalid(
            "the gradient of weights needs weights and one value per index",
        )
        .with("indices", bags.indices.len())
        .with("found", weights_grad.len()));
    }
    Ok(())
}
