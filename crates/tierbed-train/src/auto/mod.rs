//! Choice of the engine: one [`OrderedEngine`] in front of the window and the planned engine.

mod along;
pub(crate) mod engine;
mod follow;
pub(crate) mod look;
pub(crate) mod moving;
pub(crate) mod options;
pub(crate) mod part_bags;
mod planless;
pub(crate) mod publish;
mod rows;
mod side;
mod stats;

pub use engine::OrderedEngine;
pub use follow::{Answer, PlanRequest};
pub use options::{OnMismatch, Order, OrderConfig};
pub use stats::budget_json;
