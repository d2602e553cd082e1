//! Recent failures, as `/health` reports them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tierbed_core::env::Clock;
use tierbed_snapshot::{Snapshot, SnapshotStats};

/// Pages that failed while another page, or an approximate answer, stood in for them.
const STOOD_IN: &str = "pages_failed";

/// Failures since the server started, by kind.
#[derive(Debug)]
pub(crate) struct Faults {
    clock: Arc<dyn Clock>,
    degraded_us: u64,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    faults: BTreeMap<&'static str, Fault>,
    /// Failures that the snapshot had counted when it was asked last.
    stood_in: u64,
}

#[derive(Debug, Default)]
struct Fault {
    count: u64,
    last_us: u64,
    message: String,
}

/// One reason not to be well.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Reason {
    kind: &'static str,
    /// Failures of this kind since the server started.
    count: u64,
    /// Seconds since the last one.
    seconds_ago: f64,
    /// The last one.
    message: String,
}

impl Faults {
    pub(crate) fn new(clock: &Arc<dyn Clock>, degraded_ms: u64) -> Self {
        let degraded_us = degraded_ms.saturating_mul(1_000);
        Self { clock: Arc::clone(clock), degraded_us, known: Mutex::default() }
    }

    /// Notes that a request failed by the server's fault.
    pub(crate) fn note(&self, kind: &'static str, message: &str) {
        let now_us = self.clock.now_us();
        self.lock().note(kind, 1, now_us, message.to_owned());
    }

    /// Returns what failed lately; empty when nothing did.
    pub(crate) fn recent(&self, snapshot: &Snapshot) -> Vec<Reason> {
        let now_us = self.clock.now_us();
        let mut known = self.lock();
        let (count, message) = stood_in(&snapshot.stats());
        let more = count.saturating_sub(known.stood_in);
        if more > 0 {
            known.note(STOOD_IN, more, now_us, message);
        }
        known.stood_in = count;
        let seconds_ago = |fault: &Fault| now_us.saturating_sub(fault.last_us) as f64 / 1e6;
        let faults = known.faults.iter();
        faults
            .filter(|(_, fault)| now_us.saturating_sub(fault.last_us) < self.degraded_us)
            .map(|(&kind, fault)| Reason {
                kind,
                count: fault.count,
                seconds_ago: seconds_ago(fault),
                message: fault.message.clone(),
            })
            .collect()
    }

    // Counts are whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn note(&mut self, kind: &'static str, more: u64, now_us: u64, message: String) {
        let fault = self.faults.entry(kind).or_default();
        fault.count += more;
        (fault.last_us, fault.message) = (now_us, message);
    }
}

/// Counts the failures that no request saw, and says what they were.
fn stood_in(stats: &SnapshotStats) -> (u64, String) {
    let refreshed = stats.refreshed.as_ref().map_or(0, |refreshed| refreshed.rows_failed);
    let neighbours = stats.neighbours.as_ref().map_or(0, |neighbours| neighbours.rows_failed);
    let pages = stats.lookups.pages_failed;
    let message = format!(
        "{pages} pages failed and replicas answered, {refreshed} rows could not be read in the \
         background, {neighbours} rows lost their neighbours; run tierbed verify"
    );
    (pages + refreshed + neighbours, message)
}
