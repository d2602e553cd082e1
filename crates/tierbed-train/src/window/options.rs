//! Options of the window engine.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};
use tierbed_io::{EngineChoice, EngineOptions, PAGE_BYTES};

use crate::window::row_buffer::EvictionOrder;

/// Where rows live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// One direct-addressed record per row in files.
    File,
    /// Plain memory; the oracle.
    Memory,
    /// A log-structured merge tree with all of RecDB's parts.
    Lsm,
    /// The same tree without them: the baseline.
    LsmPlain,
    /// Home arrays and sorted delta runs: the cold order.
    Cold,
    /// AIBox's two-level hash, RecDB's baseline.
    #[serde(rename = "hashdb")]
    HashDb,
    /// A dense array in a mapped file; the page cache is outside the budget.
    Mmap,
    /// RocksDB, levelled; its library is loaded at run time.
    #[serde(rename = "rocksdb")]
    RocksDb,
    /// RocksDB with universal compaction, as FBGEMM's SSD tables use it.
    #[serde(rename = "rocksdb_universal")]
    RocksDbUniversal,
}

/// How often checkpoints are expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Now and then: a checkpoint writes what memory holds into its place.
    #[default]
    Checkpoint,
    /// After every step: rows also go to a log, and a checkpoint is one entry of it and one sync.
    /// Trees only.
    Step,
}

impl Backend {
    /// Returns the backend of this name, as checkpoints write it.
    ///
    /// # Errors
    /// `Invalid` for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        serde_json::from_value(serde_json::Value::from(name)).map_err(|_| {
            Error::invalid("store was written by an unknown backend").with("backend", name)
        })
    }

    /// Returns the name that [`Self::from_name`] takes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Memory => "memory",
            Self::Lsm => "lsm",
            Self::LsmPlain => "lsm_plain",
            Self::Cold => "cold",
            Self::HashDb => "hashdb",
            Self::Mmap => "mmap",
            Self::RocksDb => "rocksdb",
            Self::RocksDbUniversal => "rocksdb_universal",
        }
    }

    /// Returns whether the rows are in RocksDB's own folder.
    #[must_use]
    pub fn is_rocksdb(self) -> bool {
        matches!(self, Self::RocksDb | Self::RocksDbUniversal)
    }
}

/// Options of a [`WindowEngine`](crate::window::WindowEngine).
#[derive(Debug, Clone)]
pub struct WindowConfig {
    /// All the memory the engine may use.
    pub dram_budget_bytes: u64,
    /// Where rows live.
    pub backend: Backend,
    /// How often checkpoints are expected.
    pub durability: Durability,
    /// How bytes move: `auto`, `io_uring`, `pread`, `inline`.
    pub io_engine: String,
    /// Pages in flight; 0 chooses by the budget.
    pub queue_depth: u32,
    /// Most bytes on disk.
    pub disk_quota_bytes: Option<u64>,
    /// Memory for index pages of open vocabularies; by default a sixteenth of the budget. Used
    /// only when there is an open table.
    pub vocabulary_bytes: Option<u64>,
    /// Instruction set of the kernels: `auto`, `scalar`, `avx2`, `avx512`. All give the same bits.
    pub isa: String,
    /// Which rows leave the row buffer first. Any order gives the same bits.
    pub eviction: EvictionOrder,
}

/// Most pages in flight that still help here: beyond it latency grows and throughput does not.
const QUEUE_DEPTH_MAX: u64 = 64;
const QUEUE_DEPTH_MIN: u64 = 4;

impl WindowConfig {
    /// Returns the options of a store with `dram_budget_bytes` and defaults otherwise.
    #[must_use]
    pub fn new(dram_budget_bytes: u64) -> Self {
        Self {
            dram_budget_bytes,
            backend: Backend::File,
            durability: Durability::default(),
            io_engine: "auto".to_owned(),
            queue_depth: 0,
            disk_quota_bytes: None,
            vocabulary_bytes: None,
            isa: "auto".to_owned(),
            eviction: EvictionOrder::default(),
        }
    }

    /// Returns the I/O engine's options: a sixteenth of the budget in pages, within bounds.
    ///
    /// # Errors
    /// `Invalid` for an unknown engine.
    pub fn io_options(&self) -> Result<EngineOptions> {
        let choice: EngineChoice = self.io_engine.parse()?;
        let by_budget = self.dram_budget_bytes / 16 / PAGE_BYTES as u64;
        let queue_depth = match self.queue_depth {
            0 => by_budget.clamp(QUEUE_DEPTH_MIN, QUEUE_DEPTH_MAX) as u32,
            asked => asked,
        };
        Ok(EngineOptions { choice, queue_depth, buf_bytes: PAGE_BYTES })
    }
}
