//! The lowest occupied rank: a bit per rank, in a ring, so that all ranks can fall at once.
#![expect(clippy::indexing_slicing, reason = "ranks are reduced to the length of the ring")]

/// Ranks there are: `0..RANKS`; what is higher counts as the highest.
pub const RANKS: usize = 1024;

/// The places of ranks, and a bit per place that is filled.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankRing {
    /// The place of rank 0.
    base: usize,
    filled: [u64; RANKS / 64],
}

impl RankRing {
    /// Returns the place of `rank`, below [`RANKS`].
    #[inline]
    pub(crate) fn place(&self, rank: u16) -> usize {
        (self.base + usize::from(rank).min(RANKS - 1)) % RANKS
    }

    /// Notes whether `place` is filled.
    #[inline]
    pub(crate) fn set_filled(&mut self, place: usize, is_filled: bool) {
        let bit = 1 << (place % 64);
        if is_filled {
            self.filled[place / 64] |= bit;
        } else {
            self.filled[place / 64] &= !bit;
        }
    }

    /// Returns the lowest rank that is filled.
    #[inline]
    pub(crate) fn lowest(&self) -> Option<u16> {
        let (first, bit) = (self.base / 64, self.base % 64);
        let words = RANKS / 64;
        // From rank 0 to the end of its word, the other words, and that word's beginning.
        let of_word = |step: usize| {
            let word = self.filled[(first + step) % words];
            match step {
                0 => word >> bit << bit,
                step if step == words => word & !(u64::MAX << bit),
                _ => word,
            }
        };
        let step = (0..=words).find(|&step| of_word(step) != 0)?;
        let place = (first + step) % words * 64 + of_word(step).trailing_zeros() as usize;
        Some(((place + RANKS - self.base) % RANKS) as u16)
    }

    /// Lowers every rank by `by`. The places that would fall below 0 must be empty; so is that of
    /// rank 0 then.
    pub(crate) fn fall(&mut self, by: usize) {
        self.base = (self.base + by) % RANKS;
    }
}
