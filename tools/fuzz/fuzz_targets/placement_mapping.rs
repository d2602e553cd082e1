//! See `tierbed_placement::fuzz::mapping`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_placement::fuzz::mapping(bytes));
