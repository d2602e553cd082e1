//! See `tierbed_remote::fuzz::head`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_remote::fuzz::head(bytes));
