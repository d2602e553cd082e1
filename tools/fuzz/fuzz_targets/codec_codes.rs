//! See `tierbed_kernels::fuzz::codes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_kernels::fuzz::codes(bytes));
