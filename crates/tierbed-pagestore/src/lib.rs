//! Which few pages hold these rows? Immutable serving snapshots.

pub mod forward_index;
pub mod manifest;
pub mod page;
pub mod sorter;
