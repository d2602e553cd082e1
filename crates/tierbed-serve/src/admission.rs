//! Admission: whether a request may wait, by the time that it would wait.
//!
//! ```text
//! cost of what waits ─▶ pace of the threads ─▶ predicted wait ─▶ verdict
//! ```
//!
//! Pure functions of numbers: the executor knows the time and the queue, tests make them up. A
//! queue bounded by time keeps the answers of overload useful; one bounded by places alone fills
//! with requests whose callers have given up. An empty queue admits anybody, so a pace that was
//! learned in a bad moment is always learned anew.
//!
//! Differs: cost is bytes of the body, because its indices are known only once it is decoded; and
//! wait follows from what each thread works on, because one long prediction must not look like a
//! full server.

/// What a request costs besides its body, in bytes of a body: what 64 ids take.
const COST_EACH: u64 = 512;

/// Share of the queue's time, in percent, that each priority may fill.
const NORMAL_PERCENT: u64 = 90;
const LOW_PERCENT: u64 = 50;
/// Share of a request's own time, in percent, that it may wait: the rest is for its work.
const WAIT_PERCENT: u64 = 80;

/// How much of what was learned is kept when a thread ends its work. What happened sixteen
/// batches ago counts a third.
const KEPT: f64 = 15.0 / 16.0;

/// Returns what a request costs.
pub(crate) fn cost(body_bytes: u64) -> u64 {
    body_bytes.saturating_add(COST_EACH)
}

/// Who is refused first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Priority {
    High,
    #[default]
    Normal,
    Low,
}

impl Priority {
    /// Returns the part of `whole` that this priority may fill, at least 1.
    fn part(self, whole: u64) -> u64 {
        let percent = match self {
            Self::High => 100,
            Self::Normal => NORMAL_PERCENT,
            Self::Low => LOW_PERCENT,
        };
        whole.saturating_mul(percent).div_ceil(100).max(1)
    }
}

/// What may wait at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) queue_us_max: u64,
    pub(crate) requests_max: u64,
}

/// What a request finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// Requests that wait or are worked on.
    pub(crate) request_count: u64,
    pub(crate) wait_us: u64,
}

/// A request that wants in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) left_us: u64,
    pub(crate) priority: Priority,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Admitted,
    /// Too many requests wait or are worked on.
    Full,
    /// It would wait too long.
    Slow,
    /// Its time is over.
    Late,
}

/// Tells whether a request may wait.
pub(crate) fn admit(rule: Rule, found: Found, arrival: Arrival) -> Verdict {
    let Arrival { left_us, priority } = arrival;
    let own_us_max = left_us.saturating_mul(WAIT_PERCENT) / 100;
    if left_us == 0 {
        Verdict::Late
    } else if found.request_count >= priority.part(rule.requests_max) {
        Verdict::Full
    } else if found.wait_us > priority.part(rule.queue_us_max).min(own_us_max) {
        Verdict::Slow
    } else {
        Verdict::Admitted
    }
}

/// How long work takes, as learned from work that has ended.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    us: f64,
    cost: f64,
}

impl Pace {
    /// Learns that a thread took `us` for `cost`.
    pub(crate) fn learn(&mut self, us: u64, cost: u64) {
        self.us = self.us * KEPT + us as f64;
        self.cost = self.cost * KEPT + cost as f64;
    }

    /// Predicts how long `cost` takes one thread; 0 before anything was learned.
    pub(crate) fn predict_us(&self, cost: u64) -> u64 {
        if self.cost == 0.0 {
            return 0;
        }
        (self.us / self.cost * cost as f64) as u64
    }
}

/// What a thread works on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    pub(crate) since_us: u64,
    pub(crate) predicted_us: u64,
}

impl Busy {
    /// Predicts the rest of the work: what is late stays so for as long again.
    fn rest_us(self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.since_us).abs_diff(self.predicted_us)
    }
}

/// Predicts how long work that comes now waits: all threads end what they have, then share the
/// `queued_us` that lie before it.
pub(crate) fn wait_us(queued_us: u64, threads: &[Option<Busy>], now_us: u64) -> u64 {
    let mut rests: Vec<u64> =
        threads.iter().map(|busy| busy.map_or(0, |busy| busy.rest_us(now_us))).collect();
    rests.sort_unstable();
    let Some(&first) = rests.first() else { return 0 };
    let (mut wait_us, mut left_us) = (first, queued_us);
    for (free, next) in (1..).zip(rests.iter().skip(1)) {
        // The threads that are free work until the next one is.
        let until_next = (next - wait_us).saturating_mul(free);
        if left_us <= until_next {
            return wait_us + left_us / free;
        }
        left_us -= until_next;
        wait_us = *next;
    }
    wait_us + left_us / rests.len() as u64
}

#[cfg(test)]
mod tests;
