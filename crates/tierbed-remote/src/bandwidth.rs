//! A limit on bytes per second: a token bucket that all downloads of a server share.
//!
//! Each byte that is fetched is written once, so one bucket bounds the network and the disk.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::Result;

use crate::retry::sleep;

/// Time whose bytes may come at once after a pause.
const BURST_US: u64 = 100_000;

/// Bytes per second that may be fetched.
#[derive(Debug)]
pub struct Bandwidth {
    /// `None` is no limit.
    bytes_per_s: Option<u64>,
    clock: Arc<dyn Clock>,
    /// When everything taken so far has been paid for.
    paid_at_us: Mutex<u64>,
}

impl Bandwidth {
    /// Returns a limit; 0 is none.
    #[must_use]
    pub fn new(bytes_per_s: u64) -> Self {
        Self::with_clock(bytes_per_s, Arc::new(SystemClock::default()))
    }

    /// As [`new`](Self::new), by another clock.
    #[must_use]
    pub fn with_clock(bytes_per_s: u64, clock: Arc<dyn Clock>) -> Self {
        let bytes_per_s = (bytes_per_s > 0).then_some(bytes_per_s);
        Self { bytes_per_s, clock, paid_at_us: Mutex::new(0) }
    }

    /// Takes `bytes` and returns how long to wait before they are fetched.
    pub(crate) fn reserve(&self, bytes: u64) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else { return Duration::ZERO };
        let cost_us = u128::from(bytes) * 1_000_000 / u128::from(bytes_per_s);
        let cost_us = u64::try_from(cost_us).unwrap_or(u64::MAX);
        let now_us = self.clock.now_us();
        let mut paid_at_us = self.paid_at_us.lock().unwrap_or_else(PoisonError::into_inner);
        let start_us = (*paid_at_us).max(now_us.saturating_sub(BURST_US));
        *paid_at_us = start_us.saturating_add(cost_us);
        Duration::from_micros(paid_at_us.saturating_sub(now_us))
    }

    /// Takes `bytes` and waits for them.
    pub(crate) fn take(&self, bytes: u64, stop: &AtomicBool) -> Result<()> {
        sleep(self.reserve(bytes), stop)
    }
}

impl Default for Bandwidth {
    fn default() -> Self {
        Self::new(0)
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::ManualClock;

    use super::*;

    #[test]
    fn no_second_has_more_than_its_bytes_and_a_burst() {
        let clock = Arc::new(ManualClock::default());
        let bandwidth = Bandwidth::with_clock(1_000_000, Arc::clone(&clock) as _);
        clock.advance_us(10_000_000);
        let mut fetched = 0;
        for _ in 0..400 {
            let wait = bandwidth.reserve(10_000);
            clock.advance_us(wait.as_micros() as u64);
            fetched += 10_000;
            let seconds = (clock.now_us() - 10_000_000) as f64 / 1e6;
            assert!(f64::from(fetched) <= 1_000_000.0 * (seconds + 0.1) + 1.0, "{fetched}");
        }
        assert!(clock.now_us() <= 10_000_000 + 4_000_000, "all of the bandwidth is used");
        assert_eq!(Bandwidth::default().reserve(u64::MAX), Duration::ZERO);
    }
}
