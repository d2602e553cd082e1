//! See `tierbed_serve::fuzz::inflating`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_serve::fuzz::inflating(bytes));
