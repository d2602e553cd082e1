//! Where a server is between its start and its end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;

use crate::routes::Service;

/// What a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It applies the deltas that are there, and takes no requests yet.
    Starting,
    Ready,
    /// It answers, and balancers shall send no more requests.
    Draining,
    /// It answers what has begun.
    Stopping,
}

/// What changes in a server's life.
#[derive(Debug)]
pub(crate) struct Life {
    has_begun: AtomicBool,
    activated_us: AtomicU64,
}

impl Life {
    pub(crate) fn new(now_us: u64) -> Self {
        Self { has_begun: AtomicBool::new(false), activated_us: AtomicU64::new(now_us) }
    }

    /// Requests are taken from now on.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// Another generation answers from now on.
    pub(crate) fn activate(&self, now_us: u64) {
        self.activated_us.store(now_us, Ordering::Relaxed);
    }

    /// Returns since when the generation answers, in microseconds of the server's clock.
    pub(crate) fn activated_us(&self) -> u64 {
        self.activated_us.load(Ordering::Relaxed)
    }
}

impl State {
    pub(crate) fn of(service: &Service) -> Self {
        if *service.stopping.borrow() {
            Self::Stopping
        } else if *service.draining.borrow() {
            Self::Draining
        } else if service.life.has_begun() {
            Self::Ready
        } else {
            Self::Starting
        }
    }
}
