//! See `tierbed_lab::fuzz::trace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_lab::fuzz::trace(bytes));
