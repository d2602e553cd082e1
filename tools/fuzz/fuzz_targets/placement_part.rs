//! See `tierbed_placement::fuzz::part`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_placement::fuzz::part(bytes));
