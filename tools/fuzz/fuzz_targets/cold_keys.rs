//! See `tierbed_store::cold::fuzz::keys`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_store::cold::fuzz::keys(bytes));
