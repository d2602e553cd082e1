//! Admission and eviction of ids.
//!
//! Admission: an id gets its row at its n-th appearance (a step of training that has it, however
//! often). Eviction happens only when it is asked for: then ids that appear too rarely or too
//! long ago lose their rows. Names as in TorchRec: count, timestamp, and both together.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

/// Admission and eviction of one table.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Appearances until an id has a row of its own; 1: at once.
    #[serde(default = "one")]
    pub admit_after: u32,
    /// Which ids lose their rows at an eviction.
    #[serde(default)]
    pub eviction: Eviction,
}

/// Which ids lose their rows at an eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Eviction {
    /// None.
    #[default]
    Never,
    /// Ids whose count is below `threshold`, after it was multiplied by `decay_rate`.
    Count {
        /// The least count that stays.
        threshold: f32,
        /// What counts are multiplied by at every eviction, 0 to 1.
        decay_rate: f32,
    },
    /// Ids last seen more than `ttl` ago, in the unit of the clock the caller gives.
    Age {
        /// The longest absence.
        ttl: u32,
    },
    /// Ids that are both below the threshold and older than `ttl`.
    CountAndAge {
        /// The least count that stays.
        threshold: f32,
        /// What counts are multiplied by at every eviction, 0 to 1.
        decay_rate: f32,
        /// The longest absence.
        ttl: u32,
    },
}

fn one() -> u32 {
    1
}

impl Default for Policy {
    fn default() -> Self {
        Self { admit_after: 1, eviction: Eviction::Never }
    }
}

impl Policy {
    /// Checks ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self) -> Result<()> {
        // Counts are f32: beyond 2^24 they stop growing.
        if self.admit_after == 0 || self.admit_after > 1 << 24 {
            return Err(Error::invalid("admission threshold out of range")
                .with("found", self.admit_after)
                .with("allowed", "1..=16777216"));
        }
        let (threshold, decay_rate) = match self.eviction {
            Eviction::Never | Eviction::Age { .. } => (0.0, 1.0),
            Eviction::Count { threshold, decay_rate }
            | Eviction::CountAndAge { threshold, decay_rate, .. } => (threshold, decay_rate),
        };
        if !threshold.is_finite() || threshold < 0.0 || !(0.0..=1.0).contains(&decay_rate) {
            return Err(Error::invalid(
                "eviction needs a threshold of at least 0 and a decay of 0 to 1",
            )
            .with("eviction_threshold", threshold)
            .with("decay_rate", decay_rate));
        }
        Ok(())
    }

    /// Returns whether the row of an id depends only on which ids came before it: every id gets
    /// one at once and keeps it, so that the same ids asked for again change nothing.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.admit_after <= 1 && !self.counts_all_uses()
    }

    /// Returns whether appearances of ids that have a row are counted: a page write each time.
    pub(crate) fn counts_all_uses(&self) -> bool {
        self.eviction != Eviction::Never
    }
}

impl Eviction {
    /// Decays `count` and returns whether to evict the id; `seen` and `now` are in one clock.
    pub(crate) fn judge(self, count: &mut f32, seen: u32, now: u32) -> bool {
        let is_old = |ttl: u32| now.saturating_sub(seen) > ttl;
        match self {
            Self::Never => false,
            Self::Age { ttl } => is_old(ttl),
            Self::Count { threshold, decay_rate } => {
                *count *= decay_rate;
                *count < threshold
            }
            Self::CountAndAge { threshold, decay_rate, ttl } => {
                *count *= decay_rate;
                *count < threshold && is_old(ttl)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_decay_and_ages_are_absences() {
        let by_count = Eviction::Count { threshold: 2.0, decay_rate: 0.5 };
        let mut count = 4.0;
        assert!(!by_count.judge(&mut count, 0, 9));
        assert!(by_count.judge(&mut count, 0, 9));
        let by_age = Eviction::Age { ttl: 5 };
        assert!(!by_age.judge(&mut count, 4, 9));
        assert!(by_age.judge(&mut count, 3, 9));
        let mixed = Eviction::CountAndAge { threshold: 2.0, decay_rate: 1.0, ttl: 5 };
        assert!(!mixed.judge(&mut 3.0, 0, 9));
        assert!(!mixed.judge(&mut 1.0, 8, 9));
        assert!(mixed.judge(&mut 1.0, 0, 9));
        assert!(
            !Eviction::Age { ttl: 5 }.judge(&mut count, 20, 9),
            "a clock set back evicts no id"
        );
    }

    #[test]
    fn senseless_numbers_are_refused() {
        assert!(Policy { admit_after: 0, ..Policy::default() }.check().is_err());
        for (threshold, decay_rate) in [(f32::NAN, 1.0), (-1.0, 1.0), (1.0, 1.5), (1.0, f32::NAN)] {
            let eviction = Eviction::Count { threshold, decay_rate };
            assert!(Policy { admit_after: 1, eviction }.check().is_err());
        }
        assert!(Policy::default().check().is_ok());
    }
}
