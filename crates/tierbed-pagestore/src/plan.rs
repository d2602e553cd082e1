//! Which table, pooling and columns does each feature of a batch have?

use tierbed_core::store::out_of_range;
use tierbed_core::{Bags, Error, Result, RowId, RowKey, Schema, TableId};
use tierbed_kernels::layout::Columns;
use tierbed_kernels::Pooling;

/// One feature of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedFeature {
    /// The table it reads.
    pub table: TableId,
    /// How its bags are pooled.
    pub pooling: Pooling,
    /// First column of its vectors in the output.
    pub first_column: usize,
    /// Columns of its vectors: the table's dim.
    pub dim: usize,
}

/// What a lookup does with each feature, checked once and used for many batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupPlan {
    features: Vec<PlannedFeature>,
    output_dim: usize,
}

impl LookupPlan {
    /// Plans `features` in order, their vectors side by side.
    ///
    /// # Errors
    /// `Invalid` for no feature, an unknown table, or pooling "none" mixed with others or with
    /// unequal dims.
    pub fn new(schema: &Schema, features: &[(TableId, Pooling)]) -> Result<Self> {
        let mut planned = Vec::new();
        let mut columns = 0;
        for &(table, pooling) in features {
            let dim = schema.table(table)?.dim as usize;
            planned.push(PlannedFeature { table, pooling, first_column: columns, dim });
            columns += dim;
        }
        let Some(first) = planned.first().copied() else {
            return Err(Error::invalid("a lookup needs at least one feature"));
        };
        let is_unpooled = first.pooling == Pooling::None;
        if planned.iter().any(|feature| (feature.pooling == Pooling::None) != is_unpooled) {
            return Err(Error::invalid(
                "pooling none must be that of all features or of no feature",
            ));
        }
        if is_unpooled && planned.iter().any(|feature| feature.dim != first.dim) {
            return Err(Error::invalid("pooling none needs tables of equal embedding_dim"));
        }
        let output_dim = if is_unpooled { first.dim } else { columns };
        Ok(Self { features: planned, output_dim })
    }

    /// Returns the features.
    #[must_use]
    pub fn features(&self) -> &[PlannedFeature] {
        &self.features
    }

    /// Returns the elements of one row of the output: of a sample, or of an index when unpooled.
    #[must_use]
    pub fn output_dim(&self) -> usize {
        self.output_dim
    }

    /// Tells whether each index keeps its own row.
    #[must_use]
    pub fn is_unpooled(&self) -> bool {
        self.features.first().is_some_and(|feature| feature.pooling == Pooling::None)
    }

    /// Returns the elements of the output for `bags`: `[B, output_dim]`, or `[E, D]` unpooled.
    #[must_use]
    pub fn output_len(&self, bags: &Bags<'_>) -> usize {
        let rows = if self.is_unpooled() { bags.indices.len() } else { bags.batch_size() };
        rows * self.output_dim
    }

    pub(crate) fn columns(&self, feature: &PlannedFeature) -> Columns {
        Columns { stride: self.output_dim, first: feature.first_column, dim: feature.dim }
    }

    /// Checks shapes and every id, so that a lookup fails before it writes.
    pub(crate) fn check(&self, schema: &Schema, bags: &Bags<'_>, out: &[f32]) -> Result<()> {
        if bags.feature_count != self.features.len() {
            return Err(Error::invalid("batch has another number of features than the plan")
                .with("expected", self.features.len())
                .with("found", bags.feature_count));
        }
        if out.len() != self.output_len(bags) {
            return Err(Error::invalid("output has the wrong size")
                .with("expected", self.output_len(bags))
                .with("found", out.len()));
        }
        for (at, feature) in self.features.iter().enumerate() {
            let table = schema.table(feature.table)?;
            let range = index_range(bags, at);
            for &id in bags.indices.get(range).unwrap_or_default() {
                if u64::try_from(id).map_or(true, |id| id >= table.row_count) {
                    return Err(out_of_range(table, id));
                }
            }
        }
        Ok(())
    }
}

/// Returns where the indices of feature `feature` lie.
pub(crate) fn index_range(bags: &Bags<'_>, feature: usize) -> std::ops::Range<usize> {
    let offsets = bags.feature_offsets(feature);
    let bound =
        |offset: Option<&i64>| offset.map_or(0, |&offset| usize::try_from(offset).unwrap_or(0));
    bound(offsets.first())..bound(offsets.last())
}

/// Names the row of a checked id.
pub(crate) fn row_key(feature: &PlannedFeature, id: i64) -> RowKey {
    RowKey::new(feature.table, RowId(id.unsigned_abs()))
}
