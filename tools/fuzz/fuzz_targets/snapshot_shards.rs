//! See `tierbed_snapshot::fuzz::shards`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_snapshot::fuzz::shards(bytes));
