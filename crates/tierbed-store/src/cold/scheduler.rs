//! Merge scheduler: a merge runs only when the buffered batches outlast it.
//!
//! Training consumes the accesses of announced batches at a speed that is measured between two
//! announcements; what is buffered lasts so long. Merging moves bytes at a speed that is measured
//! too. A merge that training would wait for is put off, until the deltas reach their bound.
//! Source: RecDB §4.4, Eq. 2.
//! Differs: one request at a time, so a merge runs between two calls instead of beside training;
//! the rule decides how much is merged while the buffer is full.

use tierbed_core::store::Ahead;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.3;

/// What was measured.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scheduler {
    last: Option<(u64, u64)>,
    accesses_per_us: Option<f64>,
    merge_us_per_byte: Option<f64>,
}

fn learn(known: &mut Option<f64>, measured: f64) {
    *known = Some(known.map_or(measured, |known| known + NEWEST * (measured - known)));
}

impl Scheduler {
    /// Learns from an announcement at `now_us` how fast batches are consumed.
    pub(crate) fn observe(&mut self, now_us: u64, ahead: &Ahead<'_>) {
        if let Some((then_us, buffered)) = self.last {
            let us = now_us.saturating_sub(then_us);
            let consumed = (buffered + ahead.access_count).saturating_sub(ahead.accesses_buffered);
            if us > 0 && consumed > 0 {
                learn(&mut self.accesses_per_us, consumed as f64 / us as f64);
            }
        }
        self.last = Some((now_us, ahead.accesses_buffered));
    }

    /// Learns how long a merge that moved `bytes` took.
    pub(crate) fn observe_merge(&mut self, bytes: u64, us: u64) {
        if bytes > 0 && us > 0 {
            learn(&mut self.merge_us_per_byte, us as f64 / bytes as f64);
        }
    }

    /// Returns how many bytes a merge may move while training lives on what is buffered; 0 as
    /// long as nothing is known. `byte_us`: what a byte of a sweep costs, until a merge was seen.
    pub(crate) fn bytes_allowed(&self, accesses_buffered: u64, byte_us: f64) -> u64 {
        let Some(accesses_per_us) = self.accesses_per_us else { return 0 };
        let train_us = accesses_buffered as f64 / accesses_per_us;
        (train_us / self.merge_us_per_byte.unwrap_or(byte_us).max(1e-9)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(accesses_buffered: u64, access_count: u64) -> Ahead<'static> {
        Ahead {
            batches_buffered: 1,
            accesses_buffered,
            sample_count: 1,
            access_count,
            visit_accesses: &|_| {},
        }
    }

    #[test]
    fn merges_as_much_as_the_buffered_batches_outlast() {
        let mut scheduler = Scheduler::default();
        scheduler.observe(0, &ahead(1000, 1000));
        assert_eq!(scheduler.bytes_allowed(1000, 0.001), 0, "nothing known yet");
        // 500 accesses used in 100 us, then 500 announced.
        scheduler.observe(100, &ahead(1000, 500));
        assert_eq!(scheduler.bytes_allowed(1000, 0.001), 200_000);
        scheduler.observe_merge(1_000_000, 2000);
        assert_eq!(scheduler.bytes_allowed(1000, 0.001), 100_000);
    }

    #[test]
    fn a_clock_that_stands_still_allows_nothing() {
        let mut scheduler = Scheduler::default();
        (0..4).for_each(|_| scheduler.observe(7, &ahead(1000, 1000)));
        assert_eq!(scheduler.bytes_allowed(1000, 0.001), 0);
    }
}
