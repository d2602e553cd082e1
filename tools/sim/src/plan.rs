//! Which faults strike, and when?

use tierbed_core::env::SplitMix64;

/// When a fault strikes among the calls it can strike.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Chance {
    /// Never.
    #[default]
    Never,
    /// At one call, counted from 0.
    Nth(u64),
    /// At each call with this probability.
    Probability(f64),
}

impl Chance {
    pub(crate) fn strikes(self, call_at: u64, rng: &mut SplitMix64) -> bool {
        match self {
            Self::Never => false,
            Self::Nth(nth) => nth == call_at,
            Self::Probability(probability) => rng.unit_f64() < probability,
        }
    }
}

/// The faults of one run. The default has none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FaultPlan {
    /// Seed of all luck in the run.
    pub seed: u64,
    /// Power fails in the I/O after this many; see [`IoCounts::change_count`].
    pub crash_after_io: Option<u64>,
    /// Most bytes the files may occupy, in whole pages; a write beyond is `NoSpace`.
    pub enospc_after_bytes: Option<u64>,
    /// A read fails; counted over reads.
    pub read_error: Chance,
    /// A write fails, some of its sectors written; counted over writes.
    pub write_error: Chance,
    /// A sync of a file fails and may lose what it should have saved; counted over file syncs.
    pub sync_error: Chance,
    /// A sync of the folder fails and may lose names; counted over folder syncs.
    pub folder_sync_error: Chance,
    /// Lie: a write is acknowledged, only some sectors are written; counted over writes.
    pub torn_write: Chance,
    /// Lie: a write is acknowledged and never happens; counted over writes.
    pub lost_write: Chance,
    /// Lie: a write lands on another page of the file; counted over writes.
    pub misdirected_write: Chance,
    /// Lie: one bit of what a read returns is wrong; counted over reads.
    pub read_bit_flip: Chance,
}

/// Calls so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoCounts {
    /// Calls that change something (the four below and length changes): the crash points.
    pub change_count: u64,
    /// Reads, which are no crash points.
    pub read_count: u64,
    /// Writes to files.
    pub write_count: u64,
    /// Syncs of files.
    pub sync_count: u64,
    /// Names created, renamed or removed.
    pub name_count: u64,
    /// Syncs of the folder.
    pub folder_sync_count: u64,
}
