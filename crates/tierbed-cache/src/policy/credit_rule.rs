//! The constants and rules of [`GroupFrequency`](super::GroupFrequency): credit and ageing.

/// Set in the score of a slot while its row is on trial.
pub(super) const ON_TRIAL: u16 = 1;

/// The exponent `a` of the credit `1 / m^a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissWeight {
    /// So many tenths.
    Tenths(u8),
    /// By the rows that are missing per group on average, first uses counted in part: `0.6` for
    /// each, less `1.3`, from 0.4 to 1.8. Where most of a group is missing, few groups can be
    /// completed, and rows of the others are worth little; where most is there, groups become
    /// complete of themselves, and the count of uses is what saves reads.
    ByMisses,
}

/// What a use is worth, and when worth is halved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditRule {
    /// How credit falls with the rows that are missing.
    pub weight: MissWeight,
    /// All scores are halved each time so many rows per ten slots were asked for; 0: never.
    pub halve_after: u16,
    /// Hundredths of the slots in which rows that come in are tried, in the order of their coming;
    /// whose trial ends stays if its score is not below the lowest of the others. 0: no trial,
    /// rows come in by their score alone.
    pub trial_hundredths: u8,
}

impl CreditRule {
    /// Weighs by the misses of the log and forgets slowly.
    pub const STEADY: Self = Self::fine(MissWeight::ByMisses, 1000);
    /// Weighs missing rows by `1 / m^1.5` and never forgets.
    pub const FOR_EVER: Self = Self::fine(MissWeight::Tenths(15), 0);
    /// Forgets within some turnovers of the cache.
    pub const DRIFTING: Self = Self::fine(MissWeight::Tenths(10), 200);
    /// Counts uses, those of rows outside too, and looks at no group: LFU with a full memory.
    pub const PLAIN: Self = Self::fine(MissWeight::Tenths(0), 0);
    /// Cares for nearly complete groups alone, and forgets very slowly.
    pub const STEEP: Self = Self::fine(MissWeight::Tenths(30), 10_000);
    /// Forgets soon.
    pub const FAST: Self = Self::fine(MissWeight::Tenths(10), 50);

    /// A rule without a trial.
    #[must_use]
    pub const fn fine(weight: MissWeight, halve_after: u16) -> Self {
        Self { weight, halve_after, trial_hundredths: 0 }
    }

    /// The same rule with a trial in a twentieth of the slots: for rows that come in bursts or only
    /// once. Longer ones keep rows that do not return, shorter ones end before a burst does.
    #[must_use]
    pub const fn with_trial(self) -> Self {
        Self { trial_hundredths: 5, ..self }
    }

    /// A score as it is kept of rows that are not on trial.
    pub(super) fn off_trial(self, score: u16) -> u16 {
        match self.trial_hundredths {
            0 => score,
            // 0 says "no row".
            _ => (score & !ON_TRIAL).max(ON_TRIAL + 1),
        }
    }
}
