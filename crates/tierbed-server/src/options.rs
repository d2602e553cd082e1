//! Table of everything that can be set: names, units, defaults and words.
//!
//! A field is an option of the command line, a key of the file and a variable of the environment.
//! The words are those of `tierbed serve`, which a test compares; docs/reference/configuration.md
//! is made of this file by `cargo x config`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};
use tierbed_core::{Error, Result};
use tierbed_serve::{
    Follow, GatewayOptions, Limits, MissingShard, RowType, ServeOptions, ShardAccess,
};

use crate::values::{bytes, count, count_or_0, flag, limit_ms, ms, seconds, share, Size};

/// Answers lookups over a published snapshot, by HTTP and gRPC, without Python.
#[derive(Debug, Clone, Parser)]
#[command(name = "tierbed-server", version, max_term_width = 120)]
#[command(after_help = "Options are also keys of the file that --config names, and variables of \
    the environment: --queue-ms-max is TIERBED_QUEUE_MS_MAX. The command line goes before the \
    environment, and that before the file.\n\n\
    SIGTERM drains, a second one or SIGINT stops at once; SIGHUP reads tokens and certificates \
    again. Exit codes: 0 done, 1 the work failed, 2 something is set wrongly, 3 a request did not \
    end.")]
pub struct Options {
    /// The snapshot's folder, or `LOCATION@CHANNEL` of versions to follow; `NAME=` before it is the
    /// model's name.
    #[arg(value_name = "[NAME=]SNAPSHOT")]
    pub snapshot: Option<String>,
    /// A file of options in TOML: `queue-ms-max = 20`.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what is set, as such a file, and where it comes from; serve nothing.
    #[arg(long)]
    pub print_config: bool,
    /// host:port; port 0 picks a free one.
    #[arg(long, value_name = "ADDRESS", default_value_t = ServeOptions::default().address)]
    pub address: String,
    /// After SIGTERM, seconds for balancers to see that the server is not ready; a second signal
    /// ends them.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    pub drain_delay: f64,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub reading: Reading,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub versions: Versions,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub routing: Routed,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub recording: Recording,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub limits: Limiting,
    #[command(flatten)]
    #[expect(missing_docs, reason = "a group, whose title stands with its type")]
    pub serving: Serving,
}

/// How the snapshot is read.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Rows")]
pub struct Reading {
    /// Memory for everything that is kept: 16MiB, 4GiB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = bytes)]
    pub dram_budget: Size,
    /// How pages are read.
    #[arg(long, value_parser = ["direct", "mmap", "memory"], default_value = "direct")]
    pub backend: String,
    /// auto falls back by itself.
    #[arg(long, value_parser = ["auto", "io_uring", "pread", "inline"], default_value = "auto")]
    pub io_engine: String,
    /// Tiers, by comma: codec:policy:share:admit, or a policy; and neighbours:second_chance:share.
    #[arg(long, value_name = "TIERS", default_value = "lru")]
    pub cache: String,
    /// Rows that stay in memory: a file of a plan.
    #[arg(long, value_name = "FILE")]
    pub resident: Option<PathBuf>,
    /// File of neighbours; by default beside the snapshot.
    #[arg(long, value_name = "FILE")]
    pub neighbours: Option<PathBuf>,
    /// Read, or answer by the plan, a neighbour, or a default.
    #[arg(long, value_parser = ["read", "surrogate", "default"], default_value = "read")]
    pub misses: String,
    /// Tables, by comma, whose approximate answers are followed by a read; all: every.
    #[arg(long, value_name = "TABLES", default_value = "")]
    pub refresh: String,
}

/// How the versions of a channel are followed.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Versions")]
pub struct Versions {
    /// With `LOCATION@CHANNEL`: the folder of this machine that versions come to.
    #[arg(long, value_name = "FOLDER")]
    pub local: Option<PathBuf>,
    /// Time between two looks at the channel.
    #[arg(long, value_name = "SECONDS", default_value = "2s", value_parser = seconds)]
    pub poll: f64,
    /// Most bytes per second that are fetched; by default a fifth of what the disk takes.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub sync_bandwidth: Option<Size>,
    /// Part of the memory for rows that a new snapshot has until it answers alone.
    #[arg(long, value_name = "SHARE", default_value_t = Follow::SWAP_SHARE, value_parser = share)]
    pub swap_share: f64,
}

/// How a gateway asks the servers of shards.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Shards")]
pub struct Routed {
    /// Answer as a gateway: the folder of shards.json, in place of a snapshot.
    #[arg(long, value_name = "FOLDER")]
    pub route: Option<PathBuf>,
    /// With --route: the servers of each shard, a file in TOML or JSON, or dns:rows-{shard}:8001.
    #[arg(long, value_name = "MEMBERS")]
    pub members: Option<String>,
    /// What is answered for rows of a shard of which no server answers.
    #[arg(long, value_parser = ["refuse", "default-rows"], default_value = "refuse")]
    pub missing_shard: String,
    /// How rows come from shards; narrower ones are rounded.
    #[arg(long, value_parser = ["f32", "f16", "bf16"], default_value = "f32")]
    pub row_type: String,
    /// Authorities of the shards' certificates, in PEM; None: plain.
    #[arg(long, value_name = "FILE")]
    pub shard_ca: Option<PathBuf>,
    /// The certificate that shards want of a gateway, in PEM.
    #[arg(long, value_name = "FILE")]
    pub shard_cert: Option<PathBuf>,
    /// The key of that certificate, in PEM.
    #[arg(long, value_name = "FILE")]
    pub shard_key: Option<PathBuf>,
    /// The name in the shards' certificates, where it is not that of their addresses.
    #[arg(long, value_name = "NAME")]
    pub shard_name: Option<String>,
    /// The file of the token that shards want.
    #[arg(long, value_name = "FILE")]
    pub shard_token: Option<PathBuf>,
    /// Longest time at the start to wait for a server of every shard.
    #[arg(long, value_name = "SECONDS", default_value = "60s", value_parser = seconds)]
    pub shard_wait: f64,
}

impl Routed {
    /// Returns how to route; `None` where the server has rows of its own.
    ///
    /// # Errors
    /// `Invalid` for one of `route` and `members` without the other, or without both for access
    /// to shards.
    pub fn gateway(&self) -> Result<Option<GatewayOptions>> {
        let files = [&self.shard_ca, &self.shard_cert, &self.shard_key, &self.shard_token];
        let has_access = self.shard_name.is_some() || files.iter().any(|file| file.is_some());
        let (route, members) = match (&self.route, &self.members) {
            (None, None) if has_access => {
                return Err(Error::invalid("only a gateway has access to shards")
                    .with("remedy", "give route and members together"));
            }
            (None, None) => return Ok(None),
            (Some(route), Some(members)) => (route, members),
            _ => {
                return Err(Error::invalid("a gateway needs a map and members")
                    .with("remedy", "give route and members together"));
            }
        };
        Ok(Some(GatewayOptions {
            missing: MissingShard::from_name(&self.missing_shard)?,
            row_type: RowType::from_name(&self.row_type)?,
            access: ShardAccess {
                ca: self.shard_ca.clone(),
                certificate: self.shard_cert.clone(),
                key: self.shard_key.clone(),
                server_name: self.shard_name.clone(),
                token: self.shard_token.clone(),
            },
            wait: Duration::from_secs_f64(self.shard_wait),
            ..GatewayOptions::new(route, members)
        }))
    }
}

/// What is recorded of the queries.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Recording")]
pub struct Recording {
    /// Record queries here, for `tierbed place`.
    #[arg(long, value_name = "FOLDER")]
    pub record: Option<PathBuf>,
    /// Tables that share pages, with commas between; repeat for several groups. By default every
    /// table by itself.
    #[arg(long, value_name = "TABLES")]
    pub record_tables: Vec<String>,
    /// Share of the queries that are recorded.
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    pub record_sample: f64,
    /// Most bytes of each log; the oldest are removed.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = bytes)]
    pub record_max: Size,
}

/// The default of a limit.
fn of<T>(limit: impl Fn(Limits) -> T) -> T {
    limit(Limits::default())
}

/// The default of a limit in bytes.
fn size_of(limit: impl Fn(Limits) -> usize) -> Size {
    Size(limit(Limits::default()) as u64)
}

/// What requests and clients may cost.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub struct Limiting {
    /// Connections open at once; more are answered with 503 and closed.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    #[arg(default_value_t = of(|limits| limits.connections_max))]
    pub connections_max: usize,
    /// Handshakes of TLS at once; others wait for them.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    #[arg(default_value_t = of(|limits| limits.handshakes_max))]
    pub handshakes_max: usize,
    /// Lookups and predictions whose bodies have arrived, at once; more get a 503.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    #[arg(default_value_t = of(|limits| limits.requests_max))]
    pub requests_max: usize,
    /// Longest time that a request may wait for a thread, as predicted when it comes; one that
    /// would wait longer gets a 503 at once.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.queue_ms_max))]
    pub queue_ms_max: u64,
    /// Largest body accepted.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    #[arg(default_value_t = size_of(|limits| limits.body_bytes_max))]
    pub body_max: Size,
    /// Most indices in one lookup.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    #[arg(default_value_t = of(|limits| limits.indices_max))]
    pub indices_max: usize,
    /// Most indices of a lookup that is answered by the thread that received it; 0: none is.
    #[arg(long, value_name = "COUNT", value_parser = count_or_0)]
    #[arg(default_value_t = of(|limits| limits.inline_indices_max))]
    pub inline_indices_max: usize,
    /// Most bags in one lookup: samples times features.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    #[arg(default_value_t = of(|limits| limits.bags_max))]
    pub bags_max: usize,
    /// Largest answer to a lookup.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    #[arg(default_value_t = size_of(|limits| limits.answer_bytes_max))]
    pub answer_max: Size,
    /// Bytes of bodies and answers beyond the first 64 KiB of each.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    #[arg(default_value_t = size_of(|limits| limits.buffer_bytes_max))]
    pub buffer_max: Size,
    /// Longest time from a connection to the end of its handshake.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.handshake_ms_max))]
    pub handshake_ms_max: u64,
    /// Longest time for a request's head.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.head_ms_max))]
    pub head_ms_max: u64,
    /// Longest time for a request's body.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.body_ms_max))]
    pub body_ms_max: u64,
    /// Longest pause within a body.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.body_idle_ms_max))]
    pub body_idle_ms_max: u64,
    /// Longest time from a request's head to its answer.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.request_ms_max))]
    pub request_ms_max: u64,
    /// Longest time for a client to take its answer.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.answer_ms_max))]
    pub answer_ms_max: u64,
    /// Longest time that a connection may wait for a request.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.idle_ms_max))]
    pub idle_ms_max: u64,
    /// Longest time that stopping waits for requests under way.
    #[arg(long, value_name = "MS", value_parser = limit_ms)]
    #[arg(default_value_t = of(|limits| limits.stop_ms_max))]
    pub stop_ms_max: u64,
}

/// How the server works and what it tells.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Threads and log")]
pub struct Serving {
    /// "host:port" for gRPC; port 0 picks a free one, None: no gRPC.
    #[arg(long, value_name = "ADDRESS")]
    pub grpc_address: Option<String>,
    /// "host:port" for operators: a live page, statistics, probes; None: no such address.
    #[arg(long, value_name = "ADDRESS")]
    pub admin_address: Option<String>,
    /// The file of tokens that clients need, a line for each: name, SHA-256, scopes.
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// The server's certificate in PEM, then those up to its authority; None: plain.
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The key of the certificate, in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Authorities in PEM; a client needs a certificate of one of them.
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// DNS names, by comma, one of which a client's certificate must have.
    #[arg(long, value_name = "NAMES", default_value = "")]
    pub tls_client_names: String,
    /// Refuse an address that others can reach without tokens or tls_client_ca.
    #[arg(long, value_name = "true|false", value_parser = flag)]
    #[arg(default_value = "false", default_missing_value = "true")]
    #[arg(num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    pub require_auth: bool,
    /// A folder into which deltas are published, each a folder in it: the server answers from the
    /// newest, by name, as it comes.
    #[arg(long, value_name = "FOLDER")]
    pub deltas: Option<PathBuf>,
    /// How long a shard answers from older generations, after they were last asked for; by
    /// default 5 s, and 0 for servers of no shard.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub generation_grace: Option<f64>,
    /// Threads that move bytes; by default 2, or the number of cores if less.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub worker_threads: Option<usize>,
    /// Threads that look up and predict; by default the cores, at most 16.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub lookup_threads: Option<usize>,
    /// The model's name in the Open Inference Protocol; lookups are NAME.rows.
    #[arg(long, value_name = "NAME", default_value_t = ServeOptions::default().model_name)]
    pub model_name: String,
    /// The least important lines written to standard error, one JSON object each.
    #[arg(long, value_parser = ["off", "error", "warn", "info"], default_value = "info")]
    pub log_level: String,
    /// Write a line for every request, too, at level info.
    #[arg(long, value_name = "true|false", value_parser = flag)]
    #[arg(default_value = "false", default_missing_value = "true")]
    #[arg(num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    pub access_log: bool,
    /// Requests that take longer are written.
    #[arg(long, value_name = "MS", default_value_t = 1_000, value_parser = ms)]
    pub slow_ms: u64,
    /// The collector that traces are sent to by OTLP, over gRPC: http://host:4317. Needs a build
    /// with the feature otel.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

impl Limiting {
    /// Returns them as the server takes them.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let bytes = |size: Size| usize::try_from(size.0).unwrap_or(usize::MAX);
        Limits {
            connections_max: self.connections_max,
            handshakes_max: self.handshakes_max,
            requests_max: self.requests_max,
            queue_ms_max: self.queue_ms_max,
            body_bytes_max: bytes(self.body_max),
            indices_max: self.indices_max,
            inline_indices_max: self.inline_indices_max,
            bags_max: self.bags_max,
            answer_bytes_max: bytes(self.answer_max),
            buffer_bytes_max: bytes(self.buffer_max),
            handshake_ms_max: self.handshake_ms_max,
            head_ms_max: self.head_ms_max,
            body_ms_max: self.body_ms_max,
            body_idle_ms_max: self.body_idle_ms_max,
            request_ms_max: self.request_ms_max,
            answer_ms_max: self.answer_ms_max,
            idle_ms_max: self.idle_ms_max,
            stop_ms_max: self.stop_ms_max,
            ..Limits::default()
        }
    }
}
