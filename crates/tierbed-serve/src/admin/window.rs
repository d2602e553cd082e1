//! The last ten seconds: what was counted, by difference of samples.

use std::collections::VecDeque;

use serde::Serialize;
use tierbed_snapshot::SnapshotStats;

use super::answers::{Outcomes, Times};
use crate::routes::Service;

/// Length of the window.
pub(crate) const WINDOW_US: u64 = 10_000_000;
/// Less time between two samples says nothing of a rate.
const SHORTEST_US: u64 = 100_000;

/// Counts at one time.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) at_us: u64,
    pub(crate) outcomes: Outcomes,
    pub(crate) times: Times,
    /// Rows by what they were answered from, in the order of [`rows_by_tier`](super::stats).
    pub(crate) rows_by_tier: Vec<u64>,
    pub(crate) pages_read: u64,
}

impl Sample {
    pub(crate) fn of(service: &Service, stats: &SnapshotStats) -> Self {
        let answers = &service.metrics.answers;
        Self {
            at_us: service.clock.now_us(),
            outcomes: answers.outcomes(),
            times: answers.times(),
            rows_by_tier: super::stats::rows_by_tier(stats).collect(),
            pages_read: stats.lookups.pages_read,
        }
    }
}

/// Samples of the last ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Oldest first; the first is the newest that is old enough, so that the window is full.
    samples: VecDeque<Sample>,
}

/// What happened in the window.
#[derive(Debug, Serialize)]
pub(crate) struct Recent {
    /// Its length: less than ten seconds after the start.
    pub(crate) seconds: f64,
    pub(crate) requests_per_s: f64,
    pub(crate) answered_per_s: f64,
    pub(crate) failed_per_s: f64,
    pub(crate) refused_per_s: f64,
    pub(crate) pages_read_per_s: f64,
    pub(crate) rows_per_s: f64,
    /// Times to answer; absent without answers.
    pub(crate) latency: Option<Latency>,
    #[serde(skip)]
    pub(crate) rows_by_tier: Vec<u64>,
}

/// Quantiles of the time to answer.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50_us: u64,
    pub(crate) p99_us: u64,
    pub(crate) p999_us: u64,
}

impl Latency {
    fn of(times: &Times) -> Option<Self> {
        Some(Self {
            p50_us: times.quantile_us(0.5)?,
            p99_us: times.quantile_us(0.99)?,
            p999_us: times.quantile_us(0.999)?,
        })
    }
}

impl Window {
    /// Keeps a sample.
    pub(crate) fn push(&mut self, sample: Sample) {
        let from_us = sample.at_us.saturating_sub(WINDOW_US);
        while self.samples.get(1).is_some_and(|second| second.at_us <= from_us) {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns what happened up to `now`; `None` while the window is too short to tell.
    pub(crate) fn recent(&self, now: &Sample) -> Option<Recent> {
        let from_us = now.at_us.saturating_sub(WINDOW_US);
        let old = self.samples.iter().rev().find(|sample| sample.at_us <= from_us);
        let before = old.or_else(|| self.samples.front())?;
        let us = now.at_us.saturating_sub(before.at_us);
        if us < SHORTEST_US {
            return None;
        }
        let seconds = us as f64 / 1e6;
        let per_s = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let (new, old) = (&now.outcomes, &before.outcomes);
        let tiers = now.rows_by_tier.iter().zip(&before.rows_by_tier);
        let rows_by_tier: Vec<u64> = tiers.map(|(now, old)| now.saturating_sub(*old)).collect();
        Some(Recent {
            seconds,
            requests_per_s: per_s(new.total(), old.total()),
            answered_per_s: per_s(new.answered, old.answered),
            failed_per_s: per_s(new.failed, old.failed),
            refused_per_s: per_s(new.refused, old.refused),
            pages_read_per_s: per_s(now.pages_read, before.pages_read),
            rows_per_s: rows_by_tier.iter().sum::<u64>() as f64 / seconds,
            latency: Latency::of(&now.times.since(&before.times)),
            rows_by_tier,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::Answers;
    use super::*;

    fn sample(at_s: u64, answers: &Answers) -> Sample {
        Sample {
            at_us: at_s * 1_000_000,
            outcomes: answers.outcomes(),
            times: answers.times(),
            rows_by_tier: vec![10 * at_s, at_s],
            pages_read: 4 * at_s,
        }
    }

    #[test]
    fn rates_and_quantiles_are_of_the_last_ten_seconds() {
        let (answers, mut window) = (Answers::new(), Window::default());
        assert!(window.recent(&sample(0, &answers)).is_none(), "nothing to compare with");
        window.push(sample(0, &answers));
        assert!(window.recent(&sample(0, &answers)).is_none(), "no time has passed");
        // Slow requests at first, fast ones later.
        for second in 1..=30 {
            let us = if second <= 15 { 9_000_000 } else { 100 };
            (0..20).for_each(|_| answers.count("/v1/lookup", 200, us));
            answers.count("/v1/lookup", 503, 0);
            window.push(sample(second, &answers));
        }
        assert!(window.samples.len() <= 12, "{} samples", window.samples.len());
        let recent = window.recent(&sample(30, &answers)).unwrap();
        assert_eq!(
            (recent.seconds, recent.requests_per_s, recent.refused_per_s),
            (10.0, 21.0, 1.0)
        );
        assert_eq!((recent.pages_read_per_s, recent.rows_per_s), (4.0, 11.0));
        assert_eq!(recent.rows_by_tier, [100, 10]);
        let latency = recent.latency.unwrap();
        assert!(latency.p999_us <= 103, "{latency:?}");
        // Nobody asks any more.
        (31..=45).for_each(|second| window.push(sample(second, &answers)));
        let recent = window.recent(&sample(45, &answers)).unwrap();
        assert_eq!((recent.requests_per_s, recent.latency), (0.0, None));
    }
}
