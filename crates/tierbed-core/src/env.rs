//! The injected environment: clock and random seed.
//!
//! No part of Tierbed asks the operating system for the time or for random numbers by
//! itself; it is given an [`Env`]. That is what makes simulations repeatable.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A source of time.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Returns microseconds since an arbitrary start; never decreases.
    fn now_us(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

impl Default for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that may ask for the time")]
    fn default() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

/// Returns milliseconds since 1970, as the machine's calendar says: for what other machines wrote.
#[must_use]
pub fn unix_ms() -> u64 {
    unix_us() / 1_000
}

/// Returns microseconds since 1970, as the machine's calendar says: for what other machines read.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that may ask for the date")]
pub fn unix_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// A clock that moves only when it is set.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_us: AtomicU64,
}

impl ManualClock {
    /// Moves time forward.
    pub fn advance_us(&self, us: u64) {
        self.now_us.fetch_add(us, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now_us(&self) -> u64 {
        self.now_us.load(Ordering::Relaxed)
    }
}

/// A small seeded generator for decisions (not for initial weights: those are counter-based).
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (SplitMix64).
#[derive(Debug, Clone)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// Builds the generator of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.state)
    }

    /// Returns a value in `0..bound`; `bound` must not be 0. Bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "bound must not be 0");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a value in `[0, 1)`.
    pub fn unit_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// Mixes 64 bits so that every input bit reaches every output bit (the SplitMix64 finaliser).
#[must_use]
pub fn mix64(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Returns the value that [`mix64`] made `mixed` of.
#[must_use]
pub fn unmix64(mixed: u64) -> u64 {
    // The factors are the inverses of those of `mix64`, modulo 2^64.
    let value = mixed ^ (mixed >> 31) ^ (mixed >> 62);
    let value = value.wrapping_mul(0x3196_42B2_D24D_8EC3);
    let value = value ^ (value >> 27) ^ (value >> 54);
    let value = value.wrapping_mul(0x96DE_1B17_3F11_9089);
    value ^ (value >> 30) ^ (value >> 60)
}

/// What a part of Tierbed may ask of the outside world.
#[derive(Debug, Clone)]
pub struct Env {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Root seed; streams derive from it.
    pub seed: u64,
}

impl Env {
    /// The real world: the machine's clock, and `seed`.
    #[must_use]
    pub fn real(seed: u64) -> Self {
        Self { clock: Arc::new(SystemClock::default()), seed }
    }

    /// Returns a generator of its own for `stream`.
    #[must_use]
    pub fn rng(&self, stream: u64) -> SplitMix64 {
        SplitMix64::new(mix64(self.seed ^ mix64(stream)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_and_repeat() {
        let env = Env::real(7);
        let first: Vec<_> = (0..4).map(|_| env.rng(1).next_u64()).collect();
        assert!(first.windows(2).all(|pair| pair[0] == pair[1]));
        assert_ne!(env.rng(1).next_u64(), env.rng(2).next_u64());
    }

    #[test]
    fn below_stays_below_and_reaches_all() {
        let mut rng = SplitMix64::new(1);
        let mut seen = [false; 7];
        for _ in 0..200 {
            seen[rng.below(7) as usize] = true;
        }
        assert!(seen.iter().all(|&seen| seen));
        assert!((0..100).all(|_| (0.0..1.0).contains(&rng.unit_f64())));
    }

    #[test]
    fn mixed_bits_lead_back() {
        let mut rng = SplitMix64::new(5);
        for value in (0..200).chain((0..200).map(|_| rng.next_u64())).chain([u64::MAX]) {
            assert_eq!(unmix64(mix64(value)), value);
        }
    }

    #[test]
    fn manual_clock_moves_only_when_told() {
        let clock = ManualClock::default();
        clock.advance_us(5);
        assert_eq!(clock.now_us(), 5);
    }
}
