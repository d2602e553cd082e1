//! Adaptive queue depth: as few reads in flight as the device needs for its full rate.
//!
//! A device gives more reads a second the more of them it has, up to a point; beyond it they only
//! wait in its queue, and other callers wait behind them. The point is searched while reads are
//! made: a *round* is a number of completions while as many reads flew as allowed; the time in
//! between, when fewer were wanted, does not count.
//!
//! ```text
//! rate  │            ____________       16: 1.0   32: 1.9 better, go on   64: 2.0 not: back to 32
//!       │        /                      stay for a while, then ask again: 64? 16?
//!       │     /
//!       └───8──16──32──64──128 in flight
//! ```
//!
//! Times come from the caller. Source: Little's law, and MaxEmbed §6.2, whose queue is as deep as
//! SPDK's. Differs: found out, not configured.

/// Completions of a round, per read in flight.
const ROUND_FACTOR: u32 = 16;
/// Rounds that a depth is kept before its neighbours are tried again.
const ROUNDS_KEPT: u32 = 64;
/// A depth twice as large must give that much more.
const GAIN_MIN: f64 = 1.05;

/// What is being found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The rate at this depth is measured, to compare others with.
    Measure,
    /// Twice as many fly.
    More,
    /// Half as many fly.
    Fewer,
    /// The depth is kept for that many rounds.
    Keep(u32),
}

/// The number of reads in flight, adapted to the device.
#[derive(Debug, Clone)]
pub struct Depth {
    limit: u32,
    min: u32,
    max: u32,
    phase: Phase,
    /// Rate at the depth that is compared with, completions per microsecond.
    rate: f64,
    /// Whether the next try is of fewer reads.
    tries_fewer: bool,
    round: Round,
}

#[derive(Debug, Clone, Copy, Default)]
struct Round {
    count: u32,
    elapsed_us: u64,
    /// When completions came last, while as many reads flew as allowed.
    last_us: Option<u64>,
}

impl Depth {
    /// Starts at `start` reads in flight; later there are `1..=max`.
    #[must_use]
    pub fn new(start: u32, max: u32) -> Self {
        let max = max.max(1);
        let min = max.min(4);
        let limit = start.clamp(min, max);
        Self {
            limit,
            min,
            max,
            phase: Phase::Measure,
            rate: 0.0,
            tries_fewer: false,
            round: Round::default(),
        }
    }

    /// Returns how many reads may fly.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Notes that fewer reads fly than allowed: the round waits.
    pub fn idle(&mut self) {
        self.round.last_us = None;
    }

    /// Notes `count` completions at `now_us` while as many reads flew as allowed.
    pub fn landed(&mut self, count: u32, now_us: u64) {
        let round = &mut self.round;
        let Some(last_us) = round.last_us.replace(now_us) else { return };
        round.count += count;
        round.elapsed_us += now_us.saturating_sub(last_us);
        if round.count < ROUND_FACTOR * self.limit || round.elapsed_us == 0 {
            return;
        }
        let rate = f64::from(round.count) / round.elapsed_us as f64;
        self.round = Round::default();
        self.decide(rate);
    }

    fn decide(&mut self, rate: f64) {
        match self.phase {
            Phase::Keep(0) => self.phase = Phase::Measure,
            Phase::Keep(left) => self.phase = Phase::Keep(left - 1),
            Phase::Measure => self.try_another(rate),
            Phase::More if rate >= GAIN_MIN * self.rate => self.go_on(rate),
            Phase::More => self.back_to(self.limit / 2),
            Phase::Fewer if GAIN_MIN * rate > self.rate => self.go_on(rate),
            Phase::Fewer => self.back_to(self.limit * 2),
        }
    }

    /// The depth tried is the better one: it is compared with, and the next in line is tried.
    fn go_on(&mut self, rate: f64) {
        self.tries_fewer = self.phase == Phase::Fewer;
        self.try_another(rate);
    }

    fn try_another(&mut self, rate: f64) {
        self.rate = rate;
        let (next, phase) = match self.tries_fewer {
            true => (self.limit / 2, Phase::Fewer),
            false => (self.limit * 2, Phase::More),
        };
        if next < self.min || next > self.max {
            self.back_to(self.limit);
        } else {
            (self.limit, self.phase) = (next, phase);
        }
    }

    fn back_to(&mut self, limit: u32) {
        self.limit = limit.clamp(self.min, self.max);
        self.phase = Phase::Keep(ROUNDS_KEPT);
        self.tries_fewer = !self.tries_fewer;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a device of `rate_max` reads per millisecond that each take `us`; returns the depths.
    fn run(depth: &mut Depth, rounds: u32, device: (f64, f64)) -> Vec<u32> {
        let (rate_max, us) = device;
        let mut now_us = 0.0;
        let mut seen = Vec::new();
        for _ in 0..rounds {
            let limit = depth.limit();
            let rate = (f64::from(limit) * 1000.0 / us).min(rate_max) / 1000.0;
            for _ in 0..=2 * ROUND_FACTOR {
                depth.landed(limit, now_us as u64);
                now_us += f64::from(limit) / rate;
                if depth.limit() != limit {
                    break;
                }
            }
            seen.push(limit);
        }
        seen
    }

    fn kept(seen: &[u32]) -> u32 {
        let count = |of: u32| seen.iter().filter(|&&limit| limit == of).count();
        *seen.iter().max_by_key(|&&limit| count(limit)).unwrap()
    }

    #[test]
    fn the_depth_is_what_the_device_needs() {
        // 200 reads per millisecond of 80 us each: 16 in flight saturate.
        for start in [4, 16, 128] {
            let mut depth = Depth::new(start, 256);
            let seen = run(&mut depth, 4000, (200.0, 80.0));
            assert_eq!(kept(&seen[2000..]), 16, "from {start}");
        }
        // A device with room for more than allowed.
        let mut depth = Depth::new(16, 64);
        assert_eq!(kept(&run(&mut depth, 1000, (1e6, 80.0))), 64);
        // One that does one read at a time.
        let mut depth = Depth::new(16, 64);
        assert_eq!(kept(&run(&mut depth, 2000, (12.5, 80.0))), 4);
    }

    #[test]
    fn a_device_that_changes_is_found_again() {
        let mut depth = Depth::new(32, 256);
        run(&mut depth, 2000, (200.0, 80.0));
        let seen = run(&mut depth, 4000, (800.0, 80.0));
        assert_eq!(kept(&seen[2000..]), 64);
    }

    #[test]
    fn rounds_with_too_few_reads_change_nothing() {
        let mut depth = Depth::new(32, 256);
        for at in 0..10_000 {
            depth.landed(8, 10 * at);
            depth.idle();
        }
        assert_eq!(depth.limit(), 32, "nobody knows how long these took");
        // Rounds go on over calls: the time between them does not count.
        let mut calls = Depth::new(32, 256);
        for call in 0..40_000 {
            let start_us = 100_000 * call;
            for at in 0..4 {
                calls.landed(32, start_us + 160 * at);
            }
            calls.idle();
        }
        assert!(calls.limit() < 32, "200 reads per millisecond whatever the depth");
        assert_eq!(Depth::new(9, 0).limit(), 1);
    }
}
