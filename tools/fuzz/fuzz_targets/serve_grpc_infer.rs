//! See `tierbed_serve::fuzz::grpc_infer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tierbed_serve::fuzz::grpc_infer(bytes));
