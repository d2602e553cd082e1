//! Batches of the plan whose rows a device looks up and steps.

use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_kernels::{FeatureLayout, Hyper};

use crate::auto::engine::AutoEngine;
use crate::batch_token::BatchToken;

impl AutoEngine {
    /// Makes sure that the rows of `bags` are on the device, and writes the entry of each id, if
    /// they are the next batch of a plan. `None` when they are not, or no plan is followed: then
    /// the host looks them up.
    ///
    /// # Errors
    /// As [`PlannedEngine::lookup_on_device`](crate::planned::PlannedEngine::lookup_on_device).
    pub fn lookup_on_device(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        entries: &mut [u32],
    ) -> Result<Option<BatchToken>> {
        let Some(planned) = self.planned_mut() else { return Ok(None) };
        match planned.engine.lookup_on_device(plan, bags, entries) {
            Err(error) if error.kind() == ErrorKind::Invalid => {
                let is_planned =
                    planned.engine.has_batches() && planned.engine.is_next(plan, bags)?;
                if is_planned {
                    Err(error)
                } else {
                    Ok(None)
                }
            }
            found => found.map(Some),
        }
    }

    /// Counts a step that the device makes of the batch that was looked up there.
    ///
    /// # Errors
    /// As [`PlannedEngine::step_on_device`](crate::planned::PlannedEngine::step_on_device).
    pub fn step_on_device(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        found: BatchToken,
    ) -> Result<Vec<Hyper>> {
        let planned = self.planned_mut();
        let planned = planned.ok_or_else(|| Error::invalid("training follows no plan"))?;
        planned.step_on_device(plan, bags, found)
    }
}
