//! Scores in 16 bits that can all be halved without being touched.
//!
//! A score is a float of eight bits of exponent and eight of mantissa. It says how much a use is
//! worth in the unit of the day: halving all scores doubles the unit instead, so the exponent is
//! counted from the halvings there were since the beginning.
//!
//! ```text
//! bit 15 ....... 8 7 ............ 0
//!     exponent + e   mantissa            e: halvings so far, modulo 256
//! ```
//!
//! What is not read for some 240 halvings may come back wrong: the exponent has gone around.

/// The exponent of 1.0 in an f32, and bits of an f32 mantissa that a score leaves out.
const EXPONENT_OF_ONE: u16 = 127;
const BITS_LEFT_OUT: u32 = 15;
/// Scores end here; what looks larger is older than the exponent can tell.
const SCORE_MAX: f32 = 65_535.0;
const BITS_MAX: u16 = (SCORE_MAX.to_bits() >> BITS_LEFT_OUT) as u16;
/// Scores below 2^-12 are ranked alike.
const LOWEST_EXPONENT: u16 = EXPONENT_OF_ONE - 12;
/// Ranks per doubling of the score.
pub(super) const RANKS_PER_OCTAVE: usize = 32;
/// Bits of a score that make no difference to its rank.
const BITS_BELOW_RANK: u32 = 8 - RANKS_PER_OCTAVE.ilog2();
const LOWEST_RANKED: u16 = LOWEST_EXPONENT << (8 - BITS_BELOW_RANK);
/// Doublings that have ranks.
pub(super) const OCTAVES_MAX: f32 = 31.0;
/// Resting scores below 2^-32 are lifted to about there when they are refreshed.
const REST_BITS: u16 = ((EXPONENT_OF_ONE - 32) << 8) | 2;

/// The unit of scores: how often it has doubled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ScoreUnit {
    halvings: u8,
}

impl ScoreUnit {
    /// The [`bits`](Self::bits) of one full credit.
    pub(super) const BITS_OF_ONE: u16 = EXPONENT_OF_ONE << 8;

    /// Halvings after which scores that rest must be refreshed, at the latest.
    pub(super) const REFRESH_AFTER: u8 = 32;

    /// Halves all scores so many times.
    pub(super) fn halve(&mut self, times: u8) {
        self.halvings = self.halvings.wrapping_add(times);
    }

    /// Returns the halvings so far; wraps.
    pub(super) fn halvings(self) -> u8 {
        self.halvings
    }

    /// Returns the score as bits that are ordered as scores of this unit are.
    #[inline]
    pub(super) fn bits(self, score: u16) -> u16 {
        score.wrapping_sub(u16::from(self.halvings) << 8)
    }

    /// Returns the score as a number of full credits of now.
    #[inline]
    pub(super) fn value(self, score: u16) -> f32 {
        if score == 0 {
            return 0.0;
        }
        let value = f32::from_bits(u32::from(self.bits(score)) << BITS_LEFT_OUT);
        // Not a number when the exponent has just gone around.
        if value <= SCORE_MAX {
            value
        } else {
            0.0
        }
    }

    /// Adds credit. The bits that do not fit are rounded by the low bits of `chance`, so that
    /// small credits add up on large scores.
    #[inline]
    pub(super) fn raised(self, score: u16, credit: f32, chance: u32) -> u16 {
        let value = (self.value(score) + credit).min(SCORE_MAX);
        let chance = chance & ((1 << BITS_LEFT_OUT) - 1);
        let bits = (value.to_bits() + chance).min(SCORE_MAX.to_bits());
        self.score((bits >> BITS_LEFT_OUT) as u16)
    }

    /// The score of bits, never 0: that says "never seen".
    #[inline]
    fn score(self, bits: u16) -> u16 {
        bits.wrapping_add(u16::from(self.halvings) << 8).max(1)
    }

    /// Returns the rank of a score: thirty-two per doubling.
    #[inline]
    pub(super) fn rank(self, score: u16) -> u16 {
        let bits = self.bits(score);
        if score == 0 || bits > BITS_MAX {
            return 0;
        }
        (bits >> BITS_BELOW_RANK).saturating_sub(LOWEST_RANKED)
    }

    /// Returns the highest [`bits`](Self::bits) of rank `rank`.
    pub(super) fn bits_up_to(rank: u16) -> u16 {
        ((LOWEST_RANKED + rank) << BITS_BELOW_RANK) | ((1 << BITS_BELOW_RANK) - 1)
    }

    /// Returns what a slot keeps of a score: never 0, and falling no further than to where all are
    /// ranked alike, so that the exponent of one that rests does not go around if this is done
    /// every [`REFRESH_AFTER`](Self::REFRESH_AFTER) halvings. The lowest bit stays.
    pub(super) fn held(self, score: u16) -> u16 {
        if score != 0 && (REST_BITS..=BITS_MAX).contains(&self.bits(score)) {
            return score;
        }
        self.score(REST_BITS | (score & 1))
    }

    /// Returns `score` of unit `other` in this unit, 0 where it counts for nothing.
    pub(super) fn converted(self, score: u16, other: Self) -> u16 {
        if other.value(score) == 0.0 {
            return 0;
        }
        self.score(other.bits(score))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_bits_agree_after_any_halvings() {
        let mut unit = ScoreUnit::default();
        for times in [0, 3, 100, 31, 125] {
            unit.halve(times);
            for rank in 1..895 {
                let last = unit.score(ScoreUnit::bits_up_to(rank));
                let next = unit.score(ScoreUnit::bits_up_to(rank) + 1);
                assert_eq!((unit.rank(last), unit.rank(next)), (rank, rank + 1));
                assert!(unit.value(last) < unit.value(next));
            }
        }
        assert_eq!(unit.rank(unit.raised(0, 1e-5, 0)), 0);
    }

    #[test]
    fn a_score_is_halved_with_the_unit() {
        let mut unit = ScoreUnit::default();
        let score = unit.raised(unit.raised(0, 1.0, 0), 2.0, 0);
        unit.halve(2);
        assert_eq!((unit.value(score), unit.value(unit.raised(score, 1.25, 0))), (0.75, 2.0));
        let other = ScoreUnit { halvings: 250 };
        assert_eq!(other.value(other.converted(score, unit)), 0.75);
        assert_eq!(other.converted(0, unit), 0);
    }

    #[test]
    fn what_rests_stays_low_and_keeps_its_last_bit() {
        let mut unit = ScoreUnit::default();
        for bit in [0, 1] {
            let mut score = unit.raised(0, 4.0, 0) | bit;
            assert_eq!(unit.held(score), score);
            for _ in 0..100 {
                unit.halve(ScoreUnit::REFRESH_AFTER);
                score = unit.held(score);
                assert_eq!((unit.rank(score), score & 1), (0, bit));
            }
        }
        assert!(unit.held(0) > 1 && unit.rank(unit.held(0)) == 0);
    }
}
