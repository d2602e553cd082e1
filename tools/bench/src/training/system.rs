//! What must a system be able to do to be measured?

use std::fmt::Debug;

use serde_json::{json, Value};
use tierbed_core::{Bags, Error, Result, Schema};
use tierbed_io::{FsFolder, WordBuf};
use tierbed_kernels::{init_record, FeatureLayout, Hyper};
use tierbed_train::planned::{EpochPlan, Grads, PlannedConfig, PlannedEngine};
use tierbed_train::BatchToken;

use super::job::{features_of, Job};
use super::kernel::{synthetic_grad, Places, StepKernel};
use super::timeline::{Timeline, Window};

/// A system under measurement. Batches come one after another, each once.
pub(crate) trait System: Debug {
    /// Brings the rows of batch `number` into memory and finds them.
    fn prepare(&mut self, number: u64, bags: &Bags<'_>) -> Result<()>;

    /// Pools the rows of the batch that was prepared last.
    fn lookup(&mut self, bags: &Bags<'_>) -> Result<()>;

    /// Steps the rows of the batch that was prepared last.
    fn update(&mut self, bags: &Bags<'_>) -> Result<()>;

    /// Moves the rows of the batch and computes nothing: what the storage alone costs.
    fn pass(&mut self, _bags: &Bags<'_>) -> Result<()> {
        Err(Error::unsupported("this system has no step without arithmetic"))
    }

    /// Makes everything durable.
    fn checkpoint(&mut self) -> Result<()>;

    /// Returns cumulative counters, flat.
    fn counters(&mut self) -> Result<Value>;

    /// The pooled vectors of the last batch, `[B, F * D]`.
    #[cfg(test)]
    fn output(&self) -> &[f32];
}

/// Training along a plan.
#[derive(Debug)]
pub(crate) struct Forward {
    engine: PlannedEngine,
    features: FeatureLayout,
    output: Vec<f32>,
    grad: Vec<f32>,
    /// Of the lookup of the batch that is stepped next.
    token: Option<BatchToken>,
}

impl Forward {
    pub(crate) fn open(job: &Job, schema: Schema) -> Result<Self> {
        let folder = job.plan.as_ref().ok_or_else(|| Error::invalid("forward needs a plan"))?;
        let plan = EpochPlan::open(&FsFolder::open(folder.clone())?, "plan")?;
        let mut config = PlannedConfig::new(job.dram_budget_bytes);
        config.io_engine.clone_from(&job.io_engine);
        config.pipeline = job.is_pipelined;
        let features = features_of(&schema)?;
        let mut engine = PlannedEngine::open(&job.folder, schema, plan, &config)?;
        for feature in features.features() {
            engine.set_hyper(feature.table, Hyper { lr: 0.01, ..Hyper::default() })?;
        }
        let len = job.batch_len * features.output_dim();
        let (output, grad) = (vec![0.0; len], synthetic_grad(len));
        Ok(Self { engine, features, output, grad, token: None })
    }
}

impl System for Forward {
    fn prepare(&mut self, _: u64, bags: &Bags<'_>) -> Result<()> {
        self.engine.prepare(&self.features, bags).map(drop)
    }

    fn lookup(&mut self, bags: &Bags<'_>) -> Result<()> {
        self.token = Some(self.engine.lookup(&self.features, bags, &mut self.output)?);
        Ok(())
    }

    fn update(&mut self, bags: &Bags<'_>) -> Result<()> {
        let grads = Grads { output: &self.grad, weights: None };
        self.engine.update(&self.features, bags, grads, self.token.take())
    }

    fn pass(&mut self, bags: &Bags<'_>) -> Result<()> {
        self.engine.pass(&self.features, bags)
    }

    fn checkpoint(&mut self) -> Result<()> {
        self.engine.checkpoint("bench", &[]).map(|_| ())
    }

    fn counters(&mut self) -> Result<Value> {
        let stats = self.engine.stats();
        let record_bytes = self.engine.schema().tables().first().map_or(0, |t| t.record_bytes());
        Ok(json!({
            "device_read_count": stats.io.read_count,
            "device_read_bytes": stats.io.read_bytes,
            "device_write_bytes": stats.io.write_bytes,
            "changed_bytes": stats.rows_flushed * record_bytes as u64,
            "rows_read": stats.rows_read,
            "rows_written": stats.rows_flushed,
            "rows_initialised": stats.rows_initialised,
            "live_bytes": stats.rows_initialised * record_bytes as u64,
            "disk_bytes": stats.file_bytes,
            "dump_bytes": stats.dump_bytes,
            "windows": stats.window_count,
            "wait_count": stats.wait_count,
            "budget_peak_bytes": self.engine.budget().report().peak_bytes,
        }))
    }

    #[cfg(test)]
    fn output(&self) -> &[f32] {
        &self.output
    }
}

/// Every row in one array: what the kernels alone cost.
#[derive(Debug)]
pub(crate) struct Memory {
    arena: WordBuf,
    kernel: StepKernel,
    timeline: Timeline,
    window: Window,
    window_number: Option<u32>,
    batch: u32,
}

impl Memory {
    pub(crate) fn open(job: &Job, schema: Schema) -> Result<Self> {
        let path =
            job.timeline.as_ref().ok_or_else(|| Error::invalid("memory needs a timeline"))?;
        let words = schema.tables().first().map_or(0, |table| table.record_words());
        let rows: u64 = schema.tables().iter().map(|table| table.row_count).sum();
        // In large pages, as the rows of the forward order lie.
        let mut arena = WordBuf::new(rows as usize * words);
        let mut records = arena.chunks_exact_mut(words);
        for table in schema.tables() {
            for (row, record) in (0..table.row_count).zip(&mut records) {
                init_record(table, row, record);
            }
        }
        Ok(Self {
            arena,
            kernel: StepKernel::new(schema.clone(), features_of(&schema)?, job.batch_len),
            timeline: Timeline::open(path)?,
            window: Window::default(),
            window_number: None,
            batch: 0,
        })
    }
}

/// Returns where the rows of a batch lie when every row has its own place.
fn places_of<'a>(window: &'a Window, batch: u32, bags: &Bags<'_>) -> Places<'a> {
    Places { entries: window.batch(batch, bags.indices.len()), slots: &window.rows }
}

impl System for Memory {
    fn prepare(&mut self, number: u64, _: &Bags<'_>) -> Result<()> {
        let (window, batch) = self.timeline.place(number)?;
        if self.window_number != Some(window) {
            self.window = self.timeline.read(window)?;
            self.window_number = Some(window);
        }
        self.batch = batch;
        Ok(())
    }

    fn lookup(&mut self, bags: &Bags<'_>) -> Result<()> {
        let places = places_of(&self.window, self.batch, bags);
        self.kernel.lookup(&self.arena, bags, places);
        Ok(())
    }

    fn update(&mut self, bags: &Bags<'_>) -> Result<()> {
        let places = places_of(&self.window, self.batch, bags);
        self.kernel.update(&mut self.arena, bags, places)
    }

    fn checkpoint(&mut self) -> Result<()> {
        Err(Error::unsupported("rows in memory are not stored"))
    }

    fn counters(&mut self) -> Result<Value> {
        Ok(json!({ "blocked_us": 0 }))
    }

    #[cfg(test)]
    fn output(&self) -> &[f32] {
        self.kernel.output()
    }
}
