//! One system, slice by slice.

use serde_json::{json, Map, Value};
use tierbed_core::{Error, Result};
use tierbed_kernels::FeatureLayout;

use super::batches::Batches;
use super::job::{features_of, schema_of, Job};
use super::system::System;
use crate::meter::{process_cpu_ns, resident_bytes, thread_cpu_ns, Meter};

/// An open system and where it stands.
pub(crate) struct Session {
    system: System,
    batches: Batches,
    features: FeatureLayout,
    /// The pooled vectors of the last batch, `[B, F * D]`.
    output: Vec<f32>,
    grad: Vec<f32>,
    meter: Meter,
    position: Option<u64>,
}

/// What a slice does with its batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Train,
    /// Rows are moved, nothing is computed.
    Pass,
}

impl Session {
    pub(crate) fn open(job: &Job) -> Result<Self> {
        let batches = Batches::open(&job.trace, job.batch_len)?;
        let schema = schema_of(&batches.trace().row_counts(), job.dim)?;
        let features = features_of(&schema)?;
        let len = job.batch_len * features.output_dim();
        Ok(Self {
            system: System::open(job, schema, &features)?,
            batches,
            features,
            output: vec![0.0; len],
            grad: synthetic_grad(len),
            meter: Meter::new(),
            position: None,
        })
    }

    /// Trains batches `first..first + count`, which follow those of the last call, and reports.
    pub(crate) fn run(&mut self, first: u64, count: u64, mode: Mode) -> Result<Value> {
        if self.position.is_some_and(|position| position != first) {
            return Err(Error::invalid("batches come one after another")
                .with("next", self.position.unwrap_or(0))
                .with("found", first));
        }
        let before = self.system.counters();
        let mut steps_us = Vec::with_capacity(count as usize);
        let mut reading_ns = 0;
        let mut lookup_us = 0;
        let start_ns = process_cpu_ns();
        for number in first..first + count {
            let read_ns = thread_cpu_ns();
            self.system.read(number, &mut self.batches)?;
            let bags = self.batches.bags(0)?;
            reading_ns += thread_cpu_ns() - read_ns;
            let start_us = self.meter.now_us();
            match mode {
                Mode::Train => {
                    self.system.prepare(&self.features, &self.batches)?;
                    let begun_us = self.meter.now_us();
                    self.system.lookup(&self.features, &bags, &mut self.output)?;
                    lookup_us += self.meter.now_us() - begun_us;
                    self.system.update(&self.features, &bags, &self.grad)?;
                }
                Mode::Pass => self.system.pass(&self.features, &bags)?,
            }
            steps_us.push(self.meter.now_us() - start_us);
        }
        // Waits for what is under way, so that a slice pays for all it began.
        let end_us = self.meter.now_us();
        let after = self.system.counters();
        let tail_us = self.meter.now_us() - end_us;
        let cpu_ns = (process_cpu_ns() - start_ns).saturating_sub(reading_ns);
        self.position = Some(first + count);
        let (resident, resident_peak) = resident_bytes();
        Ok(json!({
            "batches": count,
            "row_updates": self.batches.count_rows(first, count)?,
            "steps_us": steps_us,
            "lookup_us": lookup_us,
            "tail_us": tail_us,
            "cpu_ns": cpu_ns,
            "resident_bytes": resident,
            "resident_peak_bytes": resident_peak,
            "growth": growth(&before, &after),
            "counters": after,
        }))
    }

    /// Commits and reports how long it took.
    pub(crate) fn checkpoint(&mut self) -> Result<Value> {
        let start_us = self.meter.now_us();
        self.system.checkpoint()?;
        let took_us = self.meter.now_us() - start_us;
        Ok(json!({ "seconds": took_us as f64 / 1e6, "counters": self.system.counters() }))
    }

    #[cfg(test)]
    pub(crate) fn output(&self) -> &[f32] {
        &self.output
    }
}

/// A gradient that costs nothing to make and is not all the same.
fn synthetic_grad(len: usize) -> Vec<f32> {
    (0..len).map(|at| ((at as u32).wrapping_mul(2_654_435_761) >> 24) as f32 * 1e-4).collect()
}

fn growth(before: &Value, after: &Value) -> Value {
    let mut growth = Map::new();
    for (name, value) in after.as_object().into_iter().flatten() {
        let old = before.get(name).and_then(Value::as_u64).unwrap_or(0);
        if let Some(new) = value.as_u64() {
            growth.insert(name.clone(), new.saturating_sub(old).into());
        }
    }
    Value::Object(growth)
}
