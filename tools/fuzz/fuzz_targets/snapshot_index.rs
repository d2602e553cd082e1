//! See `tierbed_pagestore::fuzz::index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_pagestore::fuzz::index(bytes));
