//! The features of a batch: table, pooling and output columns of each.
//!
//! Checked once when it is made and used for many batches; training and serving share it, so a
//! batch means the same to both.

#![expect(clippy::indexing_slicing, reason = "checked bags have offsets within their indices")]

use tierbed_core::store::out_of_range;
use tierbed_core::{Bags, Error, Result, RowId, RowKey, Schema, TableId};

use crate::layout::{Columns, Pooling};

/// One feature of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feature {
    /// Table the feature reads.
    pub table: TableId,
    /// How its bags become vectors.
    pub pooling: Pooling,
    /// Where its vectors lie in the output.
    pub columns: Columns,
}

/// The features of a collection, in the order of a batch's bags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureLayout {
    features: Vec<Feature>,
    output_dim: usize,
    is_pooled: bool,
}

impl Feature {
    /// Names the row of a checked id.
    #[must_use]
    pub fn row_key(&self, id: i64) -> RowKey {
        RowKey::new(self.table, RowId(id.unsigned_abs()))
    }
}

impl FeatureLayout {
    /// Lays `features` (table and pooling) out, columns side by side in order.
    ///
    /// Either every feature is pooled, output `[B, sum of dims]`, or none is, output `[E, D]`.
    ///
    /// # Errors
    /// `Invalid` for no features, unknown tables, mixed pooling, or unequal dims without pooling.
    pub fn new(schema: &Schema, features: &[(TableId, Pooling)]) -> Result<Self> {
        let is_pooled = features.iter().any(|(_, pooling)| *pooling != Pooling::None);
        let mut laid_out = Vec::with_capacity(features.len());
        let mut width = 0;
        for &(table, pooling) in features {
            let dim = schema.table(table)?.dim as usize;
            if is_pooled && pooling == Pooling::None {
                return Err(Error::invalid("pooled and unpooled features cannot share a plan"));
            }
            if !is_pooled && width != 0 && width != dim {
                return Err(Error::invalid("features without pooling need equal dims")
                    .with("dims", format_args!("{width} and {dim}")));
            }
            let first = if is_pooled { width } else { 0 };
            width = first + dim;
            laid_out.push(Feature { table, pooling, columns: Columns { stride: 0, first, dim } });
        }
        if laid_out.is_empty() {
            return Err(Error::invalid("a plan needs at least one feature"));
        }
        for feature in &mut laid_out {
            feature.columns.stride = width;
        }
        Ok(Self { features: laid_out, output_dim: width, is_pooled })
    }

    /// Returns `features` alone, in that order and in the columns they have here; `tables` says
    /// what each reads. A matrix of the part is one of the whole, unless rows are not pooled.
    ///
    /// # Errors
    /// `Invalid` for no features, or a feature that is not there.
    pub fn part(&self, features: &[usize], tables: &[TableId]) -> Result<Self> {
        let own = features.iter().zip(tables).map(|(&at, &table)| {
            let unknown = || Error::invalid("plan has no such feature").with("feature", at);
            self.features.get(at).map(|feature| Feature { table, ..*feature }).ok_or_else(unknown)
        });
        let own = own.collect::<Result<Vec<_>>>()?;
        if own.is_empty() {
            return Err(Error::invalid("a plan needs at least one feature"));
        }
        Ok(Self { features: own, ..*self })
    }

    /// Returns the features.
    #[must_use]
    pub fn features(&self) -> &[Feature] {
        &self.features
    }

    /// Returns the tables that the features read, ascending, each once.
    #[must_use]
    pub fn tables(&self) -> Vec<TableId> {
        let mut tables: Vec<_> = self.features.iter().map(|feature| feature.table).collect();
        tables.sort_unstable();
        tables.dedup();
        tables
    }

    /// Returns the columns of the output: sum of dims when pooled, else the dim.
    #[must_use]
    pub fn output_dim(&self) -> usize {
        self.output_dim
    }

    /// Returns whether bags are pooled.
    #[must_use]
    pub fn is_pooled(&self) -> bool {
        self.is_pooled
    }

    /// Returns the rows of the output for `bags`: samples when pooled, else indices.
    #[must_use]
    pub fn output_rows(&self, bags: &Bags<'_>) -> usize {
        if self.is_pooled {
            bags.batch_size()
        } else {
            bags.indices.len()
        }
    }

    /// Checks `bags` and the length of an output (or gradient) against this layout and `schema`.
    ///
    /// # Errors
    /// `Invalid`, naming the feature, the id, or the shape.
    pub fn check(&self, schema: &Schema, bags: &Bags<'_>, matrix_len: usize) -> Result<()> {
        self.check_shape(bags, matrix_len)?;
        self.check_ids(schema, bags)
    }

    /// Checks what [`check`](Self::check) does, without looking at the ids.
    ///
    /// # Errors
    /// `Invalid`, naming the shape.
    pub fn check_shape(&self, bags: &Bags<'_>, matrix_len: usize) -> Result<()> {
        if bags.feature_count != self.features.len() {
            return Err(Error::invalid("batch has another number of features than the plan")
                .with("features", bags.feature_count)
                .with("expected", self.features.len()));
        }
        let wanted = self.output_rows(bags) * self.output_dim;
        if matrix_len != wanted {
            return Err(Error::invalid("output or gradient has the wrong size")
                .with("rows", self.output_rows(bags))
                .with("columns", self.output_dim)
                .with("found_values", matrix_len));
        }
        if i32::try_from(bags.indices.len()).is_err() {
            return Err(Error::invalid("a batch holds at most 2^31 - 1 indices"));
        }
        Ok(())
    }

    /// Checks that every id names a row.
    ///
    /// # Errors
    /// `Invalid`, naming the feature and the id.
    pub fn check_ids(&self, schema: &Schema, bags: &Bags<'_>) -> Result<()> {
        for (at, feature) in self.features.iter().enumerate() {
            let table = schema.table(feature.table)?;
            let indices = self.indices(bags, at);
            // Negative ids are large without their sign. No early end, so that it is one pass
            // of vector instructions; the culprit is looked for afterwards.
            let is_bad = |id: i64| id as u64 >= table.row_count;
            if indices.iter().fold(false, |any, &id| any | is_bad(id)) {
                let Some(id) = indices.iter().copied().find(|&id| is_bad(id)) else {
                    panic!("one of the ids is bad")
                };
                return Err(out_of_range(table, id).with("feature", at));
            }
        }
        Ok(())
    }

    /// Returns the range of feature `at`'s indices in the batch.
    #[must_use]
    pub fn range(&self, bags: &Bags<'_>, at: usize) -> std::ops::Range<usize> {
        let offsets = bags.feature_offsets(at);
        offsets[0] as usize..offsets[offsets.len() - 1] as usize
    }

    /// Returns the elements of the output for `bags`.
    #[must_use]
    pub fn output_len(&self, bags: &Bags<'_>) -> usize {
        self.output_rows(bags) * self.output_dim
    }

    fn indices<'a>(&self, bags: &Bags<'a>, at: usize) -> &'a [i64] {
        &bags.indices[self.range(bags, at)]
    }
}
