//! The laboratory: what only benchmarks, simulators and comparisons need of this module.
//!
//! The cargo feature `lab` links it. A wheel is built without it: there each of these calls is
//! `Unsupported` and names the package that has them.

#[cfg(not(feature = "lab"))]
mod absent;
#[cfg(feature = "lab")]
mod linked;

#[cfg(not(feature = "lab"))]
pub(crate) use absent::{look_up, register_stores, replay_ssd, serve_training, GeneratedLog};
#[cfg(feature = "lab")]
pub(crate) use linked::{look_up, register_stores, replay_ssd, serve_training, GeneratedLog};
