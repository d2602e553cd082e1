//! The training engine: ids in, one pooled vector per bag out, gradients in, rows stepped.
//!
//! Two engines with the same semantics. [`planned`] trains along a plan, when the order of the
//! epoch is known; [`window`] reads rows by number, when only a window of batches is known. One
//! [`AutoEngine`] stands in front of both. A store starts undecided and is decided by the
//! first call that needs to know. A batch that was planned and does not come is an error, or
//! every row moves to the other engine and training goes on: never a silent mismatch. A
//! [`ShardedEngine`] divides the tables over several such engines, which work at the same time
//! and commit together. Beside them [`coded`] keeps rows in memory in fewer bytes, to look up
//! only.

mod attachments;
mod auto;
mod batch_token;
pub mod coded;
mod engine;
mod folders;
mod hypers;
mod parts;
pub mod planned;
mod repair;
mod sharded;
mod sort_keys;
mod unsorted;
pub mod window;

pub use auto::{budget_json, Answer, AutoEngine, OnMismatch, Order, OrderConfig, PlanRequest};
pub use batch_token::BatchToken;
pub use coded::CodedTables;
pub use engine::{Access, OwnRows, PlanFollower, RowVisitor, TableRows, TrainEngine};
pub use folders::{check_folder, drop_checkpoint, kept_checkpoints, restore_checkpoint};
pub use repair::{candidates, put_in_force, Candidate, CandidateTable};
pub use sharded::ShardedEngine;
