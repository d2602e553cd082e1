//! Integer features and their distributions.
//!
//! Each has 1,024 equally likely levels; a level's integer and its logarithm are tabulated, so
//! that drawing costs 10 random bits and a load.

#![expect(
    clippy::indexing_slicing,
    reason = "groups of missing integers are numbers of the table of shares"
)]

use super::shape::{ACTIVITY_SHARE, DENSE_COUNT, INTEGERS, INTEGER_MISSING_SHARES};

const LEVEL_COUNT: usize = 1 << 10;
/// Level of an integer that is not there.
pub(super) const MISSING_LEVEL: u16 = LEVEL_COUNT as u16;

/// Tables of the 13 integer features.
#[derive(Debug, Clone)]
pub(super) struct Integers {
    /// Level to integer, `[13][LEVEL_COUNT]`.
    values: Vec<Vec<i64>>,
    /// Level to `log1p(max(x, 0))`, `[13][LEVEL_COUNT + 1]`; missing is 0.
    logs: Vec<Vec<f32>>,
    /// Level to standard deviations from the median, `[LEVEL_COUNT]`.
    deviations: Vec<f32>,
}

impl Integers {
    pub(super) fn new() -> Self {
        let quantile = |level: usize| (level as f64 + 0.5) / LEVEL_COUNT as f64;
        let deviations: Vec<f64> =
            (0..LEVEL_COUNT).map(|level| normal_quantile(quantile(level))).collect();
        let mut values = Vec::with_capacity(DENSE_COUNT);
        let mut logs = Vec::with_capacity(DENSE_COUNT);
        for integer in &INTEGERS {
            let column: Vec<i64> = deviations
                .iter()
                .enumerate()
                .map(|(level, deviation)| {
                    if quantile(level) < integer.negative_share {
                        return -1;
                    }
                    let log = (integer.log_mean + integer.log_sd * deviation).max(0.0);
                    libm::expm1(log) as i64
                })
                .collect();
            let mut log: Vec<f32> =
                column.iter().map(|value| libm::log1p((*value).max(0) as f64) as f32).collect();
            log.push(0.0);
            values.push(column);
            logs.push(log);
        }
        let deviations = deviations.into_iter().map(|deviation| deviation as f32).collect();
        Self { values, logs, deviations }
    }

    /// Draws the 13 levels of a sample.
    pub(super) fn draw(&self, words: [u64; 5]) -> [u16; DENSE_COUNT] {
        let [first, second, third, fourth, fifth] = words;
        let ten_bits = |word: u64, at: usize| ((word >> (10 * at)) & 0x3ff) as u16;
        let common = ten_bits(third, 1);
        let mut levels = [0; DENSE_COUNT];
        for ((at, level), integer) in levels.iter_mut().enumerate().zip(&INTEGERS) {
            let word = if at < 6 {
                first
            } else if at < 12 {
                second
            } else {
                third
            };
            let roll = (third >> (20 + 3 * at)) & 0x1f;
            let follows = integer.is_activity && (roll as f64) < ACTIVITY_SHARE * 32.0;
            *level = if follows { common } else { ten_bits(word, at % 6) };
            if let Some(group) = integer.missing {
                let word = if group < 4 { fourth } else { fifth };
                let roll = (word >> (16 * (group % 4))) & 0xffff;
                let share = INTEGER_MISSING_SHARES[group];
                if (roll as f64) < share * 65_536.0 {
                    *level = MISSING_LEVEL;
                }
            }
        }
        levels
    }

    /// Returns the transformed features of a sample.
    pub(super) fn logs<'a>(
        &'a self,
        levels: &'a [u16; DENSE_COUNT],
    ) -> impl Iterator<Item = f32> + 'a {
        let log = |(column, level): (&Vec<f32>, &u16)| column.get(usize::from(*level)).copied();
        self.logs.iter().zip(levels).map(move |pair| log(pair).unwrap_or(0.0))
    }

    /// Returns the integers of a sample; `None` where missing.
    pub(super) fn values<'a>(
        &'a self,
        levels: &'a [u16; DENSE_COUNT],
    ) -> impl Iterator<Item = Option<i64>> + 'a {
        self.values
            .iter()
            .zip(levels)
            .map(|(column, level)| column.get(usize::from(*level)).copied())
    }

    /// Returns what the integers add to the log-odds of a click.
    pub(super) fn effect(&self, levels: &[u16; DENSE_COUNT]) -> f64 {
        let mut sum = 0.0;
        for (level, integer) in levels.iter().zip(&INTEGERS) {
            sum += match self.deviations.get(usize::from(*level)) {
                Some(deviation) => integer.effect * f64::from(*deviation),
                // As in the real log, a missing integer goes with fewer clicks.
                None => -integer.effect.abs(),
            };
        }
        sum
    }
}

/// Returns the value below which a standard normal falls with probability `p`, to 1e-9.
///
/// Source: P. J. Acklam, "An algorithm for computing the inverse normal cumulative distribution
/// function" (2003).
fn normal_quantile(p: f64) -> f64 {
    const LOW: f64 = 0.02425;
    let polynomial = |coefficients: &[f64], x: f64| {
        coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
    };
    let tail = |p: f64| {
        let q = libm::sqrt(-2.0 * libm::log(p));
        let above = [
            -7.784894002430293e-03,
            -3.223964580411365e-01,
            -2.400758277161838,
            -2.549732539343734,
            4.374664141464968,
            2.938163982698783,
        ];
        let below = [
            7.784695709041462e-03,
            3.224671290700398e-01,
            2.445134137142996,
            3.754408661907416,
            1.0,
        ];
        polynomial(&above, q) / polynomial(&below, q)
    };
    if p < LOW {
        return tail(p);
    }
    if p > 1.0 - LOW {
        return -tail(1.0 - p);
    }
    let q = p - 0.5;
    let above = [
        -3.969683028665376e+01,
        2.209460984245205e+02,
        -2.759285104469687e+02,
        1.38357751867269e+02,
        -3.066479806614716e+01,
        2.506628277459239,
    ];
    let below = [
        -5.447609879822406e+01,
        1.615858368580409e+02,
        -1.556989798598866e+02,
        6.680131188771972e+01,
        -1.328068155288572e+01,
        1.0,
    ];
    q * polynomial(&above, q * q) / polynomial(&below, q * q)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_normal() {
        for (p, expected) in [(0.5, 0.0), (0.975, 1.959964), (0.01, -2.326348), (0.9999, 3.719016)]
        {
            assert!((normal_quantile(p) - expected).abs() < 1e-6, "{p}");
        }
    }

    #[test]
    fn levels_rise_and_missing_is_zero() {
        let integers = Integers::new();
        for column in &integers.values {
            assert!(column.windows(2).all(|pair| pair[0] <= pair[1]));
        }
        assert!(integers.logs(&[MISSING_LEVEL; DENSE_COUNT]).all(|log| log == 0.0));
        assert!(integers.values(&[MISSING_LEVEL; DENSE_COUNT]).all(|value| value.is_none()));
    }
}
