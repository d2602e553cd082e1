//! See `tierbed_store::cold::fuzz::table`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_store::cold::fuzz::table(bytes));
