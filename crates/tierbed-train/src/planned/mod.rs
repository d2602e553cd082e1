//! Time-forward training along a known order of batches.
//!
//! Two steps. A streaming pre-pass reads the epoch's ids once and writes a [`plan`]. Then
//! training runs along it: rows in use lie in an arena, a row that is not needed soon is appended
//! to the bucket of the window that needs it next ([`store`]), and that bucket is read in one go,
//! one window ahead. No random read, no index, no compaction; a row never used costs nothing.
//! Design: `docs/explanation/decisions/0002-forward-order.md`.

mod bits;
pub mod device;
pub mod engine;
#[cfg(any(test, fuzzing))]
#[path = "../../../../tools/fuzz/entries/train.rs"]
pub mod fuzz;
pub mod plan;
mod store;

pub(crate) use engine::{
    folder_bytes, grown, stored_plan, Arrival, NotArrived, RecordSink, EXTENTS_FILE,
};
pub use engine::{
    AnySink, Piece, Pipeline, PlannedConfig, PlannedEngine, PlannedStats, Position, UnplannedReads,
    BACKEND,
};
pub use plan::{copy_name, source_of, EpochPlan, PlanBuilder, PlanOptions, PlanShape};
pub use tierbed_kernels::Grads;
