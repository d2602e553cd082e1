//! Options of a training store.

use std::num::NonZero;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::planned::device::DeviceWindows;
use crate::planned::{Pipeline, PlannedConfig};
use crate::window::{Backend, Durability, WindowConfig};

/// Which order a store may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Forward where a plan is given, else by a window of batches.
    #[default]
    Auto,
    /// Along a plan, or not at all.
    Forward,
    /// Only a window of batches is known.
    Window,
}

/// What happens when a batch to train on is not the planned one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnMismatch {
    /// The call fails and names epoch, batch and remedy. Nothing changes.
    Error,
    /// Every row moves to the engine that needs no plan, once, and training goes on; rows live in
    /// the `file` store then.
    Fallback,
    /// The same, and rows live in the `cold` store: for streams far larger than memory.
    FallbackCold,
}

impl OnMismatch {
    /// Returns where rows live after a move, if the answer is one.
    pub(crate) fn backend(self) -> Option<Backend> {
        match self {
            Self::Error => None,
            Self::Fallback => Some(Backend::File),
            Self::FallbackCold => Some(Backend::Cold),
        }
    }
}

/// Options of an [`AutoEngine`](crate::AutoEngine); JSON with these names at the Python
/// border.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderConfig {
    /// All the memory the engine may use.
    pub dram_budget_bytes: u64,
    /// Which order to follow.
    #[serde(default)]
    pub order: Order,
    /// What a batch that was not planned does.
    ///
    /// `None` is `error` when a plan is insisted on, or with several shards, else `fallback`.
    #[serde(default)]
    pub on_mismatch: Option<OnMismatch>,
    /// Parts of a store that work at the same time, each on a thread of its own; `None` takes what
    /// the folder holds, or one. [`ShardedEngine`](crate::ShardedEngine) divides a store.
    #[serde(default)]
    pub shards: Option<u32>,
    /// Where rows live when no plan is followed; `None` takes what the folder holds, or `file`.
    #[serde(default)]
    pub backend: Option<Backend>,
    /// How often checkpoints are expected; a backend's matter.
    #[serde(default)]
    pub durability: Durability,
    /// How bytes move: `auto`, `io_uring`, `pread`, `inline`.
    #[serde(default = "auto")]
    pub io_engine: String,
    /// Pages in flight; 0 chooses by the budget.
    #[serde(default)]
    pub queue_depth: u32,
    /// Most bytes on disk.
    #[serde(default)]
    pub disk_quota_bytes: Option<u64>,
    /// In forward order, rows move on a thread of their own while the caller trains, in each
    /// shard. The values are the same. `None` has it where the process may use two processors
    /// for each shard, and the memory is not small.
    #[serde(default)]
    pub storage_thread: Option<bool>,
    /// Memory for index pages of open vocabularies; by default a sixteenth of the budget.
    #[serde(default)]
    pub vocabulary_bytes: Option<u64>,
    /// Instruction set of the kernels: `auto`, `scalar`, `avx2`, `avx512`. All give the same bits.
    #[serde(default = "auto")]
    pub isa: String,
    /// The store is looked at as of its last checkpoint, also while another process has it;
    /// nothing is written.
    #[serde(default)]
    pub read_only: bool,
    /// Name of the kept checkpoint that is looked at instead, with `read_only`.
    #[serde(default)]
    pub kept: Option<String>,
    /// Memory of a device that windows of the forward order may be trained in; with one shard.
    #[serde(skip)]
    pub device: Option<Arc<dyn DeviceWindows>>,
    /// In forward order, memory is kept aside for the index of ids, too. The engine sets it when
    /// a table of open vocabulary comes.
    #[serde(skip)]
    pub has_open_tables: bool,
}

fn auto() -> String {
    "auto".to_owned()
}

/// Share of the memory kept aside in forward order, for rows that were not planned.
const ASIDE_SHARE: u64 = 12;
/// Least memory kept aside: what publishing needs.
pub(crate) const ASIDE_MIN_BYTES: u64 = 512 << 10;
const ASIDE_MAX_BYTES: u64 = 256 << 20;
/// Share of the memory for cached pages of the index of ids in forward order, and again for the
/// rest of it.
const IDS_SHARE: u64 = 16;
/// Least memory of that index.
const IDS_MIN_BYTES: u64 = 1 << 20;

/// With less memory there is no storage thread unless it is asked for.
const THREAD_BUDGET_MIN_BYTES: u64 = 16 << 20;

fn aside_bytes_of(budget_bytes: u64) -> u64 {
    (budget_bytes / ASIDE_SHARE).clamp(ASIDE_MIN_BYTES, ASIDE_MAX_BYTES)
}

impl OrderConfig {
    /// Returns the options of a store with `dram_budget_bytes` and defaults otherwise.
    #[must_use]
    pub fn new(dram_budget_bytes: u64) -> Self {
        Self {
            dram_budget_bytes,
            order: Order::default(),
            on_mismatch: None,
            shards: None,
            backend: None,
            durability: Durability::default(),
            io_engine: auto(),
            queue_depth: 0,
            disk_quota_bytes: None,
            storage_thread: None,
            vocabulary_bytes: None,
            isa: auto(),
            read_only: false,
            kept: None,
            device: None,
            has_open_tables: false,
        }
    }

    /// Returns what a batch does that was not planned.
    pub(crate) fn on_mismatch(&self) -> OnMismatch {
        self.on_mismatch.unwrap_or(match self.order {
            Order::Forward => OnMismatch::Error,
            Order::Auto | Order::Window => OnMismatch::Fallback,
        })
    }

    /// Returns the memory kept aside in forward order.
    pub(crate) fn aside_bytes(&self) -> u64 {
        aside_bytes_of(self.dram_budget_bytes)
    }

    /// Returns the memory kept for the index of ids in forward order.
    pub(crate) fn ids_bytes(&self) -> u64 {
        self.ids_bytes_of(self.dram_budget_bytes)
    }

    /// Returns the memory of that index while the first plan is made, before there are rows.
    pub(crate) fn ids_planning_bytes(&self) -> u64 {
        self.ids_bytes().max(self.dram_budget_bytes / 2)
    }

    /// Returns the least budget of which the index gets `own_bytes`, while the first plan is made
    /// or from then on.
    pub(crate) fn least_for_ids(&self, own_bytes: u64, is_planning: bool) -> u64 {
        // A share is enough of this; options and least bytes only add to it.
        let (mut low, mut high) = (self.dram_budget_bytes, own_bytes.saturating_mul(IDS_SHARE));
        let is_enough = |budget_bytes: u64| {
            let for_plan_bytes = if is_planning { budget_bytes / 2 } else { 0 };
            self.ids_bytes_of(budget_bytes).max(for_plan_bytes) >= own_bytes
        };
        while low < high {
            let middle = low + (high - low) / 2;
            match is_enough(middle) {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        low.max(self.dram_budget_bytes + 1)
    }

    fn ids_bytes_of(&self, budget_bytes: u64) -> u64 {
        if !self.has_open_tables {
            return 0;
        }
        let share_bytes = budget_bytes / IDS_SHARE;
        (self.vocabulary_bytes.unwrap_or(share_bytes) + share_bytes).max(IDS_MIN_BYTES)
    }

    /// Returns the memory of the forward engine: all that is not kept aside.
    pub(crate) fn forward_bytes(&self) -> u64 {
        self.left_bytes_of(self.dram_budget_bytes)
    }

    // What a budget leaves to the forward engine.
    fn left_bytes_of(&self, budget_bytes: u64) -> u64 {
        let kept_bytes = aside_bytes_of(budget_bytes) + self.ids_bytes_of(budget_bytes);
        budget_bytes.saturating_sub(kept_bytes)
    }

    /// Returns the least budget that leaves `own_bytes` to the forward engine, or a few bytes more.
    pub(crate) fn least_bytes(&self, own_bytes: u64) -> u64 {
        let mut least_bytes = own_bytes;
        // Of what is added less than a half is kept aside: each round at least halves the gap.
        while self.left_bytes_of(least_bytes) < own_bytes {
            least_bytes += own_bytes - self.left_bytes_of(least_bytes);
        }
        least_bytes
    }

    // Whether rows move on a thread of their own.
    fn pipeline(&self) -> Pipeline {
        // Not with a device, whose copies are the calling thread's; a store that is only read
        // moves no rows.
        let may_have = self.device.is_none() && !self.read_only;
        match self.storage_thread {
            Some(true) if may_have => Pipeline::On,
            None if may_have && self.pays_for_threads(1) => Pipeline::IfItFits,
            _ => Pipeline::Off,
        }
    }

    /// Tells whether a storage thread for each of `shard_count` shards is likely to pay: each has
    /// two processors, and more memory than its stack is worth.
    pub(crate) fn pays_for_threads(&self, shard_count: usize) -> bool {
        // Where the number of processors is not known, one is sure to be there.
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let least_bytes = THREAD_BUDGET_MIN_BYTES * shard_count as u64;
        processors >= 2 * shard_count && self.dram_budget_bytes >= least_bytes
    }

    pub(crate) fn engine(&self, backend: Backend) -> WindowConfig {
        WindowConfig {
            backend,
            durability: self.durability,
            io_engine: self.io_engine.clone(),
            queue_depth: self.queue_depth,
            disk_quota_bytes: self.disk_quota_bytes,
            vocabulary_bytes: self.vocabulary_bytes,
            isa: self.isa.clone(),
            ..WindowConfig::new(self.dram_budget_bytes)
        }
    }

    pub(crate) fn forward(&self) -> PlannedConfig {
        PlannedConfig {
            pipeline: self.pipeline(),
            io_engine: self.io_engine.clone(),
            disk_quota_bytes: self.disk_quota_bytes,
            isa: self.isa.clone(),
            device: self.device.clone(),
            ..PlannedConfig::new(self.forward_bytes())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE_BYTES: u64 = 8 << 30;

    fn pipeline_of(config: &OrderConfig) -> Pipeline {
        config.forward().pipeline
    }

    #[test]
    fn the_least_budget_for_an_index_is_the_first_that_is_enough() {
        let dram_budget_bytes = 3 << 20;
        let config = OrderConfig { has_open_tables: true, ..OrderConfig::new(dram_budget_bytes) };
        let given = OrderConfig { vocabulary_bytes: Some(1 << 20), ..config.clone() };
        for own_bytes in [2 << 20, 5_000_000, 77_777_777] {
            for config in [&config, &given] {
                let least_bytes = config.least_for_ids(own_bytes, false);
                assert!(config.ids_bytes_of(least_bytes) >= own_bytes);
                assert!(config.ids_bytes_of(least_bytes - 1) < own_bytes);
                let for_plan_bytes = config.least_for_ids(own_bytes, true);
                let of_plan = OrderConfig { dram_budget_bytes: for_plan_bytes, ..config.clone() };
                assert!(of_plan.ids_planning_bytes() >= own_bytes);
                assert!(dram_budget_bytes < for_plan_bytes && for_plan_bytes <= least_bytes);
            }
        }
    }

    #[test]
    fn a_thread_is_there_by_processors_and_memory_unless_the_options_say() {
        let config = OrderConfig::new(LARGE_BYTES);
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let by_processors = if processors > 1 { Pipeline::IfItFits } else { Pipeline::Off };
        assert_eq!(pipeline_of(&config), by_processors);
        assert!(!config.pays_for_threads(processors));
        assert_eq!(pipeline_of(&OrderConfig::new(THREAD_BUDGET_MIN_BYTES - 1)), Pipeline::Off);
        for (asked, pipeline) in [(true, Pipeline::On), (false, Pipeline::Off)] {
            let config = OrderConfig { storage_thread: Some(asked), ..config.clone() };
            assert_eq!(pipeline_of(&config), pipeline);
            let small = OrderConfig { dram_budget_bytes: 1 << 20, ..config.clone() };
            assert_eq!(pipeline_of(&small), pipeline);
            let looking = OrderConfig { read_only: true, ..config };
            assert_eq!(pipeline_of(&looking), Pipeline::Off);
        }
    }
}
