//! The registry of eviction policies: their names in options, and how each is built.

use std::sync::{Mutex, PoisonError};

use tierbed_core::{Error, Result};

use super::ev_lfu::ev_lfu_name;
use super::group_frequency::group_frequency_name;
use super::{
    Auto, CreditRule, EvArc, EvCar, EvLfu, EvictionPolicy, FlushRule, GroupFrequency, Lru, S3Fifo,
};

/// A policy that another crate registered: [`register_policy`].
#[derive(Debug, Clone, Copy)]
pub struct OtherPolicy {
    name: &'static str,
    build: fn() -> Box<dyn EvictionPolicy>,
}

impl PartialEq for OtherPolicy {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for OtherPolicy {}

static OTHERS: Mutex<Vec<OtherPolicy>> = Mutex::new(Vec::new());

/// Lets [`PolicyKind::from_name`] find the policy `name`, which knows no groups and remembers no
/// scores; the first call for a name counts.
pub fn register_policy(name: &'static str, build: fn() -> Box<dyn EvictionPolicy>) {
    let mut others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
    if others.iter().all(|other| other.name != name) {
        others.push(OtherPolicy { name, build });
    }
}

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used.
    #[default]
    Lru,
    /// Three first-in-first-out queues.
    S3Fifo,
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
    /// A policy of another crate.
    Other(OtherPolicy),
}

impl PolicyKind {
    /// Every kind of this crate.
    pub const ALL: [Self; 13] = [
        Self::Lru,
        Self::S3Fifo,
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

    /// Returns every kind that [`from_name`](Self::from_name) finds: [`ALL`](Self::ALL), then
    /// those that were registered.
    #[must_use]
    pub fn registered() -> Vec<Self> {
        let others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
        Self::ALL.into_iter().chain(others.iter().copied().map(Self::Other)).collect()
    }

    /// Returns the name, as in options and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3_fifo",
            Self::EvArc(_) => "ev_arc",
            Self::EvCar => "ev_car",
            Self::EvLfu(rule) => ev_lfu_name(rule),
            Self::GroupFrequency(rule) => group_frequency_name(rule),
            Self::Auto => "auto",
            Self::Other(policy) => policy.name,
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
        let kinds = Self::registered();
        kinds.iter().copied().find(|kind| plain(kind.name()) == plain(name)).ok_or_else(|| {
            let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
            Error::invalid("unknown cache policy")
                .with("policy", name)
                .with("remedy", format_args!("use one of {}", names.join(", ")))
        })
    }

    /// Tells whether the policy wants to know which rows were asked for together.
    #[must_use]
    pub fn knows_groups(self) -> bool {
        !matches!(self, Self::Lru | Self::S3Fifo | Self::Other(_))
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
            Self::S3Fifo => Box::new(S3Fifo::default()),
            Self::EvArc(rule) => Box::new(EvArc::new(rule)),
            Self::EvCar => Box::new(EvCar::default()),
            Self::EvLfu(rule) => Box::new(EvLfu::new(rule)),
            Self::GroupFrequency(rule) => Box::new(GroupFrequency::new(rule)),
            Self::Auto => Box::new(Auto::default()),
            Self::Other(policy) => (policy.build)(),
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
        register_policy("another", || Box::new(Lru::default()));
        assert!(PolicyKind::registered().contains(&PolicyKind::from_name("Another").unwrap()));
        let error = PolicyKind::from_name("random").unwrap_err().to_string();
        assert!(error.contains("lru, s3_fifo, ev_arc"), "{error}");
    }
}
