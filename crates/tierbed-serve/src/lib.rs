//! HTTP and gRPC server of lookups and predictions over a snapshot.
//!
//! ```text
//! door ─▶ handshake ─▶ connection ─▶ head ─▶ route ─▶ body ─▶ place ─▶ executor: all that wait,
//!                      decoded ─▶ one Snapshot::lookup ─▶ Predictor, if asked ─▶ encode ─▶ answers
//! ```
//!
//! Async threads move bytes, and answer small lookups whose rows are in memory; what is larger or
//! may wait runs on a fixed number of threads of the executor, so a slow disk never stalls
//! `/health`. What clients may cost is
//! bounded: connections, time to send and to take, bytes in memory, indices, bags, requests at
//! once ([`Limits`]). What fails is logged, counted, and told by `/health`. The interfaces are
//! written down in docs/reference/http.md and docs/reference/oip.md.

mod admin;
mod admission;
mod again;
mod answer;
mod answering;
mod batch;
mod body;
mod coding;
mod columns;
mod connection;
mod deltas;
mod executor;
mod faults;
mod features;
mod follow;
mod following;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/serve.rs"]
pub mod fuzz;
mod gateway;
mod generation;
mod grpc;
mod handshake;
mod hosted;
mod inline;
mod job;
mod joint;
mod json;
mod known;
mod listen;
mod log;
mod lookup;
mod metrics;
mod oip;
mod options;
mod origin;
mod pending;
mod plans;
mod predict;
mod predictor;
mod query;
mod routes;
mod sending;
mod server;
mod shard_tag;
mod spans;
mod stamp;
mod tensors;
mod timed;
mod tls;
mod tokens;
mod wire;

pub use features::ServedFeature;
pub use follow::{Follow, Following, Opener};
pub use gateway::{GatewayOptions, MissingShard, Routing, RowType, ShardAccess};
pub use hosted::{Hosted, HostedAnswer, HostedInput, HostedOutput, HostedRequest, Refused};
pub use log::{LogLevel, LogOptions, LogTarget};
pub use oip::config::Tensor as ServedTensor;
pub use options::{Limits, ServeOptions};
pub use predictor::{Batch, ModelInputs, ModelOutput, Predictor};
pub use server::Server;
pub use tls::TlsFiles;
