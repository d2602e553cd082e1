//! See `tierbed_placement::fuzz::query_log`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_placement::fuzz::query_log(bytes));
