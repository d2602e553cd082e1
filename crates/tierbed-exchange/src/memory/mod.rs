//! Shared memory of ranks: maps, and the only typed views of them.
//!
//! All `unsafe` of this crate lives in this folder.

mod futex;
mod map;
mod region;

pub(crate) use futex::{wait_while, wake_all};
pub(crate) use map::Map;
pub use region::{Region, Writer};
