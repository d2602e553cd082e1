//! The border to Triton: its interface in C, version 1.12 or later.
//!
//! It is that which `tritonbackend.h` and `tritonserver.h` document.
//!
//! Triton's process has the functions of [`raw`]: they are found when it opens the library. It
//! keeps what its pointers name until the call that it made returns, or until a request or response
//! is given away. The types of [`host`] and [`requests`] live no longer than that. Nothing unwinds
//! into Triton: a panic becomes an error INTERNAL.

mod entries;
mod host;
mod raw;
mod requests;

pub(crate) use host::{log_error, now_ns, Instance, Times};
pub(crate) use requests::{Request, Response};

#[cfg(test)]
mod tests;
