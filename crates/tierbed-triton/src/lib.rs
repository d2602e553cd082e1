//! Backend of Triton that answers lookups over a snapshot: `libtriton_tierbed.so`.
//!
//! ```text
//! config.pbtxt ─▶ Config ─▶ Source::open ─▶ Hosted                          (a model is loaded)
//! requests of a batch ─▶ inputs copied ─▶ Hosted::answer, one lookup ─▶ outputs ─▶ responses
//! ```
//!
//! Triton brings the protocols, the queue, batches and metrics. Parameters have the words of
//! `tierbed-server`; tensors are those of its model `NAME.rows`. [`ffi`] alone knows the interface
//! in C: how Triton is called, and what it calls. See docs/how-to/serve-behind-triton.md.

mod config;
mod execute;
mod failure;
mod ffi;
mod model;
