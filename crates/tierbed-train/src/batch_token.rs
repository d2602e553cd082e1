//! Proof that the ids of a batch were checked, from a lookup to its update.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// A batch that a lookup found to be the next one of the plan: an update that has the token does
/// not look at the ids again. It is good for that batch in that engine, until the next step; later
/// it says nothing, and the ids are checked as without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchToken(NonZeroU64);

impl BatchToken {
    /// Returns a token that no other batch of this process has, in any engine.
    ///
    /// # Panics
    /// After 2^64 batches.
    pub(crate) fn next() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let number = NonZeroU64::new(COUNT.fetch_add(1, Ordering::Relaxed));
        let Some(number) = number else { panic!("every token was given") };
        Self(number)
    }

    /// Returns the token as a number, for callers that are not written in Rust.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0.get()
    }

    /// Returns the token of a number; `None` for a number that no token has.
    #[must_use]
    pub fn of_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}
