//! A limit on bytes per second: a token bucket that all downloads of a server share.
//!
//! Each byte that is fetched is written once, so one bucket bounds the network and the disk.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::Result;
use tierbed_io::{Folder, FsFolder, OpenMode};

use crate::retry::sleep;

/// Time whose bytes may come at once after a pause.
const BURST_US: u64 = 100_000;
/// Part of a device's write rate that downloads take of their own accord: lookups read beside them.
const AUTO_SHARE: u64 = 5;
/// Writes that measure a device: enough to leave its cache, few enough to be soon over.
const PROBE_BYTES: usize = 8 << 20;
const PROBES: u64 = 8;
const PROBE_US_MAX: u64 = 500_000;
const PROBE_NAME: &str = "bandwidth.probe";

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

    /// Returns a limit of a fifth of the rate at which the device of `folder` takes writes. It is
    /// measured now, by up to 64 MiB that are written there and removed, for half a second or so.
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the device.
    pub fn auto(folder: &Path) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
        let rate = write_rate(&FsFolder::create(folder)?, &*clock)?;
        Ok(Self::with_clock((rate / AUTO_SHARE).max(1), clock))
    }

    /// Returns how many bytes per second may be fetched; `None` is no limit.
    #[must_use]
    pub fn bytes_per_s(&self) -> Option<u64> {
        self.bytes_per_s
    }

    /// Returns how long the next fetch waits for those before it.
    #[must_use]
    pub fn behind(&self) -> Duration {
        self.reserve(0)
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

/// Returns the bytes per second that the device of `folder` takes, durably.
fn write_rate(folder: &dyn Folder, clock: &dyn Clock) -> Result<u64> {
    let mut rng = SplitMix64::new(1);
    // No device can write it as less than it is.
    let bytes: Vec<u8> = (0..PROBE_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    let device = folder.open(PROBE_NAME, OpenMode::Create)?;
    let written = (|| {
        let started_us = clock.now_us();
        let mut at = 0;
        for _ in 0..PROBES {
            device.write_at(at, &bytes)?;
            device.sync()?;
            at += bytes.len() as u64;
            if clock.now_us() - started_us > PROBE_US_MAX {
                break;
            }
        }
        Ok(at * 1_000_000 / (clock.now_us() - started_us).max(1))
    })();
    drop(device);
    folder.remove(PROBE_NAME)?;
    written
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

    #[test]
    fn a_device_is_measured_and_left_as_it_was() {
        /// Each look at it is so much later.
        #[derive(Debug)]
        struct Steps(ManualClock, u64);
        impl Clock for Steps {
            fn now_us(&self) -> u64 {
                self.0.advance_us(self.1);
                self.0.now_us()
            }
        }
        let folder = tierbed_io::MemoryFolder::new();
        let rate = |us| write_rate(&folder, &Steps(ManualClock::default(), us)).unwrap();
        // Eight writes, nine looks behind the first one.
        assert_eq!(rate(1000), (8 * PROBE_BYTES as u64) * 1_000_000 / 9000);
        // One write that is longer than all may take.
        assert_eq!(rate(600_000), PROBE_BYTES as u64 * 1_000_000 / 1_200_000);
        assert_eq!(folder.list().unwrap(), [""; 0]);
        let real = tempfile::tempdir().unwrap();
        let auto = Bandwidth::auto(real.path()).unwrap().bytes_per_s();
        assert!(auto.is_some_and(|bytes_per_s| bytes_per_s > 1000), "{auto:?}");
        assert_eq!(std::fs::read_dir(real.path()).unwrap().count(), 0);
    }
}
