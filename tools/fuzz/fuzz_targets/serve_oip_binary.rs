//! See `tierbed_serve::fuzz::oip_binary`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_serve::fuzz::oip_binary(bytes));
