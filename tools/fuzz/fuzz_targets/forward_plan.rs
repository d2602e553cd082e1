//! See `tierbed_train::planned::fuzz::plan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_train::planned::fuzz::plan(bytes));
