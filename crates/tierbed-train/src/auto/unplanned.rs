//! Unplanned rows: copies of the weights of rows that the plan does not bring now, for reading.
//!
//! Copies are right until the next update, which clears them.

#![expect(clippy::indexing_slicing, reason = "batches were checked, and rows to pool are here")]

use hashbrown::HashMap;
use tierbed_core::{Bags, Budget, Reservation, Result, RowKey, Schema};
use tierbed_kernels::{init_record, BagRange, FeatureLayout, Kernels, Pooling, Rows};

/// Bytes per row besides its weights: key, place and the map's spare room.
const ROW_BYTES: u64 = 64;

/// See the module documentation.
pub(crate) struct UnplannedRows {
    starts: HashMap<RowKey, usize>,
    weights: Vec<f32>,
    scratch: Vec<usize>,
    memory: Reservation,
    budget: Budget,
}

impl UnplannedRows {
    pub(crate) fn new(budget: &Budget) -> Result<Self> {
        Ok(Self {
            starts: HashMap::new(),
            weights: Vec::new(),
            scratch: Vec::new(),
            memory: budget.reserve("rows aside", 0)?,
            budget: budget.clone(),
        })
    }

    pub(crate) fn has_rows(&self) -> bool {
        !self.starts.is_empty()
    }

    /// Forgets all rows and gives their memory back.
    pub(crate) fn clear(&mut self) {
        if self.starts.is_empty() && self.memory.bytes() == 0 {
            return;
        }
        self.starts = HashMap::new();
        self.weights = Vec::new();
        self.scratch = Vec::new();
        // Giving back cannot fail.
        let _ = self.memory.resize(0);
    }

    pub(crate) fn has_all(&self, plan: &FeatureLayout, bags: &Bags<'_>) -> bool {
        keys(plan, bags).all(|key| self.starts.contains_key(&key))
    }

    /// Makes places for the rows of `batches`, nearest first, with their initial values; returns
    /// how many batches fit, and whether there are rows to be [filled](Self::fill).
    pub(crate) fn place(
        &mut self,
        schema: &Schema,
        plan: &FeatureLayout,
        batches: &[Bags<'_>],
    ) -> Result<(usize, bool)> {
        let before = self.starts.len();
        let mut record = Vec::new();
        for (fitted, bags) in batches.iter().enumerate() {
            let mut fresh: Vec<RowKey> =
                keys(plan, bags).filter(|key| !self.starts.contains_key(key)).collect();
            fresh.sort_unstable();
            fresh.dedup();
            let mut bytes = self.memory.bytes() + 8 * bags.indices.len() as u64;
            for key in &fresh {
                bytes += ROW_BYTES + 8 * u64::from(schema.table(key.table)?.dim);
            }
            if bytes > self.memory.bytes() + self.budget.free_bytes() {
                return Ok((fitted, self.starts.len() > before));
            }
            self.memory.resize(bytes)?;
            for key in fresh {
                let table = schema.table(key.table)?;
                record.resize(table.record_words(), 0.0);
                init_record(table, key.row.0, &mut record);
                self.starts.insert(key, self.weights.len());
                self.weights.extend(record.iter().take(table.dim as usize));
            }
        }
        Ok((batches.len(), self.starts.len() > before))
    }

    /// Returns the words that rows take; those placed later begin behind them.
    pub(crate) fn word_count(&self) -> usize {
        self.weights.len()
    }

    /// Returns the rows placed from word `first` on, ascending; `None` when they are more than
    /// `rows_max`.
    pub(crate) fn rows_from(&self, first: usize, rows_max: usize) -> Option<Vec<RowKey>> {
        let is_later = |entry: &(&RowKey, &usize)| *entry.1 >= first;
        if self.starts.iter().filter(is_later).nth(rows_max).is_some() {
            return None;
        }
        let mut rows: Vec<RowKey> = self.starts.iter().filter(is_later).map(|at| *at.0).collect();
        rows.sort_unstable();
        Some(rows)
    }

    /// Takes the weights of a row that was ever used.
    pub(crate) fn fill(&mut self, key: RowKey, weights: &[f32]) {
        // A row that no batch asked for is not kept.
        let Some(&start) = self.starts.get(&key) else { return };
        let end = start + weights.len();
        assert!(end <= self.weights.len(), "row {key:?} is longer than its place");
        self.weights[start..end].copy_from_slice(weights);
    }

    /// Pools rows, which [are all here](Self::has_all), into `out`, as the engines do: same
    /// kernels, same order.
    pub(crate) fn pool(
        &mut self,
        kernels: Kernels,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) {
        debug_assert!(self.has_all(plan, bags), "a row to pool was not copied aside");
        out.fill(0.0);
        for (at, feature) in plan.features().iter().enumerate() {
            let range = plan.range(bags, at);
            let ids = &bags.indices[range.clone()];
            let start = |&id: &i64| self.starts[&feature.row_key(id)];
            self.scratch.clear();
            self.scratch.extend(ids.iter().map(start));
            let (arena, starts) = (self.weights.as_slice(), self.scratch.as_slice());
            let columns = feature.columns;
            if !plan.is_pooled() {
                let rows = range.start * columns.dim..range.end * columns.dim;
                kernels.gather_rows(arena, starts, columns.dim, &mut out[rows]);
                continue;
            }
            let offsets = bags.feature_offsets(at);
            let weights = bags.weights.map(|weights| &weights[range]);
            let rows = Rows { arena, starts, weights };
            kernels.pool_add(rows, BagRange::whole(offsets), columns, out);
            if feature.pooling == Pooling::Mean {
                kernels.mean_scale(offsets, columns, out);
            }
        }
    }
}

fn keys<'a>(plan: &'a FeatureLayout, bags: &'a Bags<'_>) -> impl Iterator<Item = RowKey> + 'a {
    plan.features().iter().enumerate().flat_map(move |(at, feature)| {
        let ids = &bags.indices[plan.range(bags, at)];
        ids.iter().map(|&id| feature.row_key(id))
    })
}
