//! Ids in, one vector per bag out, by entry and place.

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::{BagRange, FeaturePlan, Pooling, Rows};

use super::ForwardEngine;
use crate::plan::Batch;

impl ForwardEngine {
    /// Pools the rows of `bags`, which are the next batch of the plan, into `out`, overwritten:
    /// `[B, output_dim]`, or `[E, D]` without pooling. May be called again for the same batch.
    ///
    /// # Errors
    /// `Invalid` for a batch that is not the planned one, or shapes out of range: nothing is
    /// changed then. An error of the disk poisons the engine: reopen it.
    pub fn lookup(&mut self, plan: &FeaturePlan, bags: &Bags<'_>, out: &mut [f32]) -> Result<()> {
        self.poison.check()?;
        plan.check(&self.schema, bags, out.len())?;
        let mut batch = self.find_batch(plan, bags)?;
        out.fill(0.0);
        for at in 0..plan.features().len() {
            self.pool_feature((plan, bags), at, &mut batch, out)?;
        }
        Ok(())
    }

    fn pool_feature(
        &mut self,
        (plan, bags): (&FeaturePlan, &Bags<'_>),
        at: usize,
        batch: &mut Batch,
        out: &mut [f32],
    ) -> Result<()> {
        let Some(feature) = plan.features().get(at) else { return Ok(()) };
        let range = plan.range(bags, at);
        let current = &self.river.current;
        let table = feature.table.0 as usize;
        let Some(home) = self.river.home(table) else { return Ok(()) };
        let mapping = current.plan.mapping(batch, table, range.len());
        let entry_count = current.plan.tables().get(table).map_or(0, |entries| entries.count);
        let first = current.table_start(table);
        self.scratch.starts.clear();
        for index in 0..range.len() {
            let entry = mapping.get(index).filter(|&entry| entry < u64::from(entry_count));
            let entry = entry.ok_or_else(|| Error::corruption("plan names an unknown entry"))?;
            self.scratch.starts.push(first + entry as usize * home.words);
        }
        let (arena, starts) = (current.arena(), self.scratch.starts.as_slice());
        let columns = feature.columns;
        if plan.is_pooled() {
            let offsets = bags.feature_offsets(at);
            let weights = bags.weights.and_then(|weights| weights.get(range));
            let rows = Rows { arena, starts, weights };
            self.kernels.pool_add(rows, BagRange::whole(offsets), columns, out);
            if feature.pooling == Pooling::Mean {
                self.kernels.mean_scale(offsets, columns, out);
            }
        } else {
            let dim = columns.dim;
            let rows = out.get_mut(range.start * dim..range.end * dim).unwrap_or(&mut []);
            self.kernels.gather_rows(arena, starts, dim, rows);
        }
        Ok(())
    }
}
