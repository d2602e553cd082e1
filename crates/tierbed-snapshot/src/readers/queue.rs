//! Calls that wait for a reader, in the order they came.
//!
//! A thread that gives a reader back and asks for the next one finds it before any thread that
//! waits has woken. So long as nobody waits for long, that is best: no reader is idle. But some
//! would wait while others are served a hundred times. Who has waited for [`PATIENCE_US`] is
//! therefore the next, and readers that suit it are kept for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Thread;

use tierbed_core::env::Clock;

/// How long a call waits, in microseconds, before nobody who came later is served first.
const PATIENCE_US: u64 = 1000;

/// A place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn(u64);

#[derive(Debug)]
struct Waiter {
    turn: Turn,
    thread: Thread,
    since_us: u64,
    is_small: bool,
}

impl Waiter {
    /// Small readers suit small calls, full ones suit all.
    fn suits(&self, is_small_reader: bool) -> bool {
        self.is_small || !is_small_reader
    }
}

/// Calls that wait for a reader.
#[derive(Debug)]
pub(super) struct Queue {
    clock: Arc<dyn Clock>,
    turn_count: u64,
    waiting: VecDeque<Waiter>,
}

impl Queue {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, turn_count: 0, waiting: VecDeque::new() }
    }

    /// Adds the calling thread, which parks until it is woken, and then looks again.
    pub(super) fn join(&mut self, is_small: bool) -> Turn {
        let turn = Turn(self.turn_count);
        self.turn_count += 1;
        let (thread, since_us) = (std::thread::current(), self.clock.now_us());
        self.waiting.push_back(Waiter { turn, thread, since_us, is_small });
        turn
    }

    /// Removes a call that waits no more.
    ///
    /// # Panics
    /// When it is not in the queue.
    pub(super) fn leave(&mut self, turn: Turn) {
        let at = self.waiting.iter().position(|waiter| waiter.turn == turn);
        let left = at.and_then(|at| self.waiting.remove(at));
        assert!(left.is_some(), "a call leaves the queue once");
    }

    /// Tells whether a call may take a reader that is free; `turn` is its place, if it waits.
    pub(super) fn may_take(&self, turn: Option<Turn>, is_small_reader: bool) -> bool {
        match self.first(is_small_reader) {
            None => true,
            Some(first) => {
                let waited_us = self.clock.now_us() - first.since_us;
                turn == Some(first.turn) || waited_us < PATIENCE_US
            }
        }
    }

    /// Returns the thread of the first call that a free reader suits, to unpark once no lock is
    /// held. A call that takes a reader wakes the next one in turn: the one that was woken for that
    /// reader may be the same for another.
    pub(super) fn next(&self, is_small_free: bool, is_full_free: bool) -> Option<Thread> {
        let is_suited = |waiter: &&Waiter| is_full_free || (is_small_free && waiter.suits(true));
        self.waiting.iter().find(is_suited).map(|waiter| waiter.thread.clone())
    }

    fn first(&self, is_small_reader: bool) -> Option<&Waiter> {
        self.waiting.iter().find(|waiter| waiter.suits(is_small_reader))
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::ManualClock;

    use super::*;

    #[test]
    fn who_has_waited_long_is_the_next_that_a_reader_suits() {
        let clock = Arc::new(ManualClock::default());
        let mut queue = Queue::new(Arc::clone(&clock) as Arc<dyn Clock>);
        assert!(queue.may_take(None, true) && queue.may_take(None, false));
        let (large, small) = (queue.join(false), queue.join(true));
        clock.advance_us(PATIENCE_US - 1);
        assert!(queue.may_take(None, true) && queue.may_take(None, false));
        clock.advance_us(1);
        assert!(queue.may_take(Some(large), false));
        assert!(!queue.may_take(None, false) && !queue.may_take(Some(small), false));
        assert!(queue.may_take(Some(small), true), "no small reader suits the large call");
        assert!(!queue.may_take(None, true));
        queue.leave(large);
        assert!(queue.may_take(Some(small), false));
        queue.leave(small);
        assert!(queue.may_take(None, true) && queue.may_take(None, false));
    }
}
