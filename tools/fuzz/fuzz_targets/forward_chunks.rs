//! See `tierbed_forward::fuzz::chunks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_forward::fuzz::chunks(bytes));
