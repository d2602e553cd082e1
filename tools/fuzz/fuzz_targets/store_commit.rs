//! See `tierbed_trainstore::fuzz::commit`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_trainstore::fuzz::commit(bytes));
