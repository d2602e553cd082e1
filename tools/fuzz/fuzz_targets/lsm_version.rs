//! See `tierbed_lsm::fuzz::version`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_lsm::fuzz::version(bytes));
