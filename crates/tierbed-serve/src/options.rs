//! Limits on what a request, a client and all clients together may cost.
//!
//! Every limit of the server is a field here, checked when the server starts. The defaults are
//! those of docs/reference/http.md.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};

use crate::features::ServedFeature;
use crate::log::LogOptions;
use crate::tls::TlsFiles;

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Host and port to listen on; port 0 picks a free one.
    pub address: String,
    /// Host and port for gRPC; none without.
    pub grpc_address: Option<String>,
    /// Host and port for operators: a live page, statistics, probes; none without.
    pub admin_address: Option<String>,
    /// The file of tokens that clients need; without one everybody may ask.
    pub tokens: Option<PathBuf>,
    /// The files of TLS; without them connections are not encrypted.
    pub tls: Option<TlsFiles>,
    /// Whether addresses that others can reach need tokens or certificates of clients.
    pub requires_auth: bool,
    /// The folder of deltas to follow; none without.
    pub deltas: Option<PathBuf>,
    /// How long a generation before the newest answers who asks for it, after the last who did, in
    /// milliseconds; 0: no longer. `None`: 5 s for a shard, else 0.
    pub generation_grace_ms: Option<u64>,
    /// Threads that move bytes.
    pub worker_threads: usize,
    /// Threads that look up and predict.
    pub lookup_threads: usize,
    /// What requests and clients may cost.
    pub limits: Limits,
    /// What is written about requests and failures.
    pub log: LogOptions,
    /// The collector that spans of requests are sent to, `http://host:4317`; without one, that of
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`, or none. Needs the feature `otel`.
    pub otlp_endpoint: Option<String>,
    /// The features, when not those of the snapshot.
    pub features: Option<Vec<ServedFeature>>,
    /// The snapshot's name in answers; that of its folder when none is given.
    pub snapshot_name: Option<String>,
    /// The name of the snapshot's models in the Open Inference Protocol.
    pub model_name: String,
    /// The time, for latencies and uptime.
    pub clock: Arc<dyn Clock>,
}

/// What requests and clients may cost. No limit may be 0, but for `inline_indices_max`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Connections open at once; more are answered with 503 and closed. Fewer where the process
    /// may not open so many files.
    pub connections_max: usize,
    /// Handshakes of TLS at once; others wait for them.
    pub handshakes_max: usize,
    /// Lookups and predictions whose bodies have arrived, at once; more are answered with 503.
    pub requests_max: usize,
    /// Longest time that a request may wait for a thread, as predicted when it comes; one that
    /// would wait longer is answered with 503 at once.
    pub queue_ms_max: u64,
    /// Largest body accepted.
    pub body_bytes_max: usize,
    /// Most indices in one lookup.
    pub indices_max: usize,
    /// Most indices of a lookup that is answered by the thread that received it, which waits for
    /// nothing but pages; 0: every lookup goes through the queue.
    pub inline_indices_max: usize,
    /// Most bags in one lookup: samples times features.
    pub bags_max: usize,
    /// Largest answer to a lookup.
    pub answer_bytes_max: usize,
    /// Bytes of all bodies and answers in memory beyond the first 64 KiB of each.
    pub buffer_bytes_max: usize,
    /// Longest time from a connection to the end of its handshake.
    pub handshake_ms_max: u64,
    /// Longest time for a request's head, from its first byte.
    pub head_ms_max: u64,
    /// Longest time for a request's body.
    pub body_ms_max: u64,
    /// Longest pause within a body.
    pub body_idle_ms_max: u64,
    /// Longest time from a request's head to its answer.
    pub request_ms_max: u64,
    /// Longest time for a client to take its answer.
    pub answer_ms_max: u64,
    /// Longest time that a connection may wait for its first or next request.
    pub idle_ms_max: u64,
    /// Longest time that `stop` waits for requests under way.
    pub stop_ms_max: u64,
    /// How long `/health` tells of a failure after it happened.
    pub degraded_ms: u64,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(4, std::num::NonZero::get);
        Self {
            address: "127.0.0.1:8080".to_owned(),
            grpc_address: None,
            admin_address: None,
            tokens: None,
            tls: None,
            requires_auth: false,
            deltas: None,
            generation_grace_ms: None,
            worker_threads: cores.min(2),
            lookup_threads: cores.min(16),
            limits: Limits::default(),
            log: LogOptions::default(),
            otlp_endpoint: None,
            features: None,
            snapshot_name: None,
            model_name: "tierbed".to_owned(),
            clock: Arc::new(SystemClock::default()),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 2048,
            handshakes_max: 256,
            // Every connection may have one.
            requests_max: 2048,
            queue_ms_max: 50,
            body_bytes_max: 16 << 20,
            indices_max: 1 << 20,
            // Some twenty microseconds.
            inline_indices_max: 512,
            bags_max: 1 << 20,
            answer_bytes_max: 64 << 20,
            buffer_bytes_max: 256 << 20,
            handshake_ms_max: 5_000,
            head_ms_max: 10_000,
            body_ms_max: 10_000,
            body_idle_ms_max: 5_000,
            // Longer than a caller of recommendations waits.
            request_ms_max: 10_000,
            answer_ms_max: 30_000,
            // Longer than balancers keep theirs, so that they close first.
            idle_ms_max: 75_000,
            stop_ms_max: 10_000,
            degraded_ms: 60_000,
        }
    }
}

/// The longest time of any limit, a day: longer ones are mistakes.
const TIME_MS_MAX: u64 = 24 * 3_600_000;

impl ServeOptions {
    /// Checks all numbers.
    ///
    /// # Errors
    /// `Invalid` naming a field that is 0 or longer than a day.
    pub(crate) fn check(&self) -> Result<()> {
        let limits = &self.limits;
        let counts = [
            ("worker_threads", self.worker_threads),
            ("lookup_threads", self.lookup_threads),
            ("connections_max", limits.connections_max),
            ("handshakes_max", limits.handshakes_max),
            ("requests_max", limits.requests_max),
            ("body_bytes_max", limits.body_bytes_max),
            ("indices_max", limits.indices_max),
            ("bags_max", limits.bags_max),
            ("answer_bytes_max", limits.answer_bytes_max),
            ("buffer_bytes_max", limits.buffer_bytes_max),
        ];
        if let Some((option, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(Error::invalid("option of the server must be at least 1")
                .with("option", option)
                .with("found", 0));
        }
        let times = [
            ("queue_ms_max", limits.queue_ms_max),
            ("handshake_ms_max", limits.handshake_ms_max),
            ("head_ms_max", limits.head_ms_max),
            ("body_ms_max", limits.body_ms_max),
            ("body_idle_ms_max", limits.body_idle_ms_max),
            ("request_ms_max", limits.request_ms_max),
            ("answer_ms_max", limits.answer_ms_max),
            ("idle_ms_max", limits.idle_ms_max),
            ("stop_ms_max", limits.stop_ms_max),
            ("degraded_ms", limits.degraded_ms),
        ];
        match times.iter().find(|(_, ms)| *ms == 0 || *ms > TIME_MS_MAX) {
            Some((option, found)) => {
                Err(Error::invalid("time limit of the server is out of range")
                    .with("option", option)
                    .with("found", found)
                    .with("expected", format_args!("1 to {TIME_MS_MAX}")))
            }
            None => Ok(()),
        }
    }
}
