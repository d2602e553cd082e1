//! Any store behind the product's window engine, looked ahead as `tierbed.lookahead` does.
//!
//! Store and row buffer share the memory, half and half, whichever store it is.

use serde_json::{json, Value};
use tierbed_core::{Bags, Result, RowId, RowKey, RowWrite, Schema, TableId};
use tierbed_kernels::{init_record, FeatureLayout, Grads};
use tierbed_train::window::{WindowConfig, WindowEngine};

use super::batches::Batches;
use super::job::{hyper, Job};
use super::stores;
use crate::meter::{thread_cpu_ns, Meter};

/// One part in so many of the memory that the row buffer takes; the store has the rest.
const BUFFER_PART: u64 = 2;
/// Rows written at once while loading.
const LOAD_ROWS: usize = 8192;

/// An engine, and what was announced to it.
pub(crate) struct Windowed {
    engine: WindowEngine,
    live_bytes: u64,
    /// Most batches announced.
    window: usize,
    /// Batches that fitted lately.
    reach: usize,
    /// Batches announced and not looked up.
    announced: usize,
    meter: Meter,
    train_cpu_ns: u64,
    blocked_us: u64,
}

impl Windowed {
    /// Opens the store and fills it with every row of `schema`.
    pub(crate) fn open(job: &Job, schema: Schema) -> Result<Self> {
        let buffer_bytes = job.dram_budget_bytes / BUFFER_PART;
        let store = stores::open(job, &schema, job.dram_budget_bytes - buffer_bytes)?;
        let mut engine = WindowEngine::over(store, &WindowConfig::new(buffer_bytes))?;
        load(&mut engine, &schema)?;
        for table in (0..schema.tables().len() as u32).map(TableId) {
            engine.set_hyper(table, hyper())?;
        }
        Ok(Self {
            engine,
            live_bytes: schema.table_bytes(),
            window: job.look_ahead_batches,
            reach: job.look_ahead_batches,
            announced: 0,
            meter: Meter::new(),
            train_cpu_ns: 0,
            blocked_us: 0,
        })
    }

    /// Returns how many batches behind the next one may be announced.
    pub(crate) fn ahead_count(&self) -> usize {
        self.reach.saturating_sub(1)
    }

    /// Announces coming batches when half of those announced were used.
    pub(crate) fn look_ahead(&mut self, features: &FeatureLayout, batches: &Batches) -> Result<()> {
        if self.window > 0 && self.announced <= self.reach / 2 {
            let start_us = self.meter.now_us();
            let new = self.announced..self.reach.min(batches.held_count());
            let bags: Vec<_> = new.map(|at| batches.bags(at)).collect::<Result<_>>()?;
            let fitted = self.engine.prefetch(features, &bags)?;
            self.announced += fitted;
            let is_whole = fitted == bags.len();
            self.reach =
                if is_whole { self.window.min(2 * self.reach) } else { self.announced.max(1) };
            self.blocked_us += self.meter.now_us() - start_us;
        }
        // The next batch is looked up now, announced or not.
        self.announced = self.announced.saturating_sub(1);
        Ok(())
    }

    pub(crate) fn lookup(
        &mut self,
        features: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let start_ns = thread_cpu_ns();
        self.engine.lookup(features, bags, out)?;
        self.train_cpu_ns += thread_cpu_ns() - start_ns;
        Ok(())
    }

    pub(crate) fn update(
        &mut self,
        features: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
    ) -> Result<()> {
        let start_ns = thread_cpu_ns();
        self.engine.update(features, bags, grads)?;
        self.train_cpu_ns += thread_cpu_ns() - start_ns;
        Ok(())
    }

    pub(crate) fn checkpoint(&mut self) -> Result<()> {
        self.engine.checkpoint("bench", &[]).map(drop)
    }

    pub(crate) fn counters(&self) -> Value {
        let stats = self.engine.stats();
        let store = stats.store;
        let record_bytes = self.engine.schema().tables().first().map_or(0, |t| t.record_bytes());
        let mut counters = json!({
            "device_read_count": store.io.read_count,
            "device_read_bytes": store.io.read_bytes,
            "device_write_bytes": store.io.write_bytes,
            "changed_bytes": store.rows_written * record_bytes as u64,
            "rows_read": store.rows_read,
            "rows_written": store.rows_written,
            "live_bytes": self.live_bytes,
            "disk_bytes": store.disk_bytes,
            "buffer_rows": stats.buffer.row_capacity,
            "train_cpu_ns": self.train_cpu_ns,
            "blocked_us": self.blocked_us,
        });
        if let Some(counters) = counters.as_object_mut() {
            counters.extend(
                store.own.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())),
            );
        }
        counters
    }
}

/// Writes every row in order, as after an epoch that touched all, and commits.
fn load(engine: &mut WindowEngine, schema: &Schema) -> Result<()> {
    let words = schema.tables().first().map_or(1, |table| table.record_words());
    let mut records = vec![0.0f32; LOAD_ROWS * words];
    for (id, table) in (0..).map(TableId).zip(schema.tables()) {
        for first in (0..table.row_count).step_by(LOAD_ROWS) {
            let ids = first..(first + LOAD_ROWS as u64).min(table.row_count);
            for (row, record) in ids.clone().zip(records.chunks_exact_mut(words)) {
                init_record(table, row, record);
            }
            let rows = ids.zip(records.chunks_exact(words)).map(|(row, record)| RowWrite {
                key: RowKey::new(id, RowId(row)),
                record: bytemuck::cast_slice(record),
            });
            engine.take_over_rows(&rows.collect::<Vec<_>>())?;
        }
    }
    engine.checkpoint("loaded", &[]).map(drop)
}
