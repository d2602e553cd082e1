//! See `tierbed_trainstore::fuzz::page`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_trainstore::fuzz::page(bytes));
