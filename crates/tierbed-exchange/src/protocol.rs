//! The synchronisation protocol: when a word may be read, and when written again.
//!
//! Numbers that only grow say how far a rank is: *epochs*. A writer stores the epoch after its
//! data, with release order; a reader that loads that epoch, or a later one, with acquire order,
//! sees the data. Nothing is ever reset, so no signal can be lost or taken for another one.
//! Epochs wrap around; two that are compared are less than 2^31 apart.
//!
//! The words come in by a trait, so that the model checker runs this very code
//! (`tests/loom_pad.rs`).

use std::sync::atomic::{AtomicU32, Ordering};

/// A word that two ranks share.
pub trait Word {
    /// Writes the word.
    fn store(&self, value: u32, order: Ordering);
    /// Reads the word.
    fn load(&self, order: Ordering) -> u32;
}

impl Word for AtomicU32 {
    fn store(&self, value: u32, order: Ordering) {
        Self::store(self, value, order);
    }

    fn load(&self, order: Ordering) -> u32 {
        Self::load(self, order)
    }
}

/// Says that everything this rank wrote for `epoch` is there.
pub fn signal(word: &impl Word, epoch: u32) {
    word.store(epoch, Ordering::Release);
}

/// Whether `epoch`, or a later one, was signalled; then what was written for it may be read.
pub fn is_reached(word: &impl Word, epoch: u32) -> bool {
    is_at_least(word.load(Ordering::Acquire), epoch)
}

/// Whether epoch `found` is `wanted` or a later one, across the wrap.
#[must_use]
pub fn is_at_least(found: u32, wanted: u32) -> bool {
    found.wrapping_sub(wanted) < 1 << 31
}

/// Buffers that are used in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    count: usize,
}

impl Turns {
    /// Takes turns among `count` buffers. Two are the fewest that are safe: with one, a writer
    /// that is a step ahead overwrites what is still read.
    ///
    /// # Panics
    /// When `count` is 0.
    #[must_use]
    pub fn new(count: usize) -> Self {
        assert!(count > 0, "there must be a buffer");
        Self { count }
    }

    /// Returns the number of buffers.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// Returns the buffer of step `step`.
    #[must_use]
    pub fn buffer(self, step: u64) -> usize {
        (step % self.count as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_compare_across_the_wrap() {
        assert!(is_at_least(5, 5));
        assert!(is_at_least(6, 5));
        assert!(!is_at_least(4, 5));
        assert!(is_at_least(2, u32::MAX - 1));
        assert!(!is_at_least(u32::MAX - 1, 2));
    }

    #[test]
    fn buffers_take_turns() {
        let turns = Turns::new(3);
        let used: Vec<_> = (0..5).map(|step| turns.buffer(step)).collect();
        assert_eq!(used, [0, 1, 2, 0, 1]);
    }
}
