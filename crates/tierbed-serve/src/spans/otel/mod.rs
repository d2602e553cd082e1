//! Which requests have spans, and where these go.

mod queue;
mod record;
mod sending;
mod settings;
mod told;

use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::MatchedPath;
use axum::http::{HeaderMap, Request};
use prometheus_client::registry::Registry;
use tierbed_core::env::unix_us;
use tierbed_core::Result;

pub(crate) use self::record::Steps;

use self::queue::{Counts, Queue};
use self::record::{Ended, Record};
use self::settings::{Sampling, Settings};
use super::{Call, Ending};
use crate::log::Log;
use crate::options::ServeOptions;
use crate::origin::{Origin, Trace};
use crate::tokens::Scope;

/// The spans of a server, from the time on that it has a collector.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    counts: Counts,
    active: OnceLock<Active>,
}

#[derive(Debug)]
struct Active {
    sampling: Sampling,
    queue: Arc<Queue>,
    /// Ends with the thread that sends.
    ended: Mutex<Receiver<()>>,
}

impl Spans {
    /// Begins to send spans, where options or environment name a collector.
    ///
    /// # Errors
    /// `Invalid` for settings that are none, `Io` when the thread that sends cannot be made.
    pub(crate) fn start(&self, options: &ServeOptions, log: &Arc<Log>) -> Result<()> {
        let of_environment =
            |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let endpoint = options.otlp_endpoint.as_deref();
        let Some(settings) = Settings::read(endpoint, of_environment)? else { return Ok(()) };
        let sampling = settings.sampling.clone();
        let queue = Arc::new(Queue::new(settings.sizes, self.counts.clone()));
        let ended = Mutex::new(sending::start(settings, Arc::clone(&queue), Arc::clone(log))?);
        let active = Active { sampling, queue, ended };
        assert!(self.active.set(active).is_ok(), "a server starts once");
        Ok(())
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Spans that a collector has taken";
        registry.register("spans_sent", help, self.counts.sent.clone());
        let help = "Spans that found no room, or that no collector took";
        registry.register("spans_dropped", help, self.counts.dropped.clone());
    }

    /// Reads the headers of a request, or the metadata of a call; notes what it does, where that
    /// is sampled.
    pub(crate) fn origin(&self, headers: &HeaderMap, call: Call<'_>) -> Origin {
        let mut origin = Origin::new(headers);
        if let Some(active) = self.active.get() {
            active.follow(&mut origin, headers, call);
        }
        origin
    }

    /// Sends the spans of a request that has ended.
    pub(crate) fn ended(&self, origin: &Origin, ending: Ending<'_>) {
        if let Some(active) = self.active.get() {
            if let Some(ended) = Ended::new(origin, ending, unix_us()) {
                active.queue.push(ended);
            }
        }
    }

    /// Sends what there is, now.
    pub(crate) fn flush(&self) {
        if let Some(active) = self.active.get() {
            active.queue.flush();
        }
    }

    /// Takes no more spans, and waits until the rest is sent, at most `time`.
    pub(crate) fn close(&self, time: Duration) {
        let Some(active) = self.active.get() else { return };
        active.queue.close(time);
        let ended = active.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // It ends by being disconnected. Where a collector hangs the thread gives up by itself.
        let _ = ended.recv_timeout(time);
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        if let Some(active) = self.active.get() {
            active.queue.close(Duration::ZERO);
        }
    }
}

impl Active {
    /// Decides whether a request has spans, and begins them.
    fn follow(&self, origin: &mut Origin, headers: &HeaderMap, call: Call<'_>) {
        let trace = match origin.trace.take() {
            Some(trace) => {
                let is_sampled = self.sampling.takes(&trace, true);
                trace.sampled(is_sampled)
            }
            None => {
                // Balancers and scrapers ask all the time.
                if is_probe(call) {
                    return;
                }
                let trace = new_trace();
                if !self.sampling.takes(&trace, false) {
                    return;
                }
                trace.sampled(true)
            }
        };
        if trace.is_sampled() {
            origin.steps = Steps::of(Record::new(call, headers));
        }
        origin.trace = Some(trace);
    }
}

/// Tells whether a call asks how the server is.
fn is_probe(call: Call<'_>) -> bool {
    match call {
        Call::Http { path, .. } => crate::routes::scope_of(path) != Some(Scope::Infer),
        Call::Grpc { path } => crate::grpc::scope_of(path).is_none(),
    }
}

/// Returns 64 random bits, never 0.
fn random_id() -> u64 {
    RandomState::new().hash_one(0).max(1)
}

/// Begins a trace that no caller is part of.
fn new_trace() -> Trace {
    Trace::new(&format!("{:016x}{:016x}", random_id(), random_id()), 0, true)
}

/// Returns the route that answers a request, without what is in its path.
pub(crate) fn route_of<B>(request: &Request<B>) -> Option<&str> {
    request.extensions().get::<MatchedPath>().map(MatchedPath::as_str)
}
