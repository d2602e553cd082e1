//! Which few pages hold these rows? Immutable serving snapshots.

pub mod sorter;
