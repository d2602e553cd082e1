//! See `tierbed_forward::fuzz::plan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_forward::fuzz::plan(bytes));
