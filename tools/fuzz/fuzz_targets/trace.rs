//! See `tierbed_data::fuzz::trace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_data::fuzz::trace(bytes));
