//! Batches whose rows are looked up and stepped by a device.
//!
//! The engine goes through the plan as ever: it checks batches, moves rows between windows, counts
//! steps. The device pools and steps, by the entries that the engine unpacks.

use std::sync::Arc;

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::{FeatureLayout, Hyper};

use super::PlannedEngine;
use crate::batch_token::BatchToken;
use crate::planned::device::DeviceWindows;
use crate::planned::store::window_rows::WindowRows;

/// The device of an engine, as long as the windows live whose memory it knows.
#[derive(Debug, Default)]
pub(super) struct Device(Option<Arc<dyn DeviceWindows>>);

impl Device {
    /// Lets the device know the memory of the windows.
    pub(super) fn open(
        windows: Option<&Arc<dyn DeviceWindows>>,
        memory: [&WindowRows; 2],
    ) -> Result<Self> {
        let Some(windows) = windows else { return Ok(Self::default()) };
        windows.open(memory.map(WindowRows::memory))?;
        Ok(Self(Some(Arc::clone(windows))))
    }

    pub(super) fn windows(&self) -> Option<&dyn DeviceWindows> {
        self.0.as_deref()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(windows) = self.windows() {
            windows.close();
        }
    }
}

impl PlannedEngine {
    /// Makes sure that the rows of `bags`, which are the next batch of the plan, are on the device.
    /// Writes the entry of each id, counted from the first of its table, `[E]`. Returns the token
    /// for the batch's step.
    ///
    /// # Errors
    /// `Invalid` without a device, or for a batch that is not the planned one: nothing is changed
    /// then. Those of the device; with those of the disk they poison the engine.
    pub fn lookup_on_device(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        entries: &mut [u32],
    ) -> Result<BatchToken> {
        if entries.len() != bags.indices.len() {
            return Err(Error::invalid("every index has an entry")
                .with("indices", bags.indices.len())
                .with("entries", entries.len()));
        }
        if self.device.windows().is_none() {
            return Err(Error::invalid("the engine has no device"));
        }
        let batch = self.find_batch(plan, bags, plan.output_len(bags))?;
        let token = self.unpack_entries(plan, bags, batch)?;
        if let Some(windows) = self.device.windows() {
            self.pipeline.current.upload(windows, &self.pipeline.homes)?;
        }
        entries.copy_from_slice(&self.scratch.entries);
        Ok(token)
    }

    /// Counts a step of `bags`, which are the next batch of the plan, and goes on to the batch
    /// after it: the device steps their rows. Returns what it steps by, feature after feature.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub fn step_on_device(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        found: BatchToken,
    ) -> Result<Vec<Hyper>> {
        self.find_again(plan, bags, plan.output_len(bags), Some(found))?;
        let noted = self.note_window();
        self.poison.on_any(noted)?;
        self.count_step(plan);
        self.pipeline.current.note_stepped_away();
        self.counters.step_count += 1;
        self.finish_batch()?;
        Ok(plan.features().iter().map(|feature| *self.hypers.of(feature.table)).collect())
    }

    /// Brings rows back that the device has newer.
    ///
    /// # Errors
    /// Those of the device, whose rows stay the newest.
    pub(super) fn bring_back(&mut self) -> Result<()> {
        if let Some(windows) = self.device.windows() {
            self.counters.row_update_count += self.pipeline.current.download(windows)?;
        }
        Ok(())
    }
}
