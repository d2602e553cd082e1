//! See `tierbed_store::fuzz::map`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_store::fuzz::map(bytes));
