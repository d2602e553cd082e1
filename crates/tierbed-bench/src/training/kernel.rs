//! One step when every row of the batch is in one array: pool, sum gradients, step rows.
//!
//! The same kernels in the same order as the engines: per table, rows are numbered by first
//! appearance, their uses gathered by counting, summed and stepped.

use tierbed_core::{Bags, Error, Result, Schema};
use tierbed_kernels::{
    BagRange, Feature, FeaturePlan, Groups, Hyper, Kernels, Occurrence, Pooling, Prepared, Rows,
    Upstream,
};

const NO_ROW: u32 = u32::MAX;
/// Rows whose gradients are summed before they are applied, as the engines do.
const PIECE_ROWS: usize = 512;

/// Work arrays of steps.
#[derive(Debug)]
pub(crate) struct StepKernel {
    kernels: Kernels,
    features: FeaturePlan,
    schema: Schema,
    words: usize,
    step: u64,
    output: Vec<f32>,
    grad: Vec<f32>,
    starts: Vec<usize>,
    row_of_entry: Vec<u32>,
    entries: Vec<u32>,
    row_of_index: Vec<u32>,
    row_starts: Vec<usize>,
    bounds: Vec<usize>,
    occurrences: Vec<Occurrence>,
    sums: Vec<f32>,
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
    pub(crate) fn new(schema: Schema, features: FeaturePlan, batch_len: usize) -> Self {
        let len = batch_len * features.output_dim();
        Self {
            kernels: Kernels::detect(),
            words: schema.tables().first().map_or(0, |table| table.record_words()),
            output: vec![0.0; len],
            grad: synthetic_grad(len),
            features,
            schema,
            step: 0,
            starts: Vec::new(),
            row_of_entry: Vec::new(),
            entries: Vec::new(),
            row_of_index: Vec::new(),
            row_starts: Vec::new(),
            bounds: Vec::new(),
            occurrences: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// The pooled vectors of the last batch, `[B, F * D]`.
    #[cfg(test)]
    pub(crate) fn output(&self) -> &[f32] {
        &self.output
    }

    /// Looks the batch up and steps its rows in `arena`.
    pub(crate) fn step(
        &mut self,
        arena: &mut [f32],
        bags: &Bags<'_>,
        places: Places<'_>,
    ) -> Result<()> {
        self.step += 1;
        if self.row_of_entry.len() < places.slots.len() {
            self.row_of_entry.resize(places.slots.len(), NO_ROW);
        }
        let features = self.features.clone();
        self.output.fill(0.0);
        for (at, feature) in features.features().iter().enumerate() {
            let range = features.range(bags, at);
            let entries = places.entries.get(range).unwrap_or(&[]);
            self.pool(arena, bags.feature_offsets(at), feature, (entries, places.slots))?;
        }
        for (at, feature) in features.features().iter().enumerate() {
            let range = features.range(bags, at);
            let entries = places.entries.get(range).unwrap_or(&[]);
            self.number_rows(entries, places.slots);
            self.group_rows(bags.feature_offsets(at));
            self.apply(arena, bags.feature_offsets(at), feature)?;
        }
        Ok(())
    }

    fn pool(
        &mut self,
        arena: &[f32],
        offsets: &[i64],
        feature: &Feature,
        (entries, slots): (&[u32], &[u32]),
    ) -> Result<()> {
        self.starts.clear();
        for &entry in entries {
            let slot = slots.get(entry as usize);
            let slot = slot.ok_or_else(|| Error::corruption("timeline names an unknown entry"))?;
            self.starts.push(*slot as usize * self.words);
        }
        let rows = Rows { arena, starts: &self.starts, weights: None };
        self.kernels.pool_add(rows, BagRange::whole(offsets), feature.columns, &mut self.output);
        Ok(())
    }

    fn number_rows(&mut self, entries: &[u32], slots: &[u32]) {
        self.row_starts.clear();
        self.entries.clear();
        self.row_of_index.clear();
        for &entry in entries {
            let Some(row) = self.row_of_entry.get_mut(entry as usize) else { continue };
            if *row == NO_ROW {
                *row = self.row_starts.len() as u32;
                let slot = slots.get(entry as usize).copied().unwrap_or(0);
                self.row_starts.push(slot as usize * self.words);
                self.entries.push(entry);
            }
            self.row_of_index.push(*row);
        }
        for &entry in &self.entries {
            if let Some(row) = self.row_of_entry.get_mut(entry as usize) {
                *row = NO_ROW;
            }
        }
    }

    fn group_rows(&mut self, offsets: &[i64]) {
        self.bounds.clear();
        self.bounds.resize(self.row_starts.len() + 2, 0);
        for &row in &self.row_of_index {
            if let Some(count) = self.bounds.get_mut(row as usize + 2) {
                *count += 1;
            }
        }
        let mut sum = 0;
        for bound in &mut self.bounds {
            sum += *bound;
            *bound = sum;
        }
        self.occurrences.resize(self.row_of_index.len(), Occurrence { bag: 0, index: 0 });
        let first = offsets.first().copied().unwrap_or(0) as u32;
        for (bag, &row) in self.row_of_index.iter().enumerate() {
            let Some(place) = self.bounds.get_mut(row as usize + 1) else { continue };
            if let Some(use_of_row) = self.occurrences.get_mut(*place) {
                *use_of_row = Occurrence { bag: bag as u32, index: first + bag as u32 };
            }
            *place += 1;
        }
        self.bounds.truncate(self.row_starts.len() + 1);
    }

    fn apply(&mut self, arena: &mut [f32], offsets: &[i64], feature: &Feature) -> Result<()> {
        let optimizer = self.schema.table(feature.table)?.optimizer;
        let hyper = Hyper { lr: 0.01, step: self.step, ..Hyper::default() };
        let prepared = Prepared::new(optimizer, &hyper);
        let dim = feature.columns.dim;
        let upstream = Upstream {
            grad: &self.grad,
            columns: feature.columns,
            pooling: Pooling::Sum,
            offsets,
            weights: None,
        };
        for first in (0..self.row_starts.len()).step_by(PIECE_ROWS) {
            let end = (first + PIECE_ROWS).min(self.row_starts.len());
            let bounds = self.bounds.get(first..=end).unwrap_or(&[0]);
            let groups = Groups { occurrences: &self.occurrences, bounds };
            self.sums.resize((end - first) * dim, 0.0);
            self.kernels.sum_grads_grouped(&upstream, groups, &mut self.sums);
            let starts = self.row_starts.get(first..end).unwrap_or(&[]);
            self.kernels.apply_rows(&prepared, arena, starts, &self.sums);
            for &start in starts {
                if let Some(count) = arena.get_mut(start + self.words - 1) {
                    *count = f32::from_bits(count.to_bits().saturating_add(1));
                }
            }
        }
        Ok(())
    }
}
