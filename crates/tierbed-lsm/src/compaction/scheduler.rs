//! Compaction scheduler. Pure: time and loads are given to it.
//!
//! ```text
//! Levelled   always                                                    plain
//! SilkLike   level 0 always; deeper levels when the device was idle    SILK (Balmau 2019)
//!            long enough to have the bytes to spare
//! LookAhead  when training can go on from the look-ahead buffer        RecDB §4.4, Eq. 2
//!            for longer than the compaction takes
//! ```
//!
//! An urgent compaction never waits: a full level 0 stops flushes, and a level far beyond its
//! size makes every later merge dearer. The paper does not say what happens when the scheduler
//! waits too long; here the write then pays for the compaction.

/// Who decides.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Scheduling {
    /// Compactions run as soon as they are planned.
    Levelled,
    /// Compactions below level 0 use what client load leaves of the device.
    SilkLike {
        /// Bytes the device moves per second.
        device_bytes_per_s: f64,
    },
    /// Compactions run while the look-ahead buffer feeds training. Source: RecDB Eq. 2.
    #[default]
    LookAhead,
}

/// What the compaction would cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompactionCost {
    /// Bytes to read.
    pub size_bytes: u64,
    /// Measured time to merge one byte: `V_merge`.
    pub merge_us_per_byte: f64,
    /// Level it empties.
    pub input_level: usize,
    /// Whether its level is full.
    pub is_urgent: bool,
}

impl CompactionCost {
    /// Returns the expected time, microseconds. Source: RecDB Eq. 2b,
    /// `T_merge(t) = V_merge x sum of size(k)`.
    #[must_use]
    pub fn merge_us(&self) -> f64 {
        self.merge_us_per_byte * self.size_bytes as f64
    }
}

/// Whether the compaction runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Now.
    Run,
    /// Now, because its level is full.
    RunUrgently,
    /// Later; ask again.
    Defer,
}

/// What the scheduler has seen so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scheduler {
    scheduling: Scheduling,
    buffered_rows: u64,
    us_per_row: Option<f64>,
    buffer_seen_us: u64,
    device_seen_us: u64,
    spare_bytes: f64,
    client_bytes: u64,
}

impl Scheduler {
    /// Builds a scheduler at time `now_us`.
    ///
    /// # Panics
    /// When the device moves no bytes.
    #[must_use]
    pub fn new(scheduling: Scheduling, now_us: u64) -> Self {
        if let Scheduling::SilkLike { device_bytes_per_s } = scheduling {
            assert!(device_bytes_per_s > 0.0, "a device of {device_bytes_per_s} bytes per second");
        }
        Self {
            scheduling,
            buffered_rows: 0,
            us_per_row: None,
            buffer_seen_us: now_us,
            device_seen_us: now_us,
            spare_bytes: 0.0,
            client_bytes: 0,
        }
    }

    /// Learns how many look-ahead rows wait in the buffer, `new_rows` of them announced just now.
    /// Fewer old ones than last time means that training used the difference meanwhile; the
    /// fastest use so far is `V_buff`.
    pub fn observe_buffer(&mut self, now_us: u64, buffered_rows: u64, new_rows: u64) {
        let old_rows = buffered_rows.saturating_sub(new_rows);
        let used = self.buffered_rows.saturating_sub(old_rows);
        let elapsed_us = now_us.saturating_sub(self.buffer_seen_us);
        if used > 0 && elapsed_us > 0 {
            let us_per_row = elapsed_us as f64 / used as f64;
            self.us_per_row = Some(self.us_per_row.map_or(us_per_row, |old| old.min(us_per_row)));
        }
        self.buffered_rows = buffered_rows;
        self.buffer_seen_us = now_us;
    }

    /// Learns how many bytes clients moved since the last call of [`decide`](Self::decide).
    pub fn observe_client(&mut self, bytes: u64) {
        self.client_bytes = self.client_bytes.saturating_add(bytes);
    }

    /// Returns how long training can go on without a read from `now_us` on, microseconds: what the
    /// buffer held when it was seen last, less the time since.
    ///
    /// Source: RecDB Eq. 2a, `T_train(t) = V_buff x Size(Buff, t)`. Differs: the paper calls
    /// `V_buff` the maximum consumption *rate*; for the product to be a time it must be time per
    /// row, so the fastest consumption seen is kept as the least time per row. Before any was
    /// seen, the buffer promises nothing.
    #[must_use]
    pub fn train_us(&self, now_us: u64) -> f64 {
        let since_us = now_us.saturating_sub(self.buffer_seen_us) as f64;
        (self.us_per_row.unwrap_or(0.0) * self.buffered_rows as f64 - since_us).max(0.0)
    }

    /// Decides about a compaction of `cost` at time `now_us`.
    ///
    /// # Panics
    /// When the cost is no number: every comparison with it would say no.
    pub fn decide(&mut self, now_us: u64, cost: &CompactionCost) -> Decision {
        assert!(cost.merge_us().is_finite() && cost.merge_us() >= 0.0, "{cost:?}");
        let is_allowed = match self.scheduling {
            Scheduling::Levelled => true,
            Scheduling::LookAhead => self.train_us(now_us) > cost.merge_us(),
            Scheduling::SilkLike { device_bytes_per_s } => {
                self.save_bytes(now_us, device_bytes_per_s);
                let has_bytes = self.spare_bytes >= cost.size_bytes as f64;
                if has_bytes {
                    self.spare_bytes -= cost.size_bytes as f64;
                }
                has_bytes || cost.input_level == 0
            }
        };
        match (is_allowed, cost.is_urgent) {
            (true, _) => Decision::Run,
            (false, true) => Decision::RunUrgently,
            (false, false) => Decision::Defer,
        }
    }

    // What the device could have moved and clients did not; at most ten seconds of it.
    fn save_bytes(&mut self, now_us: u64, device_bytes_per_s: f64) {
        let elapsed_s = now_us.saturating_sub(self.device_seen_us) as f64 / 1e6;
        self.spare_bytes += elapsed_s * device_bytes_per_s - self.client_bytes as f64;
        self.spare_bytes = self.spare_bytes.clamp(0.0, 10.0 * device_bytes_per_s);
        self.client_bytes = 0;
        self.device_seen_us = now_us;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(size_bytes: u64, input_level: usize) -> CompactionCost {
        CompactionCost { size_bytes, merge_us_per_byte: 0.01, input_level, is_urgent: false }
    }

    #[test]
    fn the_papers_figure_9_waits_with_three_batches_and_runs_with_six() {
        // A batch of 100 rows trains in 1,000 us; the merge takes as long as three batches.
        let mut scheduler = Scheduler::new(Scheduling::LookAhead, 0);
        let merge = cost(300_000, 1);
        assert!((merge.merge_us() - 3000.0).abs() < 1e-9);
        scheduler.observe_buffer(0, 400, 400);
        scheduler.observe_buffer(1000, 300, 0);
        assert!((scheduler.train_us(1000) - 3000.0).abs() < 1e-9);
        assert_eq!(scheduler.decide(1000, &merge), Decision::Defer, "T0: not greater");
        // A batch more was used, and four announced.
        scheduler.observe_buffer(2000, 600, 400);
        assert_eq!(scheduler.decide(2000, &merge), Decision::Run, "T1");
        assert_eq!(scheduler.decide(4999, &merge), Decision::Run, "3,001 us are left");
        assert_eq!(scheduler.decide(5000, &merge), Decision::Defer, "3,000 us are left");
    }

    #[test]
    fn the_fastest_consumption_counts_and_none_means_no_promise() {
        let mut scheduler = Scheduler::new(Scheduling::LookAhead, 0);
        scheduler.observe_buffer(10, 1_000_000, 1_000_000);
        assert_eq!(scheduler.decide(10, &cost(1, 0)), Decision::Defer);
        scheduler.observe_buffer(1010, 999_900, 0);
        scheduler.observe_buffer(1110, 999_800, 0);
        scheduler.observe_buffer(9110, 999_700, 0);
        // 1 us per row was the fastest of 10, 1 and 80.
        assert!((scheduler.train_us(9110) - 999_700.0).abs() < 1e-6);
    }

    #[test]
    fn an_urgent_compaction_overrules() {
        let mut scheduler = Scheduler::new(Scheduling::LookAhead, 0);
        let urgent = CompactionCost { is_urgent: true, ..cost(1000, 0) };
        assert_eq!(scheduler.decide(0, &urgent), Decision::RunUrgently);
        let mut scheduler = Scheduler::new(Scheduling::Levelled, 0);
        assert_eq!(scheduler.decide(0, &cost(1 << 40, 3)), Decision::Run);
    }

    #[test]
    fn silk_saves_idle_bytes_and_lets_level_0_pass() {
        let scheduling = Scheduling::SilkLike { device_bytes_per_s: 1e6 };
        let mut scheduler = Scheduler::new(scheduling, 0);
        assert_eq!(scheduler.decide(0, &cost(500_000, 0)), Decision::Run);
        assert_eq!(scheduler.decide(100_000, &cost(500_000, 1)), Decision::Defer);
        scheduler.observe_client(300_000);
        // 1.0 s of the device, less what clients moved: 700,000 bytes to spare.
        assert_eq!(scheduler.decide(1_000_000, &cost(800_000, 1)), Decision::Defer);
        assert_eq!(scheduler.decide(1_000_000, &cost(650_000, 1)), Decision::Run);
        assert_eq!(scheduler.decide(1_000_000, &cost(650_000, 1)), Decision::Defer);
        scheduler.observe_client(u64::MAX / 2);
        assert_eq!(scheduler.decide(2_000_000, &cost(1, 1)), Decision::Defer);
    }
}
