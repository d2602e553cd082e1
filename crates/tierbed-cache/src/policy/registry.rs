//! The registry of eviction policies: their names in options, and how each is built.

use tierbed_core::{Error, Result};

use super::ev_lfu::ev_lfu_name;
use super::group_frequency::group_frequency_name;
use super::{
    Arc, Auto, Car, Clock, CreditRule, EvArc, EvCar, EvLfu, EvictionPolicy, FlushRule,
    GroupFrequency, Lfu, Lirs, Lru, S3Fifo, Sieve, WTinyLfu,
};

/// The policies there are: the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently used.
    Lfu,
    /// Second chance.
    Clock,
    /// A hand over rows by arrival.
    Sieve,
    /// Three first-in-first-out queues.
    S3Fifo,
    /// Adaptive replacement.
    Arc,
    /// Two clocks with adaptive replacement.
    Car,
    /// Low inter-reference recency.
    Lirs,
    /// A window in front of rows that compete by count.
    WTinyLfu,
    /// Adaptive replacement with rows used often by their best group, flushed by a rule.
    EvArc(FlushRule),
    /// Two clocks that rank rows by their best group.
    EvCar,
    /// Rows by their best group, flushed by a rule.
    EvLfu(FlushRule),
    /// Group-weighted frequency.
    GroupFrequency(CreditRule),
    /// Group-weighted frequency by the rule that has done best lately.
    Auto,
}

impl PolicyKind {
    /// Every kind, for tests and tables.
    pub const ALL: [Self; 20] = [
        Self::Lru,
        Self::Lfu,
        Self::Clock,
        Self::Sieve,
        Self::S3Fifo,
        Self::Arc,
        Self::Car,
        Self::Lirs,
        Self::WTinyLfu,
        Self::EvArc(FlushRule::RELEASED_ARC),
        Self::EvCar,
        Self::EvLfu(FlushRule::RELEASED),
        Self::EvLfu(FlushRule::PAPER),
        Self::GroupFrequency(CreditRule::STEADY),
        Self::GroupFrequency(CreditRule::FOR_EVER),
        Self::GroupFrequency(CreditRule::DRIFTING),
        Self::GroupFrequency(CreditRule::FAST),
        Self::GroupFrequency(CreditRule::STEEP),
        Self::GroupFrequency(CreditRule::PLAIN),
        Self::Auto,
    ];

    /// Returns the name, as in options and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Clock => "clock",
            Self::Sieve => "sieve",
            Self::S3Fifo => "s3_fifo",
            Self::Arc => "arc",
            Self::Car => "car",
            Self::Lirs => "lirs",
            Self::WTinyLfu => "w_tiny_lfu",
            Self::EvArc(_) => "ev_arc",
            Self::EvCar => "ev_car",
            Self::EvLfu(rule) => ev_lfu_name(rule),
            Self::GroupFrequency(rule) => group_frequency_name(rule),
            Self::Auto => "auto",
        }
    }

    /// Returns the kind of `name`. Case, hyphens and underscores do not matter: `S3FIFO` is
    /// `s3_fifo`. The name before 0.1, `ours`, is `group_frequency`.
    ///
    /// # Errors
    /// `Invalid` naming the kinds there are.
    pub fn from_name(name: &str) -> Result<Self> {
        let name = if name == "ours" { "group_frequency" } else { name };
        let plain = |name: &str| name.replace(['-', '_'], "").to_lowercase();
        Self::ALL.into_iter().find(|kind| plain(kind.name()) == plain(name)).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
            Error::invalid("unknown cache policy")
                .with("policy", name)
                .with("remedy", format_args!("use one of {}", names.join(", ")))
        })
    }

    /// Tells whether the policy wants to know which rows were asked for together.
    #[must_use]
    pub fn knows_groups(self) -> bool {
        matches!(
            self,
            Self::EvArc(_) | Self::EvCar | Self::EvLfu(_) | Self::GroupFrequency(_) | Self::Auto
        )
    }

    /// Tells whether the policy gives rows scores that should outlive their stay.
    #[must_use]
    pub fn remembers_scores(self) -> bool {
        matches!(self, Self::GroupFrequency(_) | Self::Auto)
    }

    /// Builds an empty policy.
    #[must_use]
    pub fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::Lfu => Box::new(Lfu::default()),
            Self::Clock => Box::new(Clock::default()),
            Self::Sieve => Box::new(Sieve::default()),
            Self::S3Fifo => Box::new(S3Fifo::default()),
            Self::Arc => Box::new(Arc::default()),
            Self::Car => Box::new(Car::default()),
            Self::Lirs => Box::new(Lirs::default()),
            Self::WTinyLfu => Box::new(WTinyLfu::default()),
            Self::EvArc(rule) => Box::new(EvArc::new(rule)),
            Self::EvCar => Box::new(EvCar::default()),
            Self::EvLfu(rule) => Box::new(EvLfu::new(rule)),
            Self::GroupFrequency(rule) => Box::new(GroupFrequency::new(rule)),
            Self::Auto => Box::new(Auto::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_kinds() {
        for kind in PolicyKind::ALL {
            assert_eq!(PolicyKind::from_name(kind.name()).unwrap(), kind);
            assert_eq!(kind.build().name(), kind.name(), "a policy says what it is");
        }
        assert_eq!(PolicyKind::from_name("S3FIFO").unwrap(), PolicyKind::S3Fifo);
        let error = PolicyKind::from_name("random").unwrap_err().to_string();
        assert!(error.contains("lru, lfu, clock"), "{error}");
    }
}
