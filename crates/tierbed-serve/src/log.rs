//! Structured log: one JSON object per line, failures first.
//!
//! ```text
//! {"timestamp":"2026-01-31T12:00:00.000000Z","level":"ERROR","event":"request_failed",
//!  "route":"/v1/lookup","status":500,"kind":"corruption","path":"rows.pages","page_id":"7", ...}
//! ```
//!
//! Lines are written in Rust and not by Python's `logging`: a failing disk must be told of while a
//! model holds the interpreter's lock, and a line must not wait for it. They go through a bounded
//! queue ([`lines`]), so a reader of the log that has stopped never stops an answer. What happens
//! often is written at first and then counted: `suppressed` says how many were left out before.

mod follow;
mod lines;
mod spans;
mod throttle;

use std::sync::mpsc::SyncSender;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tierbed_core::env::Clock;
use tierbed_core::{Error, Result};
use tierbed_snapshot::Generation;
use tracing::dispatcher::{with_default, Dispatch};
use tracing::level_filters::LevelFilter;

use self::lines::Lines;
use self::throttle::Throttle;
use crate::answer::Refusal;
use crate::origin::{Named, Origin};

/// What is written about requests and failures.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// The least important lines written.
    pub level: LogLevel,
    /// Write a line for every request, too; needs `level` info.
    pub has_access: bool,
    /// Requests that take longer are written.
    pub slow_ms: u64,
    /// Where lines go.
    pub target: LogTarget,
}

impl Default for LogOptions {
    fn default() -> Self {
        let (level, target) = (LogLevel::Warn, LogTarget::Stderr);
        Self { level, has_access: false, slow_ms: 1_000, target }
    }
}

/// How important a line must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Nothing is written.
    Off,
    /// Failures of the server.
    Error,
    /// And requests refused or slow.
    Warn,
    /// And its life, and requests when asked for.
    Info,
}

impl LogLevel {
    /// Parses a level's name.
    ///
    /// # Errors
    /// `Invalid` for other names.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "off" => Ok(Self::Off),
            "error" => Ok(Self::Error),
            "warn" => Ok(Self::Warn),
            "info" => Ok(Self::Info),
            _ => Err(Error::invalid("unknown log level")
                .with("expected", "off, error, warn or info")
                .with("found", format_args!("{name:?}"))),
        }
    }

    fn filter(self) -> LevelFilter {
        match self {
            Self::Off => LevelFilter::OFF,
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
        }
    }
}

/// Where lines go.
#[derive(Debug, Clone)]
pub enum LogTarget {
    /// The process's standard error.
    Stderr,
    /// A queue of the caller's; lines that find it full are dropped and counted.
    Queue(SyncSender<Vec<u8>>),
}

/// A request as the log tells it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told<'a> {
    pub(crate) route: &'static str,
    pub(crate) status: u16,
    pub(crate) us: u64,
    pub(crate) body_bytes: u64,
    pub(crate) origin: &'a Origin,
}

/// Writes lines.
#[derive(Debug)]
pub(crate) struct Log {
    dispatch: Dispatch,
    lines: Lines,
    has_access: bool,
    pub(crate) slow_us: u64,
    throttle: Throttle,
    clock: Arc<dyn Clock>,
}

/// How long closing waits for the log's reader.
const FLUSH_TIME: Duration = Duration::from_secs(1);

impl Log {
    pub(crate) fn open(options: &LogOptions, clock: &Arc<dyn Clock>) -> Result<Self> {
        let lines = Lines::open(&options.target)?;
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_target(false)
            .with_current_span(false)
            .with_span_list(false)
            .with_max_level(options.level.filter())
            .with_writer(lines.clone());
        Ok(Self {
            dispatch: Dispatch::new(subscriber.finish()),
            lines,
            has_access: options.has_access,
            slow_us: options.slow_ms.saturating_mul(1_000),
            throttle: Throttle::default(),
            clock: Arc::clone(clock),
        })
    }

    /// Returns the counter of lines that found no room.
    pub(crate) fn dropped(&self) -> Counter {
        self.lines.dropped()
    }

    /// Waits until the lines so far are written, for a limited time.
    pub(crate) fn flush(&self) {
        self.lines.flush(FLUSH_TIME);
    }

    fn write(&self, event: impl FnOnce()) {
        with_default(&self.dispatch, event);
    }

    fn write_some(&self, what: &'static str, event: impl FnOnce(u64)) {
        if let Some(suppressed) = self.throttle.admit(what, self.clock.now_us()) {
            self.write(|| event(suppressed));
        }
    }

    pub(crate) fn serving(&self, address: &str, snapshot: &str, identity: &str, threads: usize) {
        let version = env!("CARGO_PKG_VERSION");
        self.write(|| {
            tracing::info!(
                event = "serving",
                version,
                address,
                snapshot,
                identity,
                lookup_threads = threads
            );
        });
    }

    pub(crate) fn fewer_connections(&self, asked: usize, allowed: usize) {
        self.write(|| {
            tracing::warn!(
                event = "connections_limited",
                asked,
                allowed,
                message = "the process may not open more files; raise its limit (ulimit -n)"
            );
        });
    }

    pub(crate) fn open_to_all(&self, address: &str) {
        self.write(|| {
            tracing::warn!(
                event = "open_to_all",
                address,
                message = "whoever reaches this address may ask; give a file of tokens"
            );
        });
    }

    pub(crate) fn tokens_read(&self, clients: usize) {
        self.write(|| tracing::info!(event = "tokens_read", clients));
    }

    pub(crate) fn tokens_not_read(&self, error: &Error) {
        self.write(|| {
            tracing::error!(event = "tokens_not_read", message = %error);
        });
    }

    pub(crate) fn tls_read(&self) {
        self.write(|| tracing::info!(event = "tls_read"));
    }

    pub(crate) fn tls_not_read(&self, error: &Error) {
        self.write(|| {
            tracing::error!(event = "tls_not_read", message = %error);
        });
    }

    /// Tells of a client that no encrypted connection could be made with.
    pub(crate) fn handshake_failed(&self, reason: &'static str, message: &str) {
        self.write_some("handshake", |suppressed| {
            tracing::warn!(event = "handshake_failed", reason, suppressed, message);
        });
    }

    pub(crate) fn delta_applied(&self, delta: &str, now: &Generation) {
        let Generation { number, identity, delta_count, delta_rows, .. } = now;
        self.write(|| {
            tracing::info!(
                event = "delta_applied",
                delta,
                generation = number,
                identity,
                deltas = delta_count,
                rows = delta_rows
            );
        });
    }

    pub(crate) fn delta_refused(&self, delta: &str, error: &Error) {
        self.write_some("delta", |suppressed| {
            tracing::error!(event = "delta_refused", delta, suppressed, message = %error);
        });
    }

    pub(crate) fn delta_waits(&self, delta: &str) {
        self.write(|| {
            tracing::warn!(
                event = "delta_waits",
                delta,
                message = "the delta that it was made against is not there, or was refused"
            );
        });
    }

    pub(crate) fn deltas_not_read(&self, error: &Error) {
        self.write_some("deltas", |suppressed| {
            tracing::error!(event = "deltas_not_read", suppressed, message = %error);
        });
    }

    /// Tells of a client without a token for what it asks.
    pub(crate) fn unauthorized(&self, told: Told<'_>, refusal: &Refusal) {
        let Told { route, status, origin, .. } = told;
        let Named { request_id, trace_id, span_id } = origin.named();
        self.write_some("unauthorized", |suppressed| {
            tracing::warn!(
                event = "unauthorized",
                route,
                status,
                request_id,
                trace_id,
                span_id,
                suppressed,
                message = refusal.message()
            );
        });
    }

    pub(crate) fn draining(&self) {
        self.write(|| tracing::info!(event = "draining"));
    }

    pub(crate) fn stopping(&self, connections: usize) {
        self.write(|| tracing::info!(event = "stopping", connections));
    }

    pub(crate) fn stopped(&self, is_whole: bool) {
        self.write(|| match is_whole {
            true => tracing::info!(event = "stopped"),
            false => tracing::error!(event = "stopped", message = "some work did not end in time"),
        });
    }

    /// Tells of an answer that is the server's failure.
    pub(crate) fn failed(&self, told: Told<'_>, refusal: &Refusal) {
        let Told { route, status, us, origin, .. } = told;
        let Named { request_id, trace_id, span_id } = origin.named();
        self.write_some(refusal.kind(), |suppressed| {
            tracing::error!(
                event = "request_failed",
                route,
                status,
                us,
                kind = refusal.kind(),
                path = refusal.value("path"),
                page_id = refusal.value("page_id"),
                request_id,
                trace_id,
                span_id,
                suppressed,
                message = refusal.message()
            );
        });
    }

    /// Tells of a request or connection that found no room.
    pub(crate) fn refused(&self, reason: &'static str, origin: &Origin) {
        let Named { request_id, trace_id, span_id } = origin.named();
        self.write_some(reason, |suppressed| {
            tracing::warn!(event = "refused", reason, request_id, trace_id, span_id, suppressed);
        });
    }

    /// Tells of a client that was too slow, or whose bytes were not HTTP.
    pub(crate) fn cut_off(&self, reason: &'static str) {
        self.write_some(reason, |suppressed| {
            tracing::warn!(event = "connection_closed", reason, suppressed);
        });
    }

    pub(crate) fn panicked(&self, what: &str) {
        self.write_some("panic", |suppressed| {
            tracing::error!(event = "panic", suppressed, message = what);
        });
    }

    pub(crate) fn accept_failed(&self, cause: &std::io::Error) {
        self.write_some("accept", |suppressed| {
            tracing::error!(event = "accept_failed", suppressed, message = %cause);
        });
    }

    /// Tells of a request that took long, and of every one when asked to.
    pub(crate) fn answered(&self, told: Told<'_>) {
        let Told { route, status, us, body_bytes, origin } = told;
        let Named { request_id, trace_id, span_id } = origin.named();
        if us > self.slow_us {
            self.write_some("slow", |suppressed| {
                tracing::warn!(
                    event = "slow_request",
                    route,
                    status,
                    us,
                    body_bytes,
                    request_id,
                    trace_id,
                    span_id,
                    suppressed
                );
            });
        }
        if self.has_access {
            self.write(|| {
                tracing::info!(
                    event = "request",
                    route,
                    status,
                    us,
                    body_bytes,
                    request_id,
                    trace_id,
                    span_id
                );
            });
        }
    }
}
