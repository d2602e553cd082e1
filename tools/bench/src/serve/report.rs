//! Counts and times of a phase, as they happened.

use serde::Serialize;
use serde_json::{json, Value};
use tierbed_core::{Error, Result};

use super::arrivals::Phase;
use super::peer::Outcome;

/// A request that is sent later than this was not sent in time.
const LATE_SEND_US: u64 = 1_000;
/// A phase is void when more of its requests than this were not.
const LATE_SHARE_MAX: f64 = 0.001;
/// Requests are told by spans of this length, too.
const SPAN_US: u64 = 250_000;

/// Percentiles of times, microseconds: exact ones of all times, whose number is known beforehand,
/// so that a histogram would only blur them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Times {
    pub(super) count: usize,
    pub(super) p50: u32,
    pub(super) p90: u32,
    pub(super) p99: u32,
    pub(super) p999: u32,
    pub(super) p9999: u32,
    pub(super) max: u32,
}

impl Times {
    /// Sorts and counts; all are 0 where there is none.
    pub(super) fn of(all: &mut [u32]) -> Self {
        all.sort_unstable();
        let at = |share: f64| {
            let place = (all.len() as f64 * share).ceil() as usize;
            all.get(place.max(1) - 1).copied()
        };
        let [Some(p50), Some(p90), Some(p99), Some(p999), Some(p9999), Some(max)] =
            [0.5, 0.9, 0.99, 0.999, 0.9999, 1.0].map(at)
        else {
            return Self::default();
        };
        Self { count: all.len(), p50, p90, p99, p999, p9999, max }
    }
}

/// What happened to the requests of a phase.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) offered: u64,
    pub(super) late_sends: u64,
    pub(super) broken: u64,
    pub(super) unanswered: u64,
    pub(super) checked: u64,
    pub(super) wrong: u64,
    late: u64,
    failed: u64,
    good_us: Vec<u32>,
    refused_us: Vec<u32>,
    spans: Vec<Span>,
    /// Start of the phase.
    start_us: u64,
}

#[derive(Debug, Default)]
struct Span {
    good_us: Vec<u32>,
    refused: u64,
}

impl Tally {
    /// Makes room for what a phase will tell, so that nothing is moved while it runs.
    pub(super) fn new(phase: &Phase, start_us: f64) -> Self {
        let count = (phase.rate * phase.seconds * 1.1) as usize + 64;
        let spans = (phase.us() / SPAN_US as f64) as usize + 1;
        Self {
            good_us: Vec::with_capacity(count),
            refused_us: Vec::with_capacity(count),
            spans: (0..spans).map(|_| Span::default()).collect(),
            start_us: start_us as u64,
            ..Self::default()
        }
    }

    pub(super) fn sent(&mut self, late_us: u64) {
        self.late_sends += u64::from(late_us > LATE_SEND_US);
    }

    /// Notes an answer to a request that was due at `due_us`.
    pub(super) fn answered(&mut self, outcome: Outcome, due_us: u64, us: u64) {
        let us = u32::try_from(us).unwrap_or(u32::MAX);
        let at = (due_us.saturating_sub(self.start_us) / SPAN_US) as usize;
        let count = self.spans.len();
        let Some(span) = self.spans.get_mut(at.min(count.max(1) - 1)) else {
            panic!("a phase of no span")
        };
        match outcome {
            Outcome::Good => {
                self.good_us.push(us);
                span.good_us.push(us);
            }
            Outcome::Refused => {
                self.refused_us.push(us);
                span.refused += 1;
            }
            Outcome::Late => self.late += 1,
            Outcome::Failed => self.failed += 1,
        }
    }

    /// Tells all; `cpu_us` is the processor time of the server.
    pub(super) fn told(mut self, phase: &Phase, cpu_us: Option<u64>) -> Value {
        let (good, refused) = (Times::of(&mut self.good_us), Times::of(&mut self.refused_us));
        let spans = self.spans.iter_mut().map(|span| {
            let times = Times::of(&mut span.good_us);
            json!({ "good": times.count, "refused": span.refused, "p99_us": times.p99 })
        });
        json!({
            "rate": phase.rate,
            "seconds": phase.seconds,
            "offered": self.offered,
            "good": good.count,
            "good_per_s": good.count as f64 / phase.seconds,
            "refused": refused.count,
            "late": self.late,
            "failed": self.failed,
            "broken": self.broken,
            "unanswered": self.unanswered,
            "checked": self.checked,
            "wrong": self.wrong,
            "late_sends": self.late_sends,
            "is_void": self.late_sends as f64 > self.offered as f64 * LATE_SHARE_MAX,
            "good_us": good,
            "refused_us": refused,
            "server_cpu_us": cpu_us,
            "span_s": SPAN_US as f64 / 1e6,
            "spans": spans.collect::<Vec<_>>(),
        })
    }
}

/// Returns the processor time of some processes, microseconds; the kernel counts in ticks.
///
/// # Errors
/// `Io` when one of them is gone.
pub(super) fn cpu_us(pids: &[u32]) -> Result<u64> {
    let ticks_per_s = rustix::param::clock_ticks_per_second();
    let mut ticks = 0;
    for pid in pids {
        let path = format!("/proc/{pid}/stat");
        let stat = std::fs::read_to_string(&path)
            .map_err(|cause| Error::os("the server is gone", cause).with("path", &path))?;
        // The name may have spaces and brackets; user and system time are the 12th and 13th
        // field behind it.
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields.split_ascii_whitespace());
        let times: Vec<u64> = fields
            .into_iter()
            .flatten()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse().ok())
            .collect();
        let [user, system] = times[..] else {
            return Err(Error::invalid("the process's times cannot be read").with("path", &path));
        };
        ticks += user + system;
    }
    Ok(ticks * 1_000_000 / ticks_per_s)
}
