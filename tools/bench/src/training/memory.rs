//! Every row in one array: what the kernels alone cost.
//!
//! The same kernels on the same batches as the forward order; the rows of a batch are numbered
//! while it is read, which is not measured.

use std::mem::take;

use tierbed_core::{Bags, Result, Schema};
use tierbed_io::WordBuf;
use tierbed_kernels::{
    init_record, Feature, FeatureLayout, FeatureRows, FeatureStep, Hyper, Kernels, Places,
    Prepared, RowSums,
};

use super::job::hyper;

/// The rows, and those of the batch read last.
pub(crate) struct Memory {
    kernels: Kernels,
    schema: Schema,
    words: usize,
    arena: WordBuf,
    step: u64,
    sums: RowSums,
    /// Rows of the batch, by number through all tables, ascending.
    rows: Vec<u32>,
    /// Place in `rows` of each index, `[E]`.
    numbers: Vec<u32>,
}

impl Memory {
    pub(crate) fn new(schema: Schema) -> Self {
        let words = schema.tables().first().map_or(1, |table| table.record_words());
        let rows: u64 = schema.tables().iter().map(|table| table.row_count).sum();
        // In large pages, as the rows of the forward order lie.
        let mut arena = WordBuf::new(rows as usize * words);
        let mut records = arena.chunks_exact_mut(words);
        for table in schema.tables() {
            for (row, record) in (0..table.row_count).zip(&mut records) {
                init_record(table, row, record);
            }
        }
        Self {
            kernels: Kernels::detect(),
            schema,
            words,
            arena,
            step: 0,
            sums: RowSums::new(u64::MAX),
            rows: Vec::new(),
            numbers: Vec::new(),
        }
    }

    /// Numbers the distinct rows of `bags`, of which every table has as many indices.
    #[expect(clippy::indexing_slicing, reason = "positions are those of the batch")]
    pub(crate) fn number_rows(&mut self, bags: &Bags<'_>) {
        let per_table = bags.indices.len() / self.schema.tables().len();
        let mut order = Vec::with_capacity(bags.indices.len());
        let mut first = 0;
        for (table, ids) in self.schema.tables().iter().zip(bags.indices.chunks(per_table)) {
            order.extend(ids.iter().map(|id| first + *id as u32).zip(order.len()..));
            first += table.row_count as u32;
        }
        order.sort_unstable();
        self.rows.clear();
        self.numbers.resize(order.len(), 0);
        for same in order.chunk_by(|a, b| a.0 == b.0) {
            for (_, position) in same {
                self.numbers[*position] = self.rows.len() as u32;
            }
            self.rows.extend(same.first().map(|(row, _)| *row));
        }
    }

    /// Pools the rows of the batch into `out`.
    pub(crate) fn lookup(&self, features: &FeatureLayout, bags: &Bags<'_>, out: &mut [f32]) {
        let rows = self.rows_of(features, bags);
        self.kernels.pool_batch(&self.arena, &rows, out);
    }

    /// Sums the gradients of each row of the batch and steps it.
    pub(crate) fn update(
        &mut self,
        features: &FeatureLayout,
        bags: &Bags<'_>,
        grad: &[f32],
    ) -> Result<()> {
        self.step += 1;
        let hyper = Hyper { step: self.step, ..hyper() };
        let prepared = |feature: &Feature| {
            Ok(Prepared::new(self.schema.table(feature.table)?.optimizer, &hyper))
        };
        let steps: Vec<_> = features.features().iter().map(prepared).collect::<Result<_>>()?;
        let (mut arena, mut sums) = (take(&mut self.arena), take(&mut self.sums));
        // Rows are numbered through all tables, and every feature has a table of its own.
        let rows = self.rows_of(features, bags).into_iter().zip(features.features()).zip(&steps);
        let step = |((rows, feature), step): ((_, &Feature), _)| FeatureStep {
            rows,
            table: feature.table,
            step,
            number_first: 0,
            number_count: self.rows.len(),
        };
        let features: Vec<_> = rows.map(step).collect();
        let stepped = self.kernels.step_batch(grad, &features, &mut sums, &mut arena);
        assert!(stepped.is_some(), "the gradient of the bench is finite");
        (self.arena, self.sums) = (arena, sums);
        Ok(())
    }

    fn rows_of<'a>(&'a self, features: &FeatureLayout, bags: &Bags<'a>) -> Vec<FeatureRows<'a>> {
        let rows = |(at, feature): (usize, &Feature)| FeatureRows {
            numbers: self.numbers.get(features.range(bags, at)).unwrap_or(&[]),
            places: Places { first: 0, words: self.words, slots: Some(&self.rows) },
            offsets: bags.feature_offsets(at),
            weights: None,
            pooling: feature.pooling,
            columns: feature.columns,
        };
        features.features().iter().enumerate().map(rows).collect()
    }
}
