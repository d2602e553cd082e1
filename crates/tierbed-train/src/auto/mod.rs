//! Choice of the engine: one [`AutoEngine`] in front of the window and the planned engine.

pub(crate) mod engine;
mod follow;
mod ids;
mod joined;
mod kept;
pub(crate) mod look;
pub(crate) mod moving;
mod moving_to_plan;
pub(crate) mod noting;
mod on_device;
mod open_tables;
pub(crate) mod options;
pub(crate) mod part_bags;
mod pieces;
mod planless;
mod planned;
pub(crate) mod publish_delta;
mod sorted_ids;
mod stats;
mod tables;
mod train;
mod unplanned;
mod windowed;
mod with_ids;

pub use engine::AutoEngine;
pub use follow::{Answer, PlanRequest};
pub use options::{OnMismatch, Order, OrderConfig};
pub use stats::budget_json;
