//! Laboratory: what only measures and compares, and no product crate is linked with.
//!
//! The [`generator`] makes samples with the shape of a click log, the same ones for the same seed;
//! a [`trace`] is ids alone, at the size of the published log. [`Replays`] asks many caches for
//! one log, [`bounds`] says what no cache can exceed, and [`policy`] has eviction policies to
//! compare with. [`VectorSsd`] is a model of a device that reads vectors: real bytes, simulated
//! time.

pub mod bounds;
#[doc(hidden)]
pub mod fuzz;
pub mod generator;
pub mod policy;
mod replays;
pub mod trace;
pub mod vector_ssd;

pub use generator::{Generator, GeneratorOptions};
pub use policy::register_policies;
pub use replays::Replays;
pub use vector_ssd::{SsdModel, VectorSsd, VectorTable};
