//! See `tierbed_serve::fuzz::lookup`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_serve::fuzz::lookup(bytes));
