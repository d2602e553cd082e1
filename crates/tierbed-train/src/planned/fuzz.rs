//! Entries for `tools/fuzz/`: decoders of this crate, which no bytes may make panic.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! decodes them. Damage is an error, which is fine; anything else that goes wrong is a bug.

pub use crate::planned::engine::fuzz_chunks as chunks;
pub use crate::planned::plan::fuzz_plan as plan;
