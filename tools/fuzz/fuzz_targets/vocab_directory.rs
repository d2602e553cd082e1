//! See `tierbed_vocab::fuzz::directory`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_vocab::fuzz::directory(bytes));
