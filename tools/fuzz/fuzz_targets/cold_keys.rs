//! See `tierbed_cold::fuzz::keys`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_cold::fuzz::keys(bytes));
