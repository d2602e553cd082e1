//! See `entries/codes.rs`.
#![no_main]

#[path = "../entries/codes.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::codes(bytes));
