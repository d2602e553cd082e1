//! See `tierbed_remote::fuzz::marks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_remote::fuzz::marks(bytes));
