//! Systems that can be measured, each with what only it counts.

use serde_json::{json, Value};
use tierbed_core::{Bags, Error, Result, Schema};
use tierbed_io::FsFolder;
use tierbed_kernels::{FeatureLayout, Grads};
use tierbed_train::planned::{EpochPlan, Pipeline, PlannedConfig, PlannedEngine};
use tierbed_train::BatchToken;

use super::batches::Batches;
use super::job::{hyper, Job};
use super::memory::Memory;
use super::windowed::Windowed;

/// Who trains. Batches come one after another, each once.
pub(crate) enum System {
    Forward(Box<Forward>),
    Windowed(Box<Windowed>),
    Memory(Box<Memory>),
}

/// Training along a plan.
pub(crate) struct Forward {
    engine: PlannedEngine,
    /// Of the lookup of the batch that is stepped next.
    token: Option<BatchToken>,
}

impl Forward {
    fn open(job: &Job, schema: Schema, features: &FeatureLayout) -> Result<Self> {
        let folder = job.plan.as_ref().ok_or_else(|| Error::invalid("forward needs a plan"))?;
        let plan = EpochPlan::open(&FsFolder::open(folder.clone())?, "plan")?;
        let mut config = PlannedConfig::new(job.dram_budget_bytes);
        config.io_engine.clone_from(&job.io_engine);
        config.pipeline = match job.threads {
            1 => Pipeline::Off,
            2 => Pipeline::On,
            threads => {
                return Err(
                    Error::invalid("forward has one or two threads").with("threads", threads)
                )
            }
        };
        let mut engine = PlannedEngine::open(&job.folder, schema, plan, &config)?;
        for feature in features.features() {
            engine.set_hyper(feature.table, hyper())?;
        }
        Ok(Self { engine, token: None })
    }

    fn counters(&self) -> Value {
        let stats = self.engine.stats();
        let record_bytes = self.engine.schema().tables().first().map_or(0, |t| t.record_bytes());
        json!({
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
        })
    }
}

impl System {
    /// Opens the system of `job.system`.
    ///
    /// # Errors
    /// `Unsupported` when it is not to be had on this machine, `Invalid` for its name.
    pub(crate) fn open(job: &Job, schema: Schema, features: &FeatureLayout) -> Result<Self> {
        Ok(match job.system.as_str() {
            "forward" => Self::Forward(Box::new(Forward::open(job, schema, features)?)),
            "memory" => Self::Memory(Box::new(Memory::new(schema))),
            _ => Self::Windowed(Box::new(Windowed::open(job, schema)?)),
        })
    }

    /// Reads batch `number` and as many behind it as will be looked at; is not measured.
    pub(crate) fn read(&mut self, number: u64, batches: &mut Batches) -> Result<()> {
        match self {
            Self::Forward(_) => batches.read(number, 0),
            Self::Windowed(windowed) => batches.read(number, windowed.ahead_count()),
            Self::Memory(memory) => {
                batches.read(number, 0)?;
                memory.number_rows(&batches.bags(0)?);
                Ok(())
            }
        }
    }

    /// Brings the rows of the batch read last into memory.
    pub(crate) fn prepare(&mut self, features: &FeatureLayout, batches: &Batches) -> Result<()> {
        match self {
            Self::Forward(own) => own.engine.prepare(features, &batches.bags(0)?).map(drop),
            Self::Windowed(windowed) => windowed.look_ahead(features, batches),
            Self::Memory(_) => Ok(()),
        }
    }

    /// Pools the rows of the batch that was prepared last into `out`, `[B, F * D]`.
    pub(crate) fn lookup(
        &mut self,
        features: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        match self {
            Self::Forward(own) => own.token = Some(own.engine.lookup(features, bags, out)?),
            Self::Windowed(windowed) => windowed.lookup(features, bags, out)?,
            Self::Memory(memory) => memory.lookup(features, bags, out),
        }
        Ok(())
    }

    /// Steps the rows of the batch that was prepared last.
    pub(crate) fn update(
        &mut self,
        features: &FeatureLayout,
        bags: &Bags<'_>,
        grad: &[f32],
    ) -> Result<()> {
        let grads = Grads { output: grad, weights: None };
        match self {
            Self::Forward(own) => own.engine.update(features, bags, grads, own.token.take()),
            Self::Windowed(windowed) => windowed.update(features, bags, grads),
            Self::Memory(memory) => memory.update(features, bags, grad),
        }
    }

    /// Moves the rows of the batch and computes nothing: what the storage alone costs.
    pub(crate) fn pass(&mut self, features: &FeatureLayout, bags: &Bags<'_>) -> Result<()> {
        match self {
            Self::Forward(own) => own.engine.pass(features, bags),
            _ => Err(Error::unsupported("this system has no step without arithmetic")),
        }
    }

    /// Makes everything durable.
    pub(crate) fn checkpoint(&mut self) -> Result<()> {
        match self {
            Self::Forward(own) => own.engine.checkpoint("bench", &[]).map(drop),
            Self::Windowed(windowed) => windowed.checkpoint(),
            Self::Memory(_) => Err(Error::unsupported("rows in memory are not stored")),
        }
    }

    /// Returns cumulative counters, flat; waits for what is under way.
    pub(crate) fn counters(&self) -> Value {
        match self {
            Self::Forward(own) => own.counters(),
            Self::Windowed(windowed) => windowed.counters(),
            Self::Memory(_) => json!({ "blocked_us": 0 }),
        }
    }
}
