//! See `tierbed_lsm::fuzz::rows_block`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_lsm::fuzz::rows_block(bytes));
