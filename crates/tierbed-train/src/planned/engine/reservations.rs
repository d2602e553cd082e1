//! Reservations of the budget, decided and paid for before any row is there.

use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_io::{EngineOptions, Folder, OpenMode, PAGE_BYTES};

use super::dump::DUMP_BUF_BYTES;
use super::replan::answer_bytes as answer_bytes_for;
use super::scratch::Scratch;
use super::stored::Stored;
use super::{Pipeline, PlannedConfig, PlannedTables, EXTENTS_FILE};
use crate::planned::store::disk::Disk;
use crate::planned::store::sizing::{Sizes, SpanRequest};
use crate::planned::store::storage_thread::STACK_BYTES;

/// How often a minimum is tried before it is named; a handful of times suffices.
const NAMINGS_MAX: usize = 64;

/// What memory is shared out for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Training,
    /// Moving all rows to another plan: lists are write buffers, not windows.
    Moving {
        source_bytes: u64,
        row_count: u64,
    },
}

/// What is sized, opened and paid for before any row is there.
pub(super) struct Reservations {
    pub(super) sizes: Sizes,
    pub(super) disk: Disk,
    pub(super) budget: Budget,
    pub(super) chunk_memory: Reservation,
    /// Rows move on a thread of their own, whose stack is paid for.
    pub(super) has_thread: bool,
    /// For finding first uses, when rows are moved.
    pub(super) answer_bytes: u64,
    pub(super) memory: Vec<Reservation>,
}

impl Reservations {
    /// Opens the file of extents and shares the budget out.
    ///
    /// # Errors
    /// `Invalid` for a budget too small, naming the minimum.
    pub(super) fn reserve(
        folder: &dyn Folder,
        tables: &PlannedTables,
        config: &PlannedConfig,
        stored: &Stored,
        purpose: Purpose,
    ) -> Result<Self> {
        if config.pipeline == Pipeline::IfItFits {
            let try_with = |pipeline| {
                let config = PlannedConfig { pipeline, ..config.clone() };
                Self::reserve_once(folder, tables, &config, stored, purpose)
            };
            match try_with(Pipeline::On) {
                Err(error) if error.minimum_bytes().is_some() => {}
                result => return result,
            }
        }
        let result = Self::reserve_once(folder, tables, config, stored, purpose);
        let Err(error) = result else { return result };
        let Some(named) = error.minimum_bytes() else { return Err(error) };
        // Parts that follow the budget take more of a larger one: the minimum is the first that
        // is named for itself no more.
        let mut minimum = named;
        for _ in 0..NAMINGS_MAX {
            let config = PlannedConfig { dram_budget_bytes: minimum, ..config.clone() };
            match Self::reserve_once(folder, tables, &config, stored, purpose) {
                Ok(_) => break,
                Err(again) => match again.minimum_bytes() {
                    Some(more) => minimum = more.max(minimum + 1),
                    None => return Err(error),
                },
            }
        }
        Err(Error::invalid("dram budget is too small for this plan")
            .with_minimum_bytes(minimum)
            .with("dram_budget_bytes", config.dram_budget_bytes)
            .with(
                "remedy",
                format_args!(
                    "raise dram_budget to at least {minimum} bytes, or plan smaller windows"
                ),
            ))
    }

    fn reserve_once(
        folder: &dyn Folder,
        tables: &PlannedTables,
        config: &PlannedConfig,
        stored: &Stored,
        purpose: Purpose,
    ) -> Result<Self> {
        let PlannedTables { schema, plan } = tables;
        let budget = Budget::new(config.dram_budget_bytes);
        let mut sizes = Sizes::needs(schema, plan, config.dram_budget_bytes);
        let limit_bytes = config.dram_budget_bytes;
        let scratch_bytes = Scratch::memory_bytes(schema, plan, sizes.entries_max, limit_bytes);
        let fixed_bytes = sizes.fixed_bytes() + scratch_bytes + DUMP_BUF_BYTES as u64;
        let free_bytes = config.dram_budget_bytes.saturating_sub(fixed_bytes);
        let request = SpanRequest {
            limit_bytes: config.dram_budget_bytes,
            free_bytes,
            wanted: config.span_windows,
            stored: stored.span_windows(),
        };
        sizes.share_buckets(plan, request);
        sizes.buf_bytes = sizes.buf_bytes.max(stored.chunk_bytes_max());
        assert!(sizes.buf_bytes.is_multiple_of(PAGE_BYTES), "a buffer holds part of a page");
        let mut memory = vec![budget.reserve("plan windows", sizes.window_bytes)?];
        let scan_bytes = (sizes.buf_bytes + DUMP_BUF_BYTES) as u64;
        memory.push(budget.reserve("scan buffers", scan_bytes)?);
        let device = folder.open(EXTENTS_FILE, OpenMode::Create)?;
        let options = EngineOptions {
            choice: config.io_engine.parse()?,
            queue_depth: sizes.queue_depth,
            buf_bytes: sizes.buf_bytes,
        };
        let disk = Disk::new(device, &options)?;
        memory.push(budget.reserve("io buffers", disk.memory_bytes())?);
        let has_thread = config.pipeline == Pipeline::On && purpose == Purpose::Training;
        let mut answer_bytes = 0;
        let chunk_memory = match purpose {
            Purpose::Training => {
                memory.push(budget.reserve("batch scratch", scratch_bytes)?);
                memory.push(budget.reserve(
                    "rows of windows",
                    sizes.arenas_bytes + sizes.staging_bytes() as u64,
                )?);
                if has_thread {
                    memory.push(budget.reserve("storage thread", STACK_BYTES as u64)?);
                }
                // The slack is for chunk lists; those there already have had their part of it.
                sizes.slack_bytes = sizes.slack_bytes.saturating_sub(stored.chunk_bytes());
                budget.reserve("chunk lists", stored.chunk_bytes())?
            }
            Purpose::Moving { source_bytes, row_count } => {
                memory.push(budget.reserve("rows to move", source_bytes)?);
                memory.push(budget.reserve("unplanned rows", sizes.for_moving())?);
                answer_bytes = answer_bytes_for(row_count, budget.free_bytes() / 3);
                memory.push(budget.reserve("first uses", answer_bytes)?);
                budget.reserve("chunk lists", 0)?
            }
        };
        let used_bytes = budget.limit_bytes() - budget.free_bytes();
        let taken_bytes = sizes.share_out(used_bytes, budget.free_bytes())?;
        memory.push(budget.reserve("waiting rows", taken_bytes)?);
        Ok(Self { sizes, disk, budget, chunk_memory, has_thread, answer_bytes, memory })
    }
}
