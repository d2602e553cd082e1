//! Eight-bit codes of evicted rows' scores: three bits of mantissa, and of the exponent the lowest
//! five: the others are those of the scores that leave now.
//!
//! ```text
//! score   bit 15 ... 13 12 ......... 8 7 ... 5 4 ...... 0
//! code                   exponent       mantissa            rounded by chance
//! ```
//!
//! A frame of 32 doublings has the scores that leave now in its upper part. What is higher or lower
//! is moved to its ends; a code that is kept while the frame moves on by twenty halvings comes back
//! too high.

/// Doublings of a frame, and how many of them are below the scores that leave now.
const OCTAVES: u8 = 32;
const OCTAVES_BELOW: u8 = 20;
/// Bits of a mantissa that are not kept.
const BITS_LEFT_OUT: u32 = 5;

/// Doublings of a score that the codes of evicted rows distinguish.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScoreFrame {
    /// The exponent of the lowest, as scores count it.
    lowest: u8,
}

impl ScoreFrame {
    /// Bits of a code.
    pub(super) const CODE_BITS: u32 = 8;

    /// The frame for pools where rows leave whose scores have this exponent, as scores count it.
    pub(super) fn around(exponent: u8) -> Self {
        Self { lowest: exponent.wrapping_sub(OCTAVES_BELOW) }
    }

    /// Returns the code of a score, rounded by the low bits of `chance`.
    #[inline]
    pub(super) fn code(self, score: u16, chance: u32) -> u8 {
        let above = i32::from(score.wrapping_sub(u16::from(self.lowest) << 8) as i16);
        let chance = (chance & ((1 << BITS_LEFT_OUT) - 1)) as i32;
        let highest = (i32::from(OCTAVES) << 8) - 1;
        self.first_code().wrapping_add(((above + chance).clamp(0, highest) >> BITS_LEFT_OUT) as u8)
    }

    /// Returns the score of a code; not 0.
    #[inline]
    pub(super) fn score(self, code: u8) -> u16 {
        let above = u16::from(self.order(code)) << BITS_LEFT_OUT;
        (u16::from(self.lowest) << 8).wrapping_add(above).max(1)
    }

    /// Returns a code as a number that is ordered as scores are.
    #[inline]
    pub(super) fn order(self, code: u8) -> u8 {
        code.wrapping_sub(self.first_code())
    }

    /// The code of the lowest score.
    #[inline]
    fn first_code(self) -> u8 {
        self.lowest << (8 - BITS_LEFT_OUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_scores_rounded_by_chance() {
        for exponent in [0, 19, 20, 100, 250] {
            let frame = ScoreFrame::around(exponent);
            for at in -19 * 256..10 * 256i32 {
                let score = ((i32::from(exponent) << 8) + at) as u16;
                let kept =
                    |chance| frame.score(frame.code(score, chance)).wrapping_sub(score) as i16;
                let (low, high) = (kept(0), kept(31));
                // The score that would be 0 is one more.
                assert!((-31..=1).contains(&low) && (0..=32).contains(&high), "{at}: {low} {high}");
                assert!(high - low <= 33, "{at}: {low} {high}");
                let mean = (0..32).map(|chance| i32::from(kept(chance))).sum::<i32>();
                assert!(mean.abs() <= 32, "{at}: {mean}");
            }
        }
    }

    #[test]
    fn order_is_that_of_scores_and_ends_hold_what_is_beyond() {
        let frame = ScoreFrame::around(3);
        let scores = (0..=255).map(|step| ((3 - 20i32) * 256 + step * 32) as u16);
        let orders: Vec<u8> = scores.map(|score| frame.order(frame.code(score, 0))).collect();
        assert_eq!(orders, (0..=255).collect::<Vec<u8>>());
        assert_eq!(frame.order(frame.code(100 << 8, 0)), 255);
        assert_eq!(frame.order(frame.code(200 << 8, 0)), 0);
    }

    /// The frame moves with the halvings: what was remembered keeps its score.
    #[test]
    fn a_code_outlives_some_halvings() {
        let score = (127 << 8) + 96;
        let code = ScoreFrame::around(127).code(score, 0);
        for halvings in 0..=20 {
            assert_eq!(ScoreFrame::around(127 + halvings).score(code), score);
        }
    }
}
