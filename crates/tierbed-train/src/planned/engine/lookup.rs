//! Ids in, one vector per bag out, by entry and place.

#![expect(
    clippy::indexing_slicing,
    reason = "the batch is the planned one, whose tables the window has"
)]

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::{
    Destination, Feature, FeatureLayout, FeatureRows, Kernels, Places, PoolFeature, Rows,
};

use super::scratch::Unpacked;
use super::PlannedEngine;
use crate::batch_token::BatchToken;
use crate::planned::plan::Batch;
use crate::planned::store::pipeline::WindowPipeline;

impl PlannedEngine {
    /// Makes sure that the rows of `bags`, which are the next batch of the plan, are in memory,
    /// and finds them. A lookup does so itself; done before, it has the sums left to do. Returns
    /// the token for the batch's update.
    ///
    /// # Errors
    /// As for [`Self::lookup`].
    pub fn prepare(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<BatchToken> {
        let batch = self.find_batch(plan, bags, plan.output_len(bags))?;
        self.unpack_entries(plan, bags, batch)
    }

    /// Pools the rows of `bags`, which are the next batch of the plan, into `out`, overwritten:
    /// `[B, output_dim]`, or `[E, D]` without pooling. May be called again for the same batch.
    /// Returns the token for the batch's update.
    ///
    /// # Errors
    /// `Invalid` for a batch that is not the planned one, or shapes out of range: nothing is
    /// changed then. An error of the disk poisons the engine: reopen it.
    pub fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<BatchToken> {
        let batch = self.find_batch(plan, bags, out.len())?;
        let token = self.unpack_entries(plan, bags, batch)?;
        self.bring_back()?;
        let features = feature_rows(&self.pipeline, &self.scratch.entries, plan, bags);
        self.kernels.pool_batch(self.pipeline.current.arena(), &features, out);
        Ok(token)
    }

    /// Pools the rows of `bags` into the places that `to` says, with the bits of
    /// [`lookup`](Self::lookup).
    ///
    /// # Errors
    /// As for [`lookup`](Self::lookup).
    pub fn lookup_to(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        to: &mut impl Destination,
    ) -> Result<BatchToken> {
        let token = self.prepare(plan, bags)?;
        self.bring_back()?;
        let features = feature_rows(&self.pipeline, &self.scratch.entries, plan, bags);
        let arena = self.pipeline.current.arena();
        pool_to(self.kernels, arena, &features, &mut self.scratch.starts, to);
        Ok(token)
    }

    /// Makes sure that `bags` are the next batch of the plan and unpacked; with the token of a
    /// lookup that found them so, only that they are as many.
    ///
    /// # Errors
    /// As for [`Self::lookup`], and poison.
    pub(super) fn find_again(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        matrix_len: usize,
        found: Option<BatchToken>,
    ) -> Result<()> {
        let is_found = |unpacked: Unpacked| {
            unpacked.position == self.position() && found == Some(unpacked.token)
        };
        if self.scratch.unpacked.is_some_and(is_found) && self.scratch.has_bounds_of(bags) {
            return self.check_shape(plan, bags, matrix_len);
        }
        let batch = self.find_batch(plan, bags, matrix_len)?;
        let result = self.unpack_entries(plan, bags, batch);
        self.poison.on_any(result).map(drop)
    }

    // Unpacks the entry of every index of `batch`, unless that was done for it already.
    pub(super) fn unpack_entries(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        mut batch: Batch,
    ) -> Result<BatchToken> {
        let position = self.position();
        match self.scratch.unpacked {
            Some(unpacked) if unpacked.position == position => return Ok(unpacked.token),
            _ => self.scratch.unpacked = None,
        }
        self.scratch.entries.clear();
        for (at, feature) in plan.features().iter().enumerate() {
            let count = plan.range(bags, at).len();
            let current = &self.pipeline.current.plan;
            let table = feature.table.0 as usize;
            let mapping = current.mapping(&mut batch, table, count);
            let entry_count = current.tables()[table].count;
            for index in 0..count {
                let entry = mapping.get(index).filter(|&entry| entry < u64::from(entry_count));
                let entry =
                    entry.ok_or_else(|| Error::corruption("plan names an unknown entry"))?;
                self.scratch.entries.push(entry as u32);
            }
        }
        assert_eq!(self.scratch.entries.len(), bags.indices.len(), "every index has an entry");
        self.scratch.bounds.clear();
        self.scratch.bounds.extend(bags.bounds());
        let token = BatchToken::next();
        self.scratch.unpacked = Some(Unpacked { position, token });
        Ok(token)
    }
}

/// Pools the rows of `features` into the places that `to` says; `starts` is memory to work in.
pub(super) fn pool_to(
    kernels: Kernels,
    arena: &[f32],
    features: &[FeatureRows<'_>],
    starts: &mut Vec<usize>,
    to: &mut impl Destination,
) {
    starts.clear();
    for rows in features {
        starts.extend(rows.numbers.iter().map(|&number| rows.places.start(number)));
    }
    let mut rest = starts.as_slice();
    let pooled = features.iter().enumerate().map(|(feature, rows)| {
        let (starts, later) = rest.split_at(rows.numbers.len());
        rest = later;
        let (offsets, pooling, dim) = (rows.offsets, rows.pooling, rows.columns.dim);
        let of = PoolFeature { feature, offsets, pooling, dim };
        (Rows { arena, starts, weights: rows.weights }, of)
    });
    kernels.pool_all_to(&pooled.collect::<Vec<_>>(), to);
}

/// Returns which rows each feature of a batch uses, by the entries of all its indices.
pub(super) fn feature_rows<'a>(
    pipeline: &WindowPipeline,
    entries: &'a [u32],
    plan: &FeatureLayout,
    bags: &Bags<'a>,
) -> Vec<FeatureRows<'a>> {
    assert_eq!(entries.len(), bags.indices.len(), "entries of another batch");
    let rows = |(at, feature): (usize, &Feature)| {
        let range = plan.range(bags, at);
        let table = feature.table.0 as usize;
        FeatureRows {
            numbers: &entries[range.clone()],
            places: Places {
                first: pipeline.current.table_start(table),
                words: pipeline.home(table).words,
                slots: None,
            },
            offsets: bags.feature_offsets(at),
            weights: bags.weights.map(|weights| &weights[range]),
            pooling: feature.pooling,
            columns: feature.columns,
        }
    };
    plan.features().iter().enumerate().map(rows).collect()
}
