//! Counts of lookups and predictions by outcome, and of their times.
//!
//! Times are counted in buckets whose width is 1/32 of their lower bound or less: a quantile is at
//! most 3.2 % above the exact one. An answer costs two additions without a lock. Counts only grow;
//! [`Window`](super::window::Window) subtracts.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::metrics::LEFT;

/// Buckets of each power of two, as a power of two.
const FINE_BITS: u32 = 5;
const FINE: u64 = 1 << FINE_BITS;
/// Times from this one on, 134 s, share the last bucket.
const US_MAX: u64 = (1 << 27) - 1;
/// One for each microsecond below 32, then 32 for each of the 22 powers of two up to the 27th.
const BUCKETS: usize = FINE as usize * 23;

/// The largest error of a quantile, as a share of it.
pub(crate) const QUANTILE_ERROR_RATIO: f64 = 1.0 / FINE as f64;

/// Routes whose requests look up or predict. Others, such as probes, are not what users wait for.
const WORK: [&str; 5] = [
    "/v1/lookup",
    "/v1/predict",
    "/v2/infer",
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
];

/// What is counted for each request.
#[derive(Debug)]
pub(crate) struct Answers {
    answered: AtomicU64,
    invalid: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    left: AtomicU64,
    by_time: [AtomicU64; BUCKETS],
}

/// Requests by how they ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Outcomes {
    /// With rows or predictions.
    pub(crate) answered: u64,
    /// By the client's fault.
    pub(crate) invalid: u64,
    /// By the server's fault.
    pub(crate) failed: u64,
    /// For lack of room or time.
    pub(crate) refused: u64,
    /// The client left before.
    pub(crate) left: u64,
}

impl Outcomes {
    pub(crate) fn total(&self) -> u64 {
        self.answered + self.invalid + self.failed + self.refused + self.left
    }
}

/// Requests by their time, a number for each bucket.
#[derive(Debug, Clone)]
pub(crate) struct Times(Vec<u64>);

impl Answers {
    pub(crate) fn new() -> Self {
        let none = || AtomicU64::new(0);
        let by_time = std::array::from_fn(|_| none());
        let (answered, invalid, failed) = (none(), none(), none());
        Self { answered, invalid, failed, refused: none(), left: none(), by_time }
    }

    /// Counts an answer. One that found no room took no time.
    pub(crate) fn count(&self, route: &str, status: u16, us: u64) {
        if !WORK.contains(&route) {
            return;
        }
        let (outcome, has_time) = match status {
            LEFT => (&self.left, false),
            503 => (&self.refused, false),
            504 => (&self.refused, true),
            // 501 asks for a prediction where there is no model.
            400..=499 | 501 => (&self.invalid, true),
            500.. => (&self.failed, true),
            _ => (&self.answered, true),
        };
        outcome.fetch_add(1, Ordering::Relaxed);
        if has_time {
            let at = bucket(us);
            let Some(count) = self.by_time.get(at) else { panic!("bucket {at} of {BUCKETS}") };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn outcomes(&self) -> Outcomes {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Outcomes {
            answered: of(&self.answered),
            invalid: of(&self.invalid),
            failed: of(&self.failed),
            refused: of(&self.refused),
            left: of(&self.left),
        }
    }

    pub(crate) fn times(&self) -> Times {
        Times(self.by_time.iter().map(|count| count.load(Ordering::Relaxed)).collect())
    }
}

impl Times {
    /// Returns the requests since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let counts = self.0.iter().zip(&before.0);
        Self(counts.map(|(now, before)| now.saturating_sub(*before)).collect())
    }

    /// Returns the time that `share` of the requests took at most; `None` without requests.
    pub(crate) fn quantile_us(&self, share: f64) -> Option<u64> {
        let total: u64 = self.0.iter().sum();
        let rank = ((total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let at = self.0.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(longest_us(at))
    }
}

/// Returns the bucket of a time.
fn bucket(us: u64) -> usize {
    let us = us.min(US_MAX);
    if us < FINE {
        return us as usize;
    }
    let shift = us.ilog2() - FINE_BITS;
    (u64::from(shift) * FINE + (us >> shift)) as usize
}

/// Returns the longest time of a bucket.
fn longest_us(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < FINE {
        return bucket;
    }
    let shift = bucket / FINE - 1;
    ((bucket - shift * FINE + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_the_bucket_that_holds_it_to_its_precision() {
        for us in (0..70_000).chain([1 << 20, 10_000_000, US_MAX, u64::MAX]) {
            let (at, us) = (bucket(us), us.min(US_MAX));
            assert!(at < BUCKETS);
            let longest_us = longest_us(at);
            assert!(longest_us >= us, "{us} is in a bucket up to {longest_us}");
            let error = (longest_us - us) as f64;
            assert!(error <= us as f64 * QUANTILE_ERROR_RATIO, "{us} is told as {longest_us}");
            assert!(at == 0 || super::longest_us(at - 1) < us, "{us} fits the bucket before");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_those_of_sorted_times() {
        let answers = Answers::new();
        let before = answers.times();
        assert_eq!(before.quantile_us(0.5), None);
        let mut times: Vec<u64> = (0..1000_u64).map(|at| at * at * 7919 % 300_007).collect();
        times.iter().for_each(|us| answers.count("/v1/lookup", 200, *us));
        times.sort_unstable();
        let found = answers.times().since(&before);
        for (share, at) in [(0.5, 499), (0.99, 989), (0.999, 998), (1.0, 999)] {
            let (exact, told) = (times[at], found.quantile_us(share).unwrap());
            let most = exact as f64 * (1.0 + QUANTILE_ERROR_RATIO);
            assert!(told >= exact && told as f64 <= most, "{share}: {told} for {exact}");
        }
        assert_eq!(answers.times().since(&answers.times()).quantile_us(0.5), None);
    }

    #[test]
    fn outcomes_are_told_apart_and_probes_are_left_out() {
        let answers = Answers::new();
        for status in [200, 400, 413, 501, 500, 503, 504, LEFT] {
            answers.count("/v2/infer", status, 10);
            answers.count("/readyz", status, 10);
        }
        let expected = Outcomes { answered: 1, invalid: 3, failed: 1, refused: 2, left: 1 };
        assert_eq!(answers.outcomes(), expected);
        assert_eq!(expected.total(), 8);
        let timed: u64 = answers.times().0.iter().sum();
        assert_eq!(timed, 6, "who left or found no room took no time");
    }
}
