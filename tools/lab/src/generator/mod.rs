//! A seeded generator of Criteo-shaped logs of any size.
//!
//! A [`Generator`] makes samples up: 13 integers, 26 tokens and a click. Sample number `n` is a
//! pure function of the options and `n`: no state runs from sample to sample, so batches of any
//! size and in any order hold the same samples, resuming costs nothing and ranks of a job can
//! generate disjoint parts. Tokens follow fitted popularities ([`popularity`]), exact functional
//! dependencies ([`hierarchy`]) and looser correlations; ids are permuted ([`permutation`]);
//! clicks carry a planted signal ([`signal`]). `docs/reference/generator.md` has the calibration.
//!
//! Memory: below 1 MiB, whatever the scale.

#![expect(clippy::indexing_slicing, reason = "features are numbers of the 26 columns")]

mod calibration;
mod hierarchy;
mod integers;
mod permutation;
mod popularity;
mod shape;
mod signal;
mod tsv;

use serde::{Deserialize, Serialize};
use tierbed_core::env::mix64;
use tierbed_core::{Error, Result};

pub use calibration::{measure, Calibration};
pub use shape::CRITEO_CARDINALITIES;
pub use tsv::write_criteo;

use hierarchy::Hierarchy;
use integers::Integers;
use permutation::Permutation;
use popularity::Popularity;
use shape::{Origin, DENSE_COUNT, FEATURES, FEATURE_COUNT, MISSING_SHARES, ROW_COUNT_MIN};
use signal::Signal;
use tierbed_data::{BatchShape, SampleBatch};

/// Index of a token that is not there.
const MISSING: u32 = u32::MAX;

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeneratorOptions {
    /// Another seed, another log.
    pub seed: u64,
    /// Share of the published cardinalities, above 0, at most 1 (33.8 M rows).
    pub scale: f64,
    /// How many times each popular token is replaced by another per million samples, on average;
    /// 0 for a stationary log.
    #[serde(default = "default_drift")]
    pub drift: f64,
}

fn default_drift() -> f64 {
    0.02
}

impl GeneratorOptions {
    /// The options of `seed` and `scale`, with slow drift.
    #[must_use]
    pub fn new(seed: u64, scale: f64) -> Self {
        Self { seed, scale, drift: default_drift() }
    }

    /// Returns the largest scale whose tables have at most `row_count` rows together, and none
    /// below the smallest possible.
    #[must_use]
    pub fn scale_for_rows(row_count: u64) -> f64 {
        let (mut low, mut high) = (1e-9, 1.0);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            let rows: u64 = row_counts(middle).iter().map(|rows| u64::from(*rows)).sum();
            if rows <= row_count {
                low = middle;
            } else {
                high = middle;
            }
        }
        if row_counts(1.0).iter().map(|rows| u64::from(*rows)).sum::<u64>() <= row_count {
            return 1.0;
        }
        low
    }
}

/// Rows of each table at `scale`.
fn row_counts(scale: f64) -> [u32; FEATURE_COUNT] {
    CRITEO_CARDINALITIES.map(|rows| {
        let scaled = libm::round(f64::from(rows) * scale) as u32;
        scaled.max(ROW_COUNT_MIN.min(rows))
    })
}

/// Generates samples. Cheap to clone; share by reference between threads.
#[derive(Debug, Clone)]
pub struct Generator {
    options: GeneratorOptions,
    row_counts: [u32; FEATURE_COUNT],
    makers: Vec<Maker>,
    integers: Integers,
    signal: Signal,
}

/// Makes one feature's tokens.
#[derive(Debug, Clone)]
struct Maker {
    at: usize,
    missing: Option<usize>,
    /// 1 where id 0 means missing, else 0.
    id_base: u32,
    token_count: u32,
    seed: u64,
    permutation: Permutation,
    source: MakerSource,
}

#[derive(Debug, Clone)]
enum MakerSource {
    Drawn { popularity: Popularity, home: Option<Home> },
    Function { of: usize, hierarchy: Hierarchy },
}

#[derive(Debug, Clone, Copy)]
struct Home {
    of: usize,
    /// Of 2^32.
    share: u64,
}

/// One sample before it becomes ids or text.
#[derive(Debug, Clone)]
struct Draw {
    /// Token index by popularity, or [`MISSING`]; C1..C26.
    tokens: [u32; FEATURE_COUNT],
    /// Rank at which the token (or the token it is a function of) was drawn, before drift.
    ranks: [u32; FEATURE_COUNT],
    /// Quantile level of each integer, or `integers::MISSING_LEVEL`.
    levels: [u16; DENSE_COUNT],
    /// Uniform in `[0, 1)`: a click when below its probability.
    luck: f64,
}

/// The random words of one sample.
struct Words {
    state: u64,
}

impl Words {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.state)
    }
}

impl Generator {
    /// Prepares a generator. Takes a few milliseconds, whatever the scale.
    ///
    /// # Errors
    /// `Invalid` for a scale outside (0, 1] or a drift that is negative or not finite.
    pub fn new(options: GeneratorOptions) -> Result<Self> {
        if !(options.scale > 0.0 && options.scale <= 1.0) {
            return Err(Error::invalid("generator scale must be above 0 and at most 1")
                .with("found", options.scale));
        }
        if !(options.drift >= 0.0 && options.drift.is_finite()) {
            return Err(
                Error::invalid("generator drift must be 0 or above").with("found", options.drift)
            );
        }
        let row_counts = row_counts(options.scale);
        let token_counts: [u32; FEATURE_COUNT] = {
            let mut counts = row_counts;
            for feature in &FEATURES {
                counts[feature.at] -= u32::from(feature.missing.is_some());
            }
            counts
        };
        let makers = FEATURES
            .iter()
            .map(|feature| {
                let seed = mix64(options.seed ^ mix64(0x0070_6b65_6e73 + feature.at as u64));
                let token_count = token_counts[feature.at];
                let source = match feature.origin {
                    Origin::Drawn { shape, home } => MakerSource::Drawn {
                        popularity: Popularity::new(&shape, token_count),
                        home: home.map(|(of, share)| Home {
                            of,
                            share: (share * 4_294_967_296.0) as u64,
                        }),
                    },
                    Origin::Function { of, spread } => MakerSource::Function {
                        of,
                        hierarchy: Hierarchy::new(token_counts[of], token_count, spread, seed),
                    },
                };
                Maker {
                    at: feature.at,
                    missing: feature.missing,
                    id_base: u32::from(feature.missing.is_some()),
                    token_count,
                    seed,
                    permutation: Permutation::new(token_count, seed),
                    source,
                }
            })
            .collect();
        let integers = Integers::new();
        let signal = Signal::new(options.seed);
        let mut generator = Self { options, row_counts, makers, integers, signal };
        generator.signal = signal::with_bias(&generator);
        Ok(generator)
    }

    /// Returns the options.
    #[must_use]
    pub fn options(&self) -> &GeneratorOptions {
        &self.options
    }

    /// Returns the rows of the tables of C1..C26; ids are below.
    #[must_use]
    pub fn row_counts(&self) -> &[u32; FEATURE_COUNT] {
        &self.row_counts
    }

    /// Returns the shape of the batches: 13 dense and 26 categorical features.
    #[must_use]
    pub fn shape() -> BatchShape {
        BatchShape { dense_count: DENSE_COUNT, feature_count: FEATURE_COUNT }
    }

    /// Tells for C1..C26 whether id 0 stands for a missing token.
    #[must_use]
    pub fn has_missing() -> [bool; FEATURE_COUNT] {
        let mut has_missing = [false; FEATURE_COUNT];
        for feature in &FEATURES {
            if let Some(slot) = has_missing.get_mut(feature.at) {
                *slot = feature.missing.is_some();
            }
        }
        has_missing
    }

    /// Fills `batch` with samples `first_sample..first_sample + sample_count`. Ids are in
    /// `0..row_counts()`; id 0 means missing where [`Self::has_missing`] says so.
    ///
    /// # Errors
    /// `Invalid` when the batch has another shape.
    pub fn fill(
        &self,
        first_sample: u64,
        sample_count: usize,
        batch: &mut SampleBatch,
    ) -> Result<()> {
        if batch.shape() != Self::shape() {
            return Err(Error::invalid("batch must have 13 dense and 26 categorical features")
                .with("found", format_args!("{:?}", batch.shape())));
        }
        batch.resize(sample_count);
        let SampleBatch { label, dense, values, .. } = batch;
        let rows = label.iter_mut().zip(dense.as_chunks_mut::<DENSE_COUNT>().0);
        for (at, (label, dense)) in rows.enumerate() {
            let draw = self.draw(first_sample.wrapping_add(at as u64));
            for (dense, value) in dense.iter_mut().zip(self.integers.logs(&draw.levels)) {
                *dense = value;
            }
            let column = values.iter_mut().skip(at).step_by(sample_count);
            for (value, id) in column.zip(self.ids(&draw)) {
                *value = i64::from(id);
            }
            *label = f32::from(u8::from(self.is_click(&draw)));
        }
        Ok(())
    }

    /// Returns the row ids of sample `number`, C1..C26, as [`Self::fill`] does.
    #[must_use]
    pub fn ids_of(&self, number: u64) -> [u32; FEATURE_COUNT] {
        self.ids(&self.draw(number))
    }

    fn is_click(&self, draw: &Draw) -> bool {
        draw.luck < self.signal.click_probability(draw, &self.integers)
    }

    /// Returns the row ids of a sample, C1..C26.
    fn ids(&self, draw: &Draw) -> [u32; FEATURE_COUNT] {
        let mut ids = [0; FEATURE_COUNT];
        for maker in &self.makers {
            let token = draw.tokens[maker.at];
            if token != MISSING {
                ids[maker.at] = maker.id_base + maker.permutation.apply(token);
            }
        }
        ids
    }

    /// Draws sample number `number`.
    fn draw(&self, number: u64) -> Draw {
        let mut words = Words { state: mix64(self.options.seed ^ mix64(number ^ 0x7361_6d70)) };
        let age = number as f64 * self.options.drift * (4_294_967_296.0 / 1e6);
        let age = if age < 9e18 { age as u64 } else { u64::MAX >> 1 };
        let missing = missing_groups(words.next());
        let mut draw = Draw {
            tokens: [MISSING; FEATURE_COUNT],
            ranks: [0; FEATURE_COUNT],
            levels: self.integers.draw([
                words.next(),
                words.next(),
                words.next(),
                words.next(),
                words.next(),
            ]),
            luck: (words.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64),
        };
        for maker in &self.makers {
            if maker.missing.is_some_and(|group| missing & (1 << group) != 0) {
                continue;
            }
            let (token, rank) = match &maker.source {
                MakerSource::Drawn { popularity, home } => {
                    let word = maker.word(words.next(), *home, &draw.tokens);
                    let rank = popularity.rank(word);
                    (maker.drifted(rank, age), rank)
                }
                MakerSource::Function { of, hierarchy } => {
                    (hierarchy.parent(draw.tokens[*of]), draw.ranks[*of])
                }
            };
            (draw.tokens[maker.at], draw.ranks[maker.at]) = (token, rank);
        }
        draw
    }
}

impl Maker {
    /// Returns `word`, or, in `home.share` of the cases, the word that belongs to the token of
    /// the feature at home.
    fn word(&self, word: u64, home: Option<Home>, tokens: &[u32; FEATURE_COUNT]) -> u64 {
        let Some(home) = home else { return word };
        let host = tokens[home.of];
        if host != MISSING && (mix64(word) >> 32) < home.share {
            return mix64(self.seed ^ mix64(u64::from(host)));
        }
        word
    }

    /// Returns the token that holds rank `rank` now. Every rank changes hands after
    /// `1 / drift` million samples, each at a time of its own; the next holder comes from
    /// anywhere in the feature, mostly from the tail.
    fn drifted(&self, rank: u32, age: u64) -> u32 {
        let phase = mix64(self.seed ^ u64::from(rank)) & 0xffff_ffff;
        let generation = (age + phase) >> 32;
        if generation == 0 {
            return rank;
        }
        let count = u64::from(self.token_count);
        // The golden section spreads the generations of a rank over the feature.
        let stride = (count * 2_654_435_769) >> 32;
        ((u64::from(rank) + (generation % count) * stride) % count) as u32
    }
}

/// Decides which groups of categorical features are missing: bit `g` for group `g`.
fn missing_groups(word: u64) -> u32 {
    let mut groups = 0;
    for (group, share) in MISSING_SHARES.iter().enumerate() {
        let roll = (word >> (16 * group)) & 0xffff;
        if (roll as f64) < share * 65_536.0 {
            groups |= 1 << group;
        }
    }
    groups
}

#[cfg(test)]
mod tests;
