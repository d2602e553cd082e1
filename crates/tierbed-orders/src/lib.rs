//! In which order will rows be needed, and who follows it?
//!
//! One [`OrderedEngine`] stands in front of two engines with the same semantics. When the order
//! of the epoch is known, [`tierbed_forward::ForwardEngine`] trains along a plan; when only a
//! window of batches is known, [`tierbed::Engine`] reads rows by number. A store starts
//! undecided and is decided by the first call that needs to know. What was planned and does not
//! come is an error, or every row moves to the other engine and training goes on: never a silent
//! mismatch.

mod along;
mod engine;
mod folders;
mod follow;
mod look;
mod moving;
mod options;
mod part_bags;
mod planless;
mod publish;
mod repair;
mod rows;
mod shards;
mod side;
mod stats;

pub use engine::OrderedEngine;
pub use folders::{
    check_folder, drop_checkpoint, kept_checkpoints, restore_checkpoint, rows_folder,
};
pub use follow::{Answer, PlanRequest};
pub use options::{OnMismatch, Order, OrderConfig};
pub use repair::{candidates, put_in_force, Candidate, CandidateTable};
pub use shards::ShardedEngine;
pub use stats::budget_json;
