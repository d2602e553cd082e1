//! Gradients in, rows stepped in their places.
//!
//! Each row is stepped once per batch, by the sum of its gradients, added in the order in which
//! `crate::window::WindowEngine` adds; rows do not depend on each other, so the bits are the same.

#![expect(
    clippy::indexing_slicing,
    reason = "the batch is the planned one, whose rows are in memory"
)]

use tierbed_core::{Bags, Result};
use tierbed_kernels::{
    not_finite, Feature, FeatureLayout, FeatureRows, FeatureStep, Grads, Hyper, Pooling, Prepared,
};

use super::lookup::feature_rows;
use super::PlannedEngine;
use crate::batch_token::BatchToken;

/// Bags, and the entry of each of their indices.
#[derive(Clone, Copy)]
pub(super) struct Unpacked<'a> {
    pub(super) entries: &'a [u32],
    pub(super) plan: &'a FeatureLayout,
    pub(super) bags: &'a Bags<'a>,
}

impl PlannedEngine {
    /// Applies one optimizer step for `bags`, which are the next batch of the plan, and goes on
    /// to the batch after it. With the token of its lookup no id is looked at again.
    ///
    /// # Errors
    /// `Invalid` for a batch that is not the planned one, or shapes out of range: nothing is
    /// changed then. An error of the disk poisons the engine: reopen it at the last checkpoint.
    pub fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        mut grads: Grads<'_>,
        found: Option<BatchToken>,
    ) -> Result<()> {
        grads.check_weights(bags)?;
        self.find_again(plan, bags, grads.output.len(), found)?;
        self.bring_back()?;
        let noted = self.note_window();
        self.poison.on_any(noted)?;
        let steps = self.next_steps(plan)?;
        if let Some(weights_grad) = grads.weights.as_deref_mut() {
            for rows in feature_rows(&self.pipeline, &self.scratch.entries, plan, bags) {
                self.weight_grads(&rows, grads.output, weights_grad);
            }
        }
        let entries = std::mem::take(&mut self.scratch.entries);
        let batch = Unpacked { entries: &entries, plan, bags };
        let stepped = self.step_rows(batch, &steps, grads.output);
        self.scratch.entries = entries;
        stepped?;
        self.counters.step_count += 1;
        self.finish_batch()
    }

    /// Counts a step for every table of `plan`.
    pub(super) fn count_step(&mut self, plan: &FeatureLayout) {
        for table in plan.tables() {
            self.hypers.of_mut(table).step += 1;
        }
    }

    /// Returns the steps that come next, feature after feature.
    pub(super) fn next_steps(&self, plan: &FeatureLayout) -> Result<Vec<Prepared>> {
        let prepared = |feature: &Feature| {
            let hyper = self.hypers.of(feature.table);
            let hyper = Hyper { step: hyper.step + 1, ..*hyper };
            Ok(Prepared::new(self.schema.table(feature.table)?.optimizer, &hyper))
        };
        plan.features().iter().map(prepared).collect()
    }

    /// Steps the rows of `bags`, whose `entries` are one per index, and counts it.
    ///
    /// # Errors
    /// `Invalid` for a gradient that holds nan or inf: nothing is changed then.
    pub(super) fn step_rows(
        &mut self,
        batch: Unpacked<'_>,
        steps: &[Prepared],
        grad: &[f32],
    ) -> Result<()> {
        let Unpacked { entries, plan, bags } = batch;
        assert_eq!(steps.len(), plan.features().len(), "every feature has a step");
        let current = &self.pipeline.current.plan;
        let rows = feature_rows(&self.pipeline, entries, plan, bags).into_iter();
        let mut features = Vec::with_capacity(steps.len());
        for ((feature, rows), step) in plan.features().iter().zip(rows).zip(steps) {
            let table = feature.table;
            let entries = &current.tables()[table.0 as usize];
            let (number_first, number_count) = (entries.first as usize, entries.count as usize);
            features.push(FeatureStep { rows, table, step, number_first, number_count });
        }
        let arena = self.pipeline.current.arena_mut();
        let stepped = self.kernels.step_batch(grad, &features, &mut self.scratch.sums, arena);
        let row_count = stepped.ok_or_else(not_finite)?;
        self.counters.row_update_count += row_count as u64;
        self.count_step(plan);
        Ok(())
    }

    /// The gradient of a weight is the row times the bag's gradient, over the count for "mean".
    pub(super) fn weight_grads(
        &self,
        rows: &FeatureRows<'_>,
        grad: &[f32],
        weights_grad: &mut [f32],
    ) {
        if rows.pooling == Pooling::None {
            return;
        }
        let arena = self.pipeline.current.arena();
        let mut numbers = rows.numbers.iter();
        for (bag, bounds) in rows.offsets.windows(2).enumerate() {
            let &[start, end] = bounds else { continue };
            let grad = &grad[rows.columns.range(bag)];
            for (index, &number) in (start as usize..end as usize).zip(numbers.by_ref()) {
                let first = rows.places.start(number);
                let weights = &arena[first..first + rows.columns.dim];
                let mut product = self.kernels.dot(weights, grad);
                if rows.pooling == Pooling::Mean {
                    product /= (end - start) as f32;
                }
                weights_grad[index] = product;
            }
        }
    }
}
