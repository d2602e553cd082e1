//! Division of a budget among models for the most hits. Pure.

#![expect(
    clippy::indexing_slicing,
    reason = "sizes are numbers of units, at most UNITS; what is given is at most what is spare"
)]

/// Parts that a budget is divided in.
pub(super) const UNITS: usize = 64;
/// What an even division is worth next to all hits: it decides where hits do not.
const EVENNESS: f64 = 1e-4;
/// A division that is not better by this is not worth moving rows for.
const GAIN_WANTED: f64 = 1.01;
/// Nor is one whose gain may be chance: so many standard deviations of the hits that were sampled.
const DEVIATIONS_WANTED: f64 = 3.0;

/// Hits of a model with 0, 1, ... [`UNITS`] units.
#[derive(Debug, Clone)]
pub(super) struct Curve {
    hits: Vec<f64>,
    /// Hits that one of the sample stands for.
    weight: f64,
}

impl Default for Curve {
    fn default() -> Self {
        Self { hits: vec![0.0; UNITS + 1], weight: 0.0 }
    }
}

impl Curve {
    /// A curve without hits yet, of a sample in which a hit stands for `weight`; 0: exact.
    pub(super) fn sampled(weight: f64) -> Self {
        Self { weight, ..Self::default() }
    }

    pub(super) fn set(&mut self, units: usize, hits: f64) {
        self.hits[units] = hits;
    }

    pub(super) fn at(&self, units: usize) -> f64 {
        self.hits[units]
    }
}

/// A model that shares.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) curve: Curve,
    /// Units that it always has.
    pub(super) floor: usize,
    /// Units that it has now.
    pub(super) held: usize,
}

/// Returns the units of each of `claims`, [`UNITS`] together, none below its floor: those with the
/// most hits, or those held now where these are nearly as good.
///
/// # Panics
/// When the floors are more than there is.
pub(super) fn divide(claims: &[Claim]) -> Vec<usize> {
    let spare = UNITS.checked_sub(claims.iter().map(|claim| claim.floor).sum());
    let Some(spare) = spare else { panic!("floors of a budget are more than it") };
    if claims.is_empty() {
        return Vec::new();
    }
    let all: f64 = claims.iter().map(|claim| claim.curve.at(UNITS)).sum();
    let value = |claim: &Claim, units: usize| {
        let even = (units as f64 / UNITS as f64).sqrt();
        claim.curve.at(units) + EVENNESS * all.max(1.0) * even
    };
    // best[given]: the most that the claims so far make of so many units beyond their floors.
    let mut best = vec![0.0f64; spare + 1];
    let mut choices: Vec<Vec<usize>> = Vec::new();
    for claim in claims {
        let worth: Vec<f64> = (0..=spare).map(|more| value(claim, claim.floor + more)).collect();
        let pick = |given: usize| {
            let gains = worth.iter().take(given + 1).enumerate();
            let sums = gains.map(|(more, worth)| (more, worth + best[given - more]));
            sums.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0))
        };
        let picked: Vec<(usize, f64)> = (0..=spare).map(pick).collect();
        choices.push(picked.iter().map(|(more, _)| *more).collect());
        best = picked.iter().map(|(_, sum)| *sum).collect();
    }
    let (mut left, mut units) = (spare, Vec::new());
    for (claim, choice) in claims.iter().zip(&choices).rev() {
        let more = choice[left];
        units.push(claim.floor + more);
        left -= more;
    }
    units.reverse();
    let held: Vec<usize> = claims.iter().map(|claim| claim.held).collect();
    let is_allowed =
        held.iter().sum::<usize>() == UNITS && claims.iter().all(|claim| claim.held >= claim.floor);
    match is_allowed && !is_clearly_better(claims, &units) {
        true => held,
        false => units,
    }
}

/// Tells whether `units` have more hits than what is held, beyond chance.
fn is_clearly_better(claims: &[Claim], units: &[usize]) -> bool {
    let (mut held_hits, mut gain, mut variance) = (0.0, 0.0, 0.0);
    for (claim, &units) in claims.iter().zip(units) {
        let (before, after) = (claim.curve.at(claim.held), claim.curve.at(units));
        held_hits += before;
        gain += after - before;
        // Hits are counted one by one: of n of the sample, the square root of n is chance.
        variance += (after - before).abs() * claim.curve.weight;
    }
    gain >= (GAIN_WANTED - 1.0) * held_hits && gain >= DEVIATIONS_WANTED * variance.sqrt()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claim(floor: usize, held: usize, hits: impl Fn(usize) -> f64) -> Claim {
        let mut curve = Curve::default();
        (0..=UNITS).for_each(|units| curve.set(units, hits(units)));
        Claim { curve, floor, held }
    }

    #[test]
    fn memory_goes_where_it_makes_most_hits() {
        // The first has all its hits with 8 units, the second gains with every unit.
        let claims =
            [claim(1, 32, |units| 100.0 * units.min(8) as f64), claim(1, 32, |units| units as f64)];
        assert_eq!(divide(&claims), [8, 56]);
        // A cliff: nothing before 40 units, everything there.
        let claims = [
            claim(1, 32, |units| if units >= 40 { 900.0 } else { 0.0 }),
            claim(1, 32, |units| units as f64),
        ];
        assert_eq!(divide(&claims), [40, 24]);
    }

    #[test]
    fn floors_hold_and_nothing_known_is_divided_evenly() {
        let nobody = |floor| claim(floor, 0, |_| 0.0);
        assert_eq!(divide(&[nobody(4), nobody(4)]), [32, 32]);
        assert_eq!(divide(&[nobody(50), nobody(4)]), [50, 14]);
        assert_eq!(divide(&[nobody(1)]), [UNITS]);
        assert!(divide(&[]).is_empty());
        let greedy = claim(1, 0, |units| units as f64 * 1e6);
        assert_eq!(divide(&[greedy, nobody(7)]), [57, 7]);
    }

    #[test]
    fn what_is_held_stays_until_another_division_is_clearly_better() {
        let slope = |by: f64| move |units: usize| by * units as f64;
        assert_eq!(divide(&[claim(1, 20, slope(1.0)), claim(1, 44, slope(1.001))]), [20, 44]);
        assert_eq!(divide(&[claim(1, 20, slope(1.0)), claim(1, 44, slope(2.0))]), [1, 63]);
        // The same slopes, guessed from a few hits of a sample.
        let sampled = |held, slope: f64, weight| {
            let mut claim = claim(1, held, |units| slope * units as f64);
            claim.curve.weight = weight;
            claim
        };
        for (weight, expected) in [(1.0, [1, 63]), (20.0, [20, 44])] {
            let claims = [sampled(20, 10.0, weight), sampled(44, 20.0, weight)];
            assert_eq!(divide(&claims), expected, "{weight}");
        }
        // A newcomer: what is held is less than there is.
        let units = divide(&[claim(1, 64, slope(1.0)), claim(8, 0, |_| 0.0)]);
        assert_eq!(units, [56, 8]);
    }

    proptest! {
        /// The oracle tries every division among three.
        #[test]
        fn no_division_has_more_hits(
            steps in proptest::collection::vec(0u32..1000, 3 * UNITS),
            floors in proptest::collection::vec(0usize..20, 3),
        ) {
            let claims: Vec<Claim> = floors.iter().zip(steps.chunks(UNITS)).map(|(&floor, steps)| {
                let hits = |units| steps.iter().take(units).sum::<u32>();
                claim(floor, 0, |units| f64::from(hits(units)))
            }).collect();
            let hits = |units: [usize; 3]| -> f64 {
                claims.iter().zip(units).map(|(claim, units)| claim.curve.at(units)).sum()
            };
            let found = divide(&claims);
            prop_assert_eq!(found.iter().sum::<usize>(), UNITS);
            prop_assert!(found.iter().zip(&floors).all(|(units, floor)| units >= floor));
            let mut most = 0.0f64;
            for a in floors[0]..=UNITS - floors[1] - floors[2] {
                for b in floors[1]..=UNITS - a - floors[2] {
                    most = most.max(hits([a, b, UNITS - a - b]));
                }
            }
            let found = hits([found[0], found[1], found[2]]);
            // Evenness may cost its own weight.
            let all: f64 = claims.iter().map(|claim| claim.curve.at(UNITS)).sum();
            prop_assert!(found >= most - 3.0 * EVENNESS * all.max(1.0), "{} of {}", found, most);
        }
    }
}
