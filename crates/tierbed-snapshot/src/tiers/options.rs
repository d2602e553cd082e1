//! Options of the cache tiers, and the modes in which misses are answered.

use std::sync::Arc;

use tierbed_cache::{AdmissionRule, PolicyKind, TierBudget};
use tierbed_core::{Error, Result, Schema};
use tierbed_io::Device;
use tierbed_kernels::Codec;

use super::{NeighbourOptions, ResidentTable};
use crate::refresh::RefreshOptions;

/// Rows kept in one codec, within a share of the cache's bytes.
#[derive(Debug, Clone)]
pub struct CacheTier {
    /// How rows are kept. Not a product code: that has codebooks of one table.
    pub codec: Codec,
    /// Who leaves when it is full.
    pub policy: PolicyKind,
    /// Its part of the cache's bytes, next to the shares of the other tiers.
    pub share: f64,
    /// Who may enter.
    pub admission: AdmissionRule,
}

impl Default for CacheTier {
    /// Rows as they are, the least recently used leaves.
    fn default() -> Self {
        Self {
            codec: Codec::F32,
            policy: PolicyKind::Lru,
            share: 1.0,
            admission: AdmissionRule::Always,
        }
    }
}

impl CacheTier {
    /// Returns a tier of a codec and a policy by name; a row enters with its `admit_after`th use.
    ///
    /// # Errors
    /// `Invalid` for unknown names, codecs that need training, a share that is not above 0, and
    /// another use than the first, second or third.
    pub fn named(codec: &str, policy: &str, share: f64, admit_after: u8) -> Result<Self> {
        if !(share > 0.0 && share.is_finite()) {
            return Err(Error::invalid("the share of a tier must be above 0").with("found", share));
        }
        let admission = match admit_after {
            1 => AdmissionRule::Always,
            threshold @ 2..=3 => AdmissionRule::Bitmap { threshold, age_after: 0 },
            _ => {
                return Err(Error::invalid("a row enters with its first, second or third use")
                    .with("found", admit_after)
                    .with("allowed", "1, 2, 3"));
            }
        };
        let (codec, policy) = (Codec::by_name(codec)?, PolicyKind::from_name(policy)?);
        Ok(Self { codec, policy, share, admission })
    }

    /// Parses `codec:policy:share:admit`, of which all but one part may be left out at the end;
    /// a lone name is a policy of f32 rows, or a codec.
    ///
    /// # Errors
    /// As of [`named`](Self::named), and `Invalid` for another text.
    pub fn parse(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let wrong = || {
            Error::invalid("a cache tier is written codec:policy:share:admit")
                .with("found", text)
                .with("example", "int8:group_frequency:0.5")
        };
        let share = |text: &str| text.parse::<f64>().map_err(|_| wrong());
        let tier = match parts.as_slice() {
            [name] if Codec::by_name(name).is_ok() => Self::named(name, "lru", 1.0, 1),
            [name] => Self::named("f32", name, 1.0, 1),
            [codec, policy] => Self::named(codec, policy, 1.0, 1),
            [codec, policy, part] => Self::named(codec, policy, share(part)?, 1),
            [codec, policy, part, admit] => {
                Self::named(codec, policy, share(part)?, admit.parse().map_err(|_| wrong())?)
            }
            _ => return Err(wrong()),
        };
        tier.map_err(|error| error.with("tier", text))
    }
}

/// What a row that is in no tier costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissMode {
    /// A read: the answer is exact.
    #[default]
    Read,
    /// An approximate row where there is one, else a read.
    Surrogate,
    /// An approximate row where there is one, else the table's default row: never a read.
    Default,
}

impl MissMode {
    /// Returns the mode of `name`.
    ///
    /// # Errors
    /// `Invalid` naming the modes there are.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "read" => Ok(Self::Read),
            "surrogate" => Ok(Self::Surrogate),
            "default" => Ok(Self::Default),
            other => Err(Error::invalid("unknown way to answer a miss")
                .with("found", other)
                .with("allowed", "read, surrogate, default")),
        }
    }
}

/// A part of a cache.
#[derive(Debug, Clone)]
pub enum CachePart {
    /// Rows that come and go.
    Rows(CacheTier),
    /// Who answers for rows that left the tiers.
    Neighbours(NeighbourOptions),
}

impl CachePart {
    /// Parses either; `open` opens the file of neighbours.
    ///
    /// # Errors
    /// As of [`CacheTier::parse`], of [`NeighbourOptions::parse`], and of `open`.
    pub fn parse(text: &str, open: impl FnOnce() -> Result<Arc<dyn Device>>) -> Result<Self> {
        match NeighbourOptions::parse(text, open)? {
            None => CacheTier::parse(text).map(Self::Rows),
            Some(near) => Ok(Self::Neighbours(near)),
        }
    }
}

/// A budget that a snapshot shares with others for its tiers.
#[derive(Debug, Clone)]
pub struct SharedTiers {
    /// The budget.
    pub budget: Arc<TierBudget>,
    /// The snapshot's name in its statistics.
    pub name: String,
    /// Bytes that the snapshot always has; `None`: a sixteenth of the budget.
    pub floor_bytes: Option<u64>,
}

/// The tiers of a snapshot.
#[derive(Debug, Clone)]
pub struct TierStackOptions {
    /// Tiers of rows that come and go, the first asked first.
    pub tiers: Vec<CacheTier>,
    /// Rows that are in memory from the beginning, by table.
    pub resident: Vec<Arc<ResidentTable>>,
    /// What happens to rows that are nowhere above.
    pub misses: MissMode,
    /// Which approximate answers are followed by a read.
    pub refresh: RefreshOptions,
    /// Whose neighbours answer for rows that left the tiers, if any.
    pub neighbours: Option<NeighbourOptions>,
    /// Where the bytes of the tiers come from; `None`: what is left of the snapshot's own budget.
    pub shared: Option<SharedTiers>,
}

impl TierStackOptions {
    /// Those of a cache of some parts; `names_file`: a file of neighbours was named.
    ///
    /// # Errors
    /// `Invalid` for neighbours twice, and for their file without them.
    pub fn of_parts(parts: Vec<CachePart>, names_file: bool) -> Result<Self> {
        let mut made = Self { tiers: Vec::new(), ..Self::default() };
        for part in parts {
            match part {
                CachePart::Rows(tier) => made.tiers.push(tier),
                CachePart::Neighbours(_) if made.neighbours.is_some() => {
                    return Err(Error::invalid("a cache has neighbours once"));
                }
                CachePart::Neighbours(near) => made.neighbours = Some(near),
            }
        }
        if names_file && made.neighbours.is_none() {
            return Err(Error::invalid("a file of neighbours needs its share of the cache")
                .with("remedy", "add neighbours:second_chance:4 to the tiers"));
        }
        Ok(made)
    }

    /// # Errors
    /// `Invalid` for parts that have no sense together.
    pub(crate) fn check(&self) -> Result<()> {
        if self.misses == MissMode::Read && !self.refresh.tables.is_empty() {
            return Err(Error::invalid("only approximate answers can be refreshed")
                .with("remedy", "let misses be answered by a surrogate or default row"));
        }
        let names_tiers = !self.tiers.is_empty();
        if !names_tiers && (self.shared.is_some() || !self.refresh.tables.is_empty()) {
            return Err(Error::invalid("a shared budget and refreshing need a cache tier"));
        }
        self.neighbours.as_ref().map_or(Ok(()), |neighbours| self.check_neighbours(neighbours))
    }

    fn check_neighbours(&self, neighbours: &NeighbourOptions) -> Result<()> {
        if self.misses != MissMode::Surrogate {
            return Err(Error::invalid("neighbours answer only where misses may be approximate")
                .with("remedy", "let misses be answered by a surrogate"));
        }
        if self.tiers.is_empty() || self.shared.is_some() {
            return Err(Error::invalid("neighbours need tiers with bytes of their own")
                .with("remedy", "name a cache tier, and give the snapshot no shared budget"));
        }
        neighbours.check()
    }

    /// Bytes that rows take while they wait for their neighbours, besides those of the cache.
    pub(crate) fn waiting_bytes(&self, schema: &Schema) -> u64 {
        self.neighbours.as_ref().map_or(0, |neighbours| neighbours.waiting_bytes(schema))
    }

    /// Returns the bytes of neighbours in a cache of `cache_bytes`.
    pub(crate) fn neighbours_bytes(&self, cache_bytes: u64) -> u64 {
        self.neighbours.as_ref().map_or(0, |neighbours| {
            (cache_bytes as f64 * (neighbours.share / self.share_sum())) as u64
        })
    }

    /// The shares of all tiers and of neighbours together.
    pub(super) fn share_sum(&self) -> f64 {
        let neighbours = self.neighbours.as_ref().map_or(0.0, |neighbours| neighbours.share);
        self.tiers.iter().map(|tier| tier.share).sum::<f64>() + neighbours
    }
}

impl Default for TierStackOptions {
    /// One tier of rows as they are, the least recently used leaves; misses are read.
    fn default() -> Self {
        Self {
            tiers: vec![CacheTier::default()],
            resident: Vec::new(),
            misses: MissMode::default(),
            refresh: RefreshOptions::default(),
            neighbours: None,
            shared: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_read_from_names() {
        let tier = CacheTier::parse("int8:group_frequency:0.25:2").unwrap();
        assert_eq!((tier.codec.name(), tier.policy.name()), ("int8", "group_frequency"));
        assert_eq!((tier.share, tier.admission), (0.25, AdmissionRule::SECOND_USE));
        let tier = CacheTier::parse("ev_lfu").unwrap();
        assert_eq!((tier.codec.name(), tier.policy.name()), ("f32", "ev_lfu"));
        assert_eq!(CacheTier::parse("int4").unwrap().codec.name(), "int4");
        for wrong in ["", "int8:fifo2", "int8:lru:0", "int8:lru:x", "product:lru", "a:b:c:d:e"] {
            assert!(CacheTier::parse(wrong).is_err(), "{wrong}");
        }
        assert!(CacheTier::parse("int8:lru:1:4").is_err());
        assert!(MissMode::from_name("drop").is_err());
        assert_eq!(MissMode::from_name("default").unwrap(), MissMode::Default);
    }
}
