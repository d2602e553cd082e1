//! Who asks from outside? HTTP lookups and predictions over a snapshot.
//!
//! ```text
//! request ─▶ route ─▶ blocking thread: decode ─▶ Snapshot::lookup | Predictor ─▶ encode ─▶ answer
//! ```
//!
//! Async threads only move bytes; decoding, lookups and predictions run on a fixed number of
//! blocking threads, so a slow disk never stalls `/health`. What a request may cost is bounded:
//! body bytes, indices, requests at once. The interface is written down in
//! docs/reference/http.md.

mod answer;
mod features;
mod json;
mod lookup;
mod metrics;
mod routes;
mod server;
mod tensors;

pub use features::ServedFeature;
pub use server::{Predictor, ServeOptions, Server};
