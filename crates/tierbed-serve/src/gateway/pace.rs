//! How long shards take, and how much more than needed they may be asked.
//!
//! A hedge is a question asked again of another replica, because the first one takes long; a retry
//! is one asked again because the first one failed. Each has a budget that questions earn: when all
//! replicas are slow, or fail, a gateway does not double their load.

use tierbed_core::env::Clock;

/// Slots of time that are remembered: a minute in all.
const SLOTS: usize = 6;
const SLOT_US: u64 = 10_000_000;
/// Buckets of times: each a quarter of a doubling, from a microsecond to a minute.
const BUCKETS: usize = 104;
const BUCKETS_EACH: f64 = 4.0;
/// Answers that are needed before a quantile of them says something.
const ANSWERS_MIN: u64 = 20;
/// Hedges for each question: 5 %.
const HEDGES_EACH: f64 = 0.05;
const HEDGES_SAVED_MAX: f64 = 10.0;
/// Retries for each question. Those that are saved serve a replica that fails all it was asked.
const RETRIES_EACH: f64 = 0.2;
const RETRIES_SAVED_MAX: f64 = 1_000.0;

/// Times of the answers of a shard in the last minute.
#[derive(Debug)]
pub(super) struct Latencies {
    slots: [[u32; BUCKETS]; SLOTS],
    /// Number of the newest slot.
    newest: u64,
}

/// What may be asked beyond what is needed.
#[derive(Debug)]
pub(super) struct Budgets {
    hedges: f64,
    retries: f64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { slots: [[0; BUCKETS]; SLOTS], newest: 0 }
    }
}

fn bucket_of(us: u64) -> usize {
    ((us.max(1) as f64).log2() * BUCKETS_EACH) as usize
}

impl Latencies {
    /// Notes an answer that took `us`.
    pub(super) fn note(&mut self, clock: &dyn Clock, us: u64) {
        self.advance(clock.now_us());
        let slot = (self.newest % SLOTS as u64) as usize;
        if let Some(slot) = self.slots.get_mut(slot) {
            if let Some(count) = slot.get_mut(bucket_of(us).min(BUCKETS - 1)) {
                *count += 1;
            }
        }
    }

    /// Returns the time in which 95 % of the answers of the last minute came, at most 19 % more.
    /// `None`: there were too few.
    pub(super) fn p95_us(&mut self, clock: &dyn Clock) -> Option<u64> {
        self.advance(clock.now_us());
        let total: u64 = self.slots.iter().flatten().map(|&count| u64::from(count)).sum();
        if total < ANSWERS_MIN {
            return None;
        }
        let (mut seen, wanted) = (0, total * 95 / 100);
        for bucket in 0..BUCKETS {
            let counts = self.slots.iter().filter_map(|slot| slot.get(bucket));
            seen += counts.map(|&count| u64::from(count)).sum::<u64>();
            if seen > wanted {
                return Some(((bucket + 1) as f64 / BUCKETS_EACH).exp2().ceil() as u64);
            }
        }
        panic!("{seen} of {total} answers are in no bucket");
    }

    /// Forgets what is older than a minute.
    fn advance(&mut self, now_us: u64) {
        let newest = now_us / SLOT_US;
        for slot in (self.newest + 1..=newest).rev().take(SLOTS) {
            if let Some(slot) = self.slots.get_mut((slot % SLOTS as u64) as usize) {
                *slot = [0; BUCKETS];
            }
        }
        self.newest = self.newest.max(newest);
    }
}

impl Default for Budgets {
    fn default() -> Self {
        Self { hedges: 1.0, retries: RETRIES_SAVED_MAX }
    }
}

impl Budgets {
    /// Notes a question.
    pub(super) fn earn(&mut self) {
        self.hedges = (self.hedges + HEDGES_EACH).min(HEDGES_SAVED_MAX);
        self.retries = (self.retries + RETRIES_EACH).min(RETRIES_SAVED_MAX);
    }

    /// Takes a hedge, if there is one.
    pub(super) fn hedge(&mut self) -> bool {
        take(&mut self.hedges)
    }

    /// Takes a retry, if there is one.
    pub(super) fn retry(&mut self) -> bool {
        take(&mut self.retries)
    }
}

fn take(saved: &mut f64) -> bool {
    let is_there = *saved >= 1.0;
    if is_there {
        *saved -= 1.0;
    }
    is_there
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::ManualClock;

    use super::*;

    #[test]
    fn the_quantile_is_that_of_the_last_minute() {
        let (clock, mut latencies) = (ManualClock::default(), Latencies::default());
        assert_eq!(latencies.p95_us(&clock), None);
        (0..95).for_each(|_| latencies.note(&clock, 1_000));
        (0..5).for_each(|_| latencies.note(&clock, 50_000));
        let p95_us = latencies.p95_us(&clock).unwrap();
        assert!((50_000..60_000).contains(&p95_us), "{p95_us}");
        (0..10).for_each(|_| latencies.note(&clock, 1_000));
        let p95_us = latencies.p95_us(&clock).unwrap();
        assert!((1_000..1_200).contains(&p95_us), "{p95_us}");
        clock.advance_us(59_000_000);
        assert!(latencies.p95_us(&clock).is_some());
        clock.advance_us(2_000_000);
        assert_eq!(latencies.p95_us(&clock), None, "a minute is over");
        latencies.note(&clock, u64::MAX);
    }

    #[test]
    fn hedges_are_at_most_a_twentieth_and_retries_end_too() {
        let mut budgets = Budgets::default();
        let mut hedges = 0;
        for _ in 0..1_000 {
            budgets.earn();
            hedges += u32::from(budgets.hedge());
        }
        assert!((49..=51).contains(&hedges), "{hedges}");
        let retries = (0..5_000).filter(|_| budgets.retry()).count();
        assert_eq!(retries, RETRIES_SAVED_MAX as usize);
    }
}
