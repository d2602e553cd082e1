//! Can any bytes make a decoder of this crate panic? Entries for `tools/fuzz/`, not an interface.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! decodes them. Damage is an error, which is fine; anything else that goes wrong is a bug.

pub use crate::engine::fuzz_chunks as chunks;
pub use crate::plan::fuzz_plan as plan;
