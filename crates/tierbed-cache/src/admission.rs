//! The admission bitmap: two bits per row of the store count its uses.
//!
//! A row is admitted from the `threshold`-th use on; before, it is read past the cache. Counts
//! end at 3. So that old uses do not admit for ever, a hand goes over the counts and halves them,
//! a word at a time: once around per `age_after` uses per row.
//!
//! ```text
//! word 0:  row 31 ... row 1 row 0     two bits each: never, once, twice, three times or more
//! ```
//!
//! Source: FlashEmbedding §3.3.2; the paper says nothing of ageing.

use tierbed_core::{Error, Result};

/// Rows counted in a word.
const ROWS_PER_WORD: u64 = 32;
/// The low bit of every count.
const LOW_BITS: u64 = 0x5555_5555_5555_5555;
/// Counts end here.
const COUNT_MAX: u64 = 3;

/// Who may enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdmissionRule {
    /// Every row.
    #[default]
    Always,
    /// Rows used `threshold` times, 1 to 3; counts are halved once per `age_after` uses per row
    /// of the store, 0: never.
    Bitmap {
        /// Uses from which on a row enters.
        threshold: u8,
        /// Uses per row between two halvings of its count.
        age_after: u16,
    },
}

impl AdmissionRule {
    /// FlashEmbedding's default: the second use.
    pub const SECOND_USE: Self = Self::Bitmap { threshold: 2, age_after: 0 };
}

/// Counts of uses of the rows `0..row_count`.
#[derive(Debug, Clone)]
pub struct AdmissionBitmap {
    words: Box<[u64]>,
    threshold: u64,
    /// Uses between two words that are halved; 0: never.
    uses_per_word: u64,
    uses: u64,
    hand: usize,
}

impl AdmissionBitmap {
    /// Builds counts of 0; none for [`AdmissionRule::Always`].
    ///
    /// # Errors
    /// `Invalid` for a threshold outside 1 to 3.
    pub fn new(rule: AdmissionRule, row_count: u64) -> Result<Option<Self>> {
        let AdmissionRule::Bitmap { threshold, age_after } = rule else { return Ok(None) };
        if !(1..=COUNT_MAX).contains(&u64::from(threshold)) {
            return Err(Error::invalid("threshold of the admission bitmap must be 1, 2 or 3")
                .with("threshold", threshold));
        }
        let words = row_count.div_ceil(ROWS_PER_WORD).max(1);
        Ok(Some(Self {
            words: vec![0; usize::try_from(words).unwrap_or(usize::MAX)].into_boxed_slice(),
            threshold: u64::from(threshold),
            uses_per_word: u64::from(age_after) * ROWS_PER_WORD,
            uses: 0,
            hand: 0,
        }))
    }

    /// Returns the bytes of the counts of `row_count` rows.
    #[must_use]
    pub fn bytes_for(row_count: u64) -> u64 {
        row_count.div_ceil(ROWS_PER_WORD).max(1) * size_of::<u64>() as u64
    }

    /// Counts a use of `row` and tells whether it is admitted now. A row beyond the counts is.
    pub fn note(&mut self, row: u64) -> bool {
        let at = usize::try_from(row / ROWS_PER_WORD).unwrap_or(usize::MAX);
        let shift = row % ROWS_PER_WORD * 2;
        let Some(word) = self.words.get_mut(at) else { return true };
        let count = (*word >> shift) & COUNT_MAX;
        if count < COUNT_MAX {
            *word += 1 << shift;
        }
        let is_admitted = (count + 1).min(COUNT_MAX) >= self.threshold;
        self.age();
        is_admitted
    }

    fn age(&mut self) {
        if self.uses_per_word == 0 {
            return;
        }
        self.uses += 1;
        if self.uses >= self.uses_per_word {
            self.uses = 0;
            if let Some(word) = self.words.get_mut(self.hand) {
                *word = (*word >> 1) & LOW_BITS;
            }
            self.hand = (self.hand + 1) % self.words.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(threshold: u8, age_after: u16, row_count: u64) -> AdmissionBitmap {
        let rule = AdmissionRule::Bitmap { threshold, age_after };
        AdmissionBitmap::new(rule, row_count).unwrap().unwrap()
    }

    #[test]
    fn a_row_is_admitted_from_its_threshold_on() {
        for threshold in 1..=3 {
            let mut bitmap = bitmap(threshold, 0, 100);
            for use_number in 1..=5 {
                assert_eq!(bitmap.note(33), use_number >= threshold, "{threshold}");
            }
            assert_eq!(bitmap.note(32), threshold == 1);
            assert!(bitmap.note(5000));
        }
    }

    #[test]
    fn counts_are_halved_once_around() {
        let mut bitmap = bitmap(2, 1, 64);
        let note = |bitmap: &mut AdmissionBitmap, row: u64, times: usize| {
            (0..times).filter(|_| bitmap.note(row)).count()
        };
        assert_eq!(note(&mut bitmap, 40, 3), 2);
        note(&mut bitmap, 1, 29);
        // 32 uses: the first word was halved, the second was not.
        assert_eq!((bitmap.words[0], bitmap.words[1]), (1 << 2, 3 << 16));
        note(&mut bitmap, 1, 32);
        assert_eq!(bitmap.words[1], 1 << 16);
    }

    #[test]
    fn always_needs_no_counts_and_wrong_thresholds_are_refused() {
        assert!(AdmissionBitmap::new(AdmissionRule::Always, 9).unwrap().is_none());
        for threshold in [0, 4] {
            let rule = AdmissionRule::Bitmap { threshold, age_after: 0 };
            assert!(AdmissionBitmap::new(rule, 9).is_err());
        }
        assert_eq!(AdmissionBitmap::bytes_for(33), 16);
    }
}
