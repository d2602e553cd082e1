//! Statistics of Criteo's log that the generator follows.
//!
//! Cardinalities are the published ones of the Criteo-Kaggle log (45.8 M samples, 33.8 M tokens).
//! Popularity, hierarchies, missing shares and integer quantiles were fitted to the distinct
//! counts and head shares of the log's first 60,000 rows (fit: `docs/reference/generator.md`).

use super::hierarchy::Spread;
use super::popularity::Shape;

pub(crate) const DENSE_COUNT: usize = 13;
pub(crate) const FEATURE_COUNT: usize = 26;

/// Distinct tokens of C1..C26 in the whole log, the empty one included where it occurs.
pub const CRITEO_CARDINALITIES: [u32; FEATURE_COUNT] = [
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

/// Tables are not scaled below this many rows (or their full size, if that is smaller).
pub(crate) const ROW_COUNT_MIN: u32 = 16;

/// Where a feature's token comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Origin {
    /// Drawn by popularity; with `home_share` determined by the token of `home` instead.
    Drawn { shape: Shape, home: Option<(usize, f64)> },
    /// A function of an earlier feature of the table order.
    Function { of: usize, spread: Spread },
}

/// One categorical feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Feature {
    /// Position in the batch: 0 is C1.
    pub(crate) at: usize,
    pub(crate) origin: Origin,
    /// Features of a group are missing together.
    pub(crate) missing: Option<usize>,
    /// Weight of its planted effect on the click.
    pub(crate) effect: f64,
}

/// Groups of categorical features missing together: share of samples. Group 0 is the chain of
/// C3, 1 is C6, 2 is C19, C20, C25, C26, and 3 is C22.
pub(crate) const MISSING_SHARES: [f64; 4] = [0.0386, 0.1397, 0.4170, 0.8188];

const fn drawn(p: f64, q: f64, s1: f64, knee: f64, s2: f64) -> Origin {
    let shape = Shape { top_share: p, shift: q, head_slope: s1, knee, tail_slope: s2 };
    Origin::Drawn { shape, home: None }
}

const fn homed(origin: Origin, of: usize, share: f64) -> Origin {
    match origin {
        Origin::Drawn { shape, .. } => Origin::Drawn { shape, home: Some((of, share)) },
        function => function,
    }
}

const fn function(of: usize, exponent: f64, skew: u32) -> Origin {
    Origin::Function { of, spread: Spread { exponent, skew } }
}

const fn feature(number: usize, origin: Origin, missing: Option<usize>, effect: f64) -> Feature {
    Feature { at: number - 1, origin, missing, effect }
}

const ONE_SLOPE: f64 = f64::INFINITY;

/// The features in the order they are made: what a feature depends on comes before it.
pub(crate) const FEATURES: [Feature; FEATURE_COUNT] = [
    feature(3, drawn(0.0397, 1.02, 0.3, 2.4, 1.035), Some(0), 0.0),
    feature(12, function(2, 0.985, 2), Some(0), 0.0),
    feature(21, function(11, 0.985, 2), Some(0), 0.0),
    feature(16, function(20, 0.975, 3), Some(0), 0.3),
    feature(4, function(15, 0.91, 5), Some(0), 0.4),
    feature(24, function(3, 0.84, 2), Some(0), 0.6),
    feature(7, drawn(0.01, 3.838, 0.634, 5_296.6, 3.507), None, 0.2),
    feature(11, function(6, 0.84, 2), None, 0.2),
    feature(13, function(10, 0.5, 3), None, 0.4),
    feature(15, homed(drawn(0.0211, 3.346, 0.558, 750.5, 2.518), 2, 0.25), None, 0.3),
    feature(18, function(14, 0.91, 1), None, 0.4),
    feature(2, function(17, 0.5, 3), None, 0.4),
    feature(14, drawn(0.3647, 0.99, 0.3, 3.9, 4.81), None, 0.5),
    feature(26, homed(drawn(0.0824, 1.137, 1.019, 1_878.3, 1.514), 2, 0.3), Some(2), 0.4),
    feature(19, homed(drawn(0.605, 0.111, 0.862, 781.0, 3.102), 25, 0.3), Some(2), 0.2),
    feature(20, homed(drawn(0.374, 1.0, 0.3, 1.0, 0.3), 25, 0.5), Some(2), 0.3),
    feature(25, homed(drawn(0.329, 36.9, 10.981, ONE_SLOPE, 10.981), 25, 0.3), Some(2), 0.2),
    feature(10, homed(drawn(0.2696, 0.992, 0.651, 1_843.3, 1.984), 12, 0.2), None, 0.3),
    feature(1, drawn(0.5017, 0.999, 0.3, 1.0, 1.942), None, 0.3),
    feature(5, drawn(0.6786, 1.525, 2.897, ONE_SLOPE, 2.897), None, 0.2),
    feature(6, drawn(0.53, 4.0, 8.0, ONE_SLOPE, 8.0), Some(1), 0.3),
    feature(8, drawn(0.59, 0.99, 3.068, 20.6, 1.889), None, 0.2),
    feature(9, drawn(0.884, 1.0, 0.3, 1.0, 0.3), None, 0.3),
    feature(17, drawn(0.4241, 0.721, 0.985, ONE_SLOPE, 0.985), None, 0.5),
    feature(22, drawn(0.516, 0.01, 4.545, ONE_SLOPE, 4.545), Some(3), 0.2),
    feature(23, drawn(0.4385, 8.073, 7.927, ONE_SLOPE, 7.927), None, 0.3),
];

/// One integer feature: `log1p(x)` is normal, cut at 0; `x` is rounded down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Integer {
    pub(crate) log_mean: f64,
    pub(crate) log_sd: f64,
    /// Share of samples at the low end whose value is -1.
    pub(crate) negative_share: f64,
    /// Index into [`INTEGER_MISSING_SHARES`].
    pub(crate) missing: Option<usize>,
    /// Whether it follows the sample's common activity (see `ACTIVITY_SHARE`).
    pub(crate) is_activity: bool,
    /// Change of the log-odds of a click for one standard deviation.
    pub(crate) effect: f64,
}

const fn integer(
    mean: f64,
    sd: f64,
    missing: Option<usize>,
    is_activity: bool,
    effect: f64,
) -> Integer {
    Integer { log_mean: mean, log_sd: sd, negative_share: 0.0, missing, is_activity, effect }
}

/// Groups of integer features missing together. Group 0 is I1 and I10, 1 is I4 and I13, 2 is
/// I5, I7, I9 and I11, 3 is I3, 4 is I6, 5 is I8, and 6 is I12.
pub(crate) const INTEGER_MISSING_SHARES: [f64; 7] =
    [0.447, 0.194, 0.048, 0.193, 0.252, 0.001, 0.773];

/// How often an activity feature takes the sample's common quantile instead of one of its own.
pub(crate) const ACTIVITY_SHARE: f64 = 0.6;

pub(crate) const INTEGERS: [Integer; DENSE_COUNT] = [
    integer(0.75, 1.28, Some(0), true, 0.2),
    Integer { negative_share: 0.098, ..integer(1.4, 3.0, None, false, 0.05) },
    integer(2.25, 1.45, Some(3), false, -0.1),
    integer(1.79, 1.0, Some(1), false, -0.05),
    integer(7.4, 2.5, Some(2), false, -0.2),
    integer(3.6, 1.75, Some(4), false, -0.3),
    integer(1.35, 1.65, Some(2), true, 0.2),
    integer(2.1, 1.15, Some(5), false, -0.05),
    integer(3.65, 1.6, Some(2), false, 0.0),
    integer(0.7, 0.35, Some(0), true, 0.1),
    integer(0.95, 0.85, Some(2), true, 0.15),
    integer(-0.1, 1.2, Some(6), false, 0.1),
    integer(1.8, 1.15, Some(1), false, -0.2),
];

/// Pairs of features (0 is C1) whose hidden vectors are multiplied, and the weight: what a
/// linear model cannot see and a factorisation can.
pub(crate) const INTERACTIONS: [(usize, usize, f64); 5] =
    [(23, 17, 0.35), (13, 12, 0.35), (16, 1, 0.35), (8, 5, 0.25), (3, 25, 0.3)];

/// Share of clicks in the whole log.
pub(crate) const CLICK_SHARE: f64 = 0.256;

/// Tokens less popular than this have no planted effect: no model could learn it.
pub(crate) const EFFECT_RANK_MAX: u32 = 4_096;
