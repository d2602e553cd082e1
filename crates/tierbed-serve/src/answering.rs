//! The snapshot that answers now, its version, and how old what it says is.
//!
//! Whoever answers takes the snapshot once, for all of an answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use tierbed_core::env::{unix_ms, Clock};
use tierbed_snapshot::Snapshot;

/// No number is known.
const NONE: u64 = u64::MAX;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Answering {
    snapshot: RwLock<Arc<Snapshot>>,
    clock: Arc<dyn Clock>,
    committed_at_ms: AtomicU64,
    version: AtomicU64,
    /// When the version was seen to be the channel's.
    in_step_us: AtomicU64,
}

fn some(number: &AtomicU64) -> Option<u64> {
    Some(number.load(Ordering::Relaxed)).filter(|&number| number != NONE)
}

impl Answering {
    pub(crate) fn new(snapshot: Arc<Snapshot>, clock: &Arc<dyn Clock>) -> Self {
        Self {
            snapshot: RwLock::new(snapshot),
            clock: Arc::clone(clock),
            committed_at_ms: AtomicU64::new(NONE),
            version: AtomicU64::new(NONE),
            in_step_us: AtomicU64::new(NONE),
        }
    }

    // The place is whole after every statement.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Answers from another snapshot; returns the one before.
    pub(crate) fn swap(&self, next: Arc<Snapshot>) -> Arc<Snapshot> {
        let mut place = self.snapshot.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut place, next)
    }

    /// Notes when the training step of what answers committed, where that is known.
    pub(crate) fn committed(&self, at_ms: Option<u64>) {
        self.committed_at_ms.store(at_ms.unwrap_or(NONE), Ordering::Relaxed);
    }

    /// Notes the version of a channel that answers.
    pub(crate) fn is_at(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// Notes that the channel was just seen at the version that answers. A server that starts
    /// notes it, too: its lag counts from there.
    pub(crate) fn in_step(&self) {
        self.in_step_us.store(self.clock.now_us(), Ordering::Relaxed);
    }

    /// Returns the version that answers, where a channel is followed.
    pub(crate) fn version(&self) -> Option<u64> {
        some(&self.version)
    }

    /// Returns the seconds since the training step of what answers.
    pub(crate) fn freshness_s(&self) -> Option<f64> {
        let at_ms = some(&self.committed_at_ms)?;
        Some(unix_ms().saturating_sub(at_ms) as f64 / 1e3)
    }

    /// Returns the seconds since the channel was seen to be at the version that answers.
    pub(crate) fn lag_s(&self) -> Option<f64> {
        let at_us = some(&self.in_step_us)?;
        Some(self.clock.now_us().saturating_sub(at_us) as f64 / 1e6)
    }
}
