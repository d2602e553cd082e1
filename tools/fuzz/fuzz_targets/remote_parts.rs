//! See `tierbed_remote::fuzz::parts`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_remote::fuzz::parts(bytes));
