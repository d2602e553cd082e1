//! One step when every row of the batch is in one array: pool, sum gradients, step rows.
//!
//! The same kernels on the same batches as the forward order; here a row's place is looked up.

use tierbed_core::{Bags, Result, Schema};
use tierbed_kernels::{FeatureLayout, FeatureRows, FeatureStep, Hyper, Kernels, Prepared, RowSums};

/// Work arrays of steps.
#[derive(Debug)]
pub(crate) struct StepKernel {
    kernels: Kernels,
    features: FeatureLayout,
    schema: Schema,
    words: usize,
    step: u64,
    output: Vec<f32>,
    grad: Vec<f32>,
    sums: RowSums,
}

/// Where the rows of a batch lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places<'a> {
    /// Entry of each index, `[E]`.
    pub(crate) entries: &'a [u32],
    /// Slot of each entry.
    pub(crate) slots: &'a [u32],
}

/// A gradient that costs nothing to make and is not all the same.
pub(crate) fn synthetic_grad(len: usize) -> Vec<f32> {
    (0..len).map(|at| ((at as u32).wrapping_mul(2_654_435_761) >> 24) as f32 * 1e-4).collect()
}

impl StepKernel {
    pub(crate) fn new(schema: Schema, features: FeatureLayout, batch_len: usize) -> Self {
        let len = batch_len * features.output_dim();
        Self {
            kernels: Kernels::detect(),
            words: schema.tables().first().map_or(0, |table| table.record_words()),
            output: vec![0.0; len],
            grad: synthetic_grad(len),
            features,
            schema,
            step: 0,
            sums: RowSums::default(),
        }
    }

    /// The pooled vectors of the last batch, `[B, F * D]`.
    #[cfg(test)]
    pub(crate) fn output(&self) -> &[f32] {
        &self.output
    }

    fn rows<'a>(&self, bags: &Bags<'a>, places: Places<'a>) -> Vec<FeatureRows<'a>> {
        let rows = |(at, feature): (usize, &tierbed_kernels::Feature)| FeatureRows {
            numbers: places.entries.get(self.features.range(bags, at)).unwrap_or(&[]),
            places: tierbed_kernels::Places {
                first: 0,
                words: self.words,
                slots: Some(places.slots),
            },
            offsets: bags.feature_offsets(at),
            weights: None,
            pooling: feature.pooling,
            columns: feature.columns,
        };
        self.features.features().iter().enumerate().map(rows).collect()
    }

    /// Pools the rows of the batch.
    pub(crate) fn lookup(&mut self, arena: &[f32], bags: &Bags<'_>, places: Places<'_>) {
        let rows = self.rows(bags, places);
        self.kernels.pool_batch(arena, &rows, &mut self.output);
    }

    /// Sums the gradients of each row of the batch and steps it in `arena`.
    pub(crate) fn update(
        &mut self,
        arena: &mut [f32],
        bags: &Bags<'_>,
        places: Places<'_>,
    ) -> Result<()> {
        self.step += 1;
        let hyper = Hyper { lr: 0.01, step: self.step, ..Hyper::default() };
        let prepared = |feature: &tierbed_kernels::Feature| {
            Ok(Prepared::new(self.schema.table(feature.table)?.optimizer, &hyper))
        };
        let steps: Vec<_> = self.features.features().iter().map(prepared).collect::<Result<_>>()?;
        // Entries are numbered through all tables, and every feature has a table of its own.
        let rows = self.rows(bags, places).into_iter().zip(self.features.features()).zip(&steps);
        let step = |((rows, feature), step): ((_, &tierbed_kernels::Feature), _)| FeatureStep {
            rows,
            table: feature.table,
            step,
            number_first: 0,
            number_count: places.slots.len(),
        };
        let features: Vec<_> = rows.map(step).collect();
        self.kernels.step_batch(&self.grad, &features, &mut self.sums, arena);
        Ok(())
    }
}
