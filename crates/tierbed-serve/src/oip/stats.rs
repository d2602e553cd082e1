//! Statistics of the models, as Triton's extension tells them.
//!
//! Times are of whole requests, and of their steps: waiting, reading inputs, looking up or
//! predicting, writing outputs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::extract::State;
use axum::response::Response;
use serde_json::{json, Value};

use super::about::told;
use super::model::{Kind, Named};
use super::VERSION;
use crate::job::Phases;
use crate::routes::{Service, Shared};

/// How often something happened, and how long it took in all.
#[derive(Debug, Default)]
pub(crate) struct Times {
    count: AtomicU64,
    us: AtomicU64,
}

impl Times {
    fn add(&self, us: u64) {
        self.count.fetch_add(1, Relaxed);
        self.us.fetch_add(us, Relaxed);
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub(crate) fn ns(&self) -> u64 {
        self.us.load(Relaxed) * 1_000
    }

    fn told(&self) -> Value {
        json!({ "count": self.count(), "ns": self.ns() })
    }
}

/// What a model did.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) success: Times,
    pub(crate) fail: Times,
    pub(crate) queue: Times,
    pub(crate) input: Times,
    pub(crate) infer: Times,
    pub(crate) output: Times,
    sample_count: AtomicU64,
}

impl Counts {
    /// Counts a request; one without phases failed.
    pub(crate) fn note(&self, phases: Option<&Phases>, us: u64) {
        let Some(phases) = phases else { return self.fail.add(us) };
        self.success.add(us);
        self.queue.add(phases.queue_us);
        self.input.add(phases.input_us);
        self.infer.add(phases.infer_us);
        self.output.add(phases.output_us);
        self.sample_count.fetch_add(phases.sample_count, Relaxed);
    }

    pub(crate) fn sample_count(&self) -> u64 {
        self.sample_count.load(Relaxed)
    }
}

fn told_of(service: &Service, kind: Kind) -> Value {
    let counts = service.models.counts(kind);
    let none = Times::default();
    json!({
        "name": service.models.name(kind),
        "version": VERSION,
        "inference_count": counts.sample_count(),
        "execution_count": counts.success.count(),
        "inference_stats": {
            "success": counts.success.told(),
            "fail": counts.fail.told(),
            "queue": counts.queue.told(),
            "compute_input": counts.input.told(),
            "compute_infer": counts.infer.told(),
            "compute_output": counts.output.told(),
            "cache_hit": none.told(),
            "cache_miss": none.told(),
        },
        "batch_stats": [],
    })
}

pub(super) async fn of_model(State(service): Shared, Named(kind): Named) -> Response {
    told(&json!({ "model_stats": [told_of(&service, kind)] }))
}

pub(super) async fn of_all(State(service): Shared) -> Response {
    let all: Vec<_> = service.kinds().map(|kind| told_of(&service, kind)).collect();
    told(&json!({ "model_stats": all }))
}
