//! The signal pad: epochs that announce completed writes.
//!
//! The pad lies at the start of every region: one word for each kind of message and sender, a
//! line of 128 bytes apart, so that senders do not share cache lines.
//!
//! ```text
//! | line 0: state of this rank, rank it lost | line 1 + channel * ranks + sender: its epoch | ...
//! ```
//!
//! Waiting spins for a moment, then sleeps; it ends with an error that names the rank when that
//! rank has left, or is silent for longer than the time-out.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use tierbed_core::env::Clock;
use tierbed_core::{Error, ErrorKind, Result};

use crate::heap::SymmetricHeap;
use crate::memory::{wait_while, wake_all};
use crate::protocol::{is_at_least, is_reached, signal};

/// Bytes between two words of a pad: two cache lines, as processors fetch them in pairs.
const LINE_BYTES: usize = 128;
/// Where a rank that failed says which rank of another node it lost, counted from 1.
const LOST_AT: usize = 4;
/// Looks before a rank goes to sleep: 20 to 50 microseconds. Sleeping costs a system call, but
/// ranks that share a core only get on when the waiting one leaves it.
const SPINS: usize = 1000;
/// Longest sleep before a rank looks whether the other one has left.
const NAP: Duration = Duration::from_millis(20);

/// Kinds of messages, each with epochs of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// Ids of the next batch are published.
    Bags,
    /// Vectors are in the output.
    Outputs,
    /// Gradients are in the owner's matrix.
    Grads,
    /// Gradients of weights of indices are back.
    WeightGrads,
    /// The rank has no further call to make.
    Close,
    /// Ids that were published are gathered, and may be written again.
    Gathered,
    /// What the rank wants of an agreement is there.
    Agreement,
    /// Bags of mirrored tables that came from other nodes are there.
    Guests,
    /// Gradients of mirrored tables that came from other nodes are in the matrices.
    GuestGrads,
}

const CHANNEL_COUNT: usize = 9;

/// What a rank says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Working = 0,
    Closed = 1,
    Failed = 2,
}

/// One rank's view of all pads.
#[derive(Debug, Clone)]
pub struct Pad {
    heap: Arc<dyn SymmetricHeap>,
    rank: usize,
    /// What errors call the first rank of the heap.
    first_rank: usize,
    clock: Arc<dyn Clock>,
    timeout: Duration,
}

impl Pad {
    /// Takes the pad of `rank`; waiting longer than `timeout` is an error.
    ///
    /// # Errors
    /// `Invalid` when the heap has no such rank or its regions are shorter than a pad.
    pub fn new(
        heap: Arc<dyn SymmetricHeap>,
        rank: usize,
        clock: Arc<dyn Clock>,
        timeout: Duration,
    ) -> Result<Self> {
        let rank_count = heap.rank_count();
        if rank >= rank_count {
            return Err(Error::invalid("no such rank")
                .with("rank", rank)
                .with("ranks", rank_count));
        }
        if heap.region(rank).len_bytes() < pad_bytes(rank_count) {
            return Err(Error::invalid("a region must hold at least a pad")
                .with("region_bytes", heap.region(rank).len_bytes())
                .with("minimum_bytes", pad_bytes(rank_count)));
        }
        Ok(Self { heap, rank, first_rank: 0, clock, timeout })
    }

    /// Counts ranks from `first_rank` in errors: those of nodes before are no ranks of this heap.
    #[must_use]
    pub fn named_from(mut self, first_rank: usize) -> Self {
        self.first_rank = first_rank;
        self
    }

    /// Returns the rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Changes how long a rank may be silent.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn rank_count(&self) -> usize {
        self.heap.rank_count()
    }

    /// Returns the heap.
    #[must_use]
    pub fn heap(&self) -> &dyn SymmetricHeap {
        self.heap.as_ref()
    }

    /// Tells `receiver` that everything this rank wrote for `epoch` is there.
    pub fn put(&self, channel: Channel, receiver: usize, epoch: u32) {
        let word = self.word(channel, receiver, self.rank);
        signal(word, epoch);
        wake_all(word);
    }

    /// Tells every rank, itself as well.
    pub fn put_all(&self, channel: Channel, epoch: u32) {
        for step in 1..=self.rank_count() {
            self.put(channel, (self.rank + step) % self.rank_count(), epoch);
        }
    }

    /// Waits until `sender` has signalled `epoch` to this rank.
    ///
    /// # Errors
    /// `Closed` naming the rank when it left or failed; `Io` naming it when it is silent for
    /// longer than the time-out.
    pub fn wait(&self, channel: Channel, sender: usize, epoch: u32) -> Result<()> {
        let word = self.word(channel, self.rank, sender);
        for _ in 0..SPINS {
            if is_reached(word, epoch) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let timeout_us = u64::try_from(self.timeout.as_micros()).unwrap_or(u64::MAX);
        let started_us = self.clock.now_us();
        loop {
            let state = self.state(sender);
            let found = word.load(Ordering::Acquire);
            if is_at_least(found, epoch) {
                return Ok(());
            }
            if state != State::Working {
                return Err(self.left(sender, channel, state));
            }
            let waited_us = self.clock.now_us().saturating_sub(started_us);
            if waited_us >= timeout_us {
                return Err(self.silent(sender, channel));
            }
            wait_while(word, found, NAP.min(Duration::from_micros(timeout_us - waited_us)));
        }
    }

    /// Waits until all ranks, itself as well, have signalled `epoch`.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_all(&self, channel: Channel, epoch: u32) -> Result<()> {
        for step in 0..self.rank_count() {
            self.wait(channel, (self.rank + step) % self.rank_count(), epoch)?;
        }
        Ok(())
    }

    /// Leaves together: tells all that this rank is done and waits until all are.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); this rank has left in any case.
    pub fn close(&self) -> Result<()> {
        self.put_all(Channel::Close, 1);
        let result = self.wait_all(Channel::Close, 1);
        self.set_state(State::Closed);
        result
    }

    /// Leaves alone and at once: ranks that wait for this one get an error. Never waits, so that
    /// destructors may call it.
    pub fn fail(&self) {
        self.set_state(State::Failed);
    }

    /// As [`fail`](Self::fail), because `lost`, a rank of another node, does not answer: those that
    /// wait for this rank hear of that one.
    pub fn fail_for(&self, lost: usize) {
        let word = self.heap.region(self.rank).word(LOST_AT);
        word.store(lost as u32 + 1, Ordering::Relaxed);
        self.fail();
    }

    fn word(
        &self,
        channel: Channel,
        receiver: usize,
        sender: usize,
    ) -> &std::sync::atomic::AtomicU32 {
        let line = 1 + channel as usize * self.rank_count() + sender;
        self.heap.region(receiver).word(line * LINE_BYTES)
    }

    fn state(&self, rank: usize) -> State {
        match self.heap.region(rank).word(0).load(Ordering::Acquire) {
            0 => State::Working,
            1 => State::Closed,
            _ => State::Failed,
        }
    }

    fn set_state(&self, state: State) {
        self.heap.region(self.rank).word(0).store(state as u32, Ordering::Release);
    }

    fn left(&self, sender: usize, channel: Channel, state: State) -> Error {
        let lost = self.heap.region(sender).word(LOST_AT).load(Ordering::Relaxed);
        let how = match (state, lost.checked_sub(1)) {
            (State::Closed, _) => "closed its exchange".to_owned(),
            (_, Some(lost)) => format!("lost rank {lost}, on another node,"),
            (_, None) => "failed".to_owned(),
        };
        let (sender, own) = (self.first_rank + sender, self.first_rank + self.rank);
        Error::new(ErrorKind::Closed, format!("rank {sender} {how} while rank {own} waits"))
            .with("rank", sender)
            .with("channel", format_args!("{channel:?}"))
            .with("remedy", "look at that rank's error, then start all ranks again")
    }

    fn silent(&self, sender: usize, channel: Channel) -> Error {
        let sender = self.first_rank + sender;
        Error::new(ErrorKind::Io, format!("rank {sender} did not answer in time"))
            .with("rank", sender)
            .with("waiting_rank", self.first_rank + self.rank)
            .with("channel", format_args!("{channel:?}"))
            .with("timeout_ms", self.timeout.as_millis())
            .with("remedy", "that rank was killed, or needs a longer time-out; restart all ranks")
    }
}

/// Returns the bytes of a pad, a multiple of its line.
#[must_use]
pub fn pad_bytes(rank_count: usize) -> usize {
    (1 + CHANNEL_COUNT * rank_count) * LINE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::LocalHeap;
    use tierbed_core::env::SystemClock;

    fn pads(timeout_ms: u64) -> [Pad; 2] {
        let heap: Arc<dyn SymmetricHeap> = Arc::new(LocalHeap::new(2, pad_bytes(2)).unwrap());
        [0, 1].map(|rank| {
            let clock = Arc::new(SystemClock::default());
            Pad::new(heap.clone(), rank, clock, Duration::from_millis(timeout_ms)).unwrap()
        })
    }

    #[test]
    fn a_signal_reaches_its_receiver_and_nobody_else() {
        let [a, b] = pads(5);
        a.put(Channel::Outputs, 1, 3);
        b.wait(Channel::Outputs, 0, 3).unwrap();
        b.wait(Channel::Outputs, 0, 2).unwrap();
        assert!(b.wait(Channel::Outputs, 0, 4).is_err());
        assert!(b.wait(Channel::Grads, 0, 1).is_err());
        assert!(a.wait(Channel::Outputs, 1, 1).is_err());
    }

    #[test]
    fn a_sleeping_rank_is_woken() {
        let [a, b] = pads(10_000);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| b.wait(Channel::Bags, 0, 1));
            std::thread::sleep(Duration::from_millis(30));
            a.put(Channel::Bags, 1, 1);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_silent_rank_and_a_rank_that_left_are_named() {
        let [a, b] = pads(10);
        let error = b.wait(Channel::Bags, 0, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("rank 0 did not answer"), "{error}");
        a.fail();
        let error = b.wait(Channel::Bags, 0, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("rank 0 failed"), "{error}");
    }

    #[test]
    fn what_was_signalled_before_leaving_counts() {
        let [a, b] = pads(10);
        a.put(Channel::Bags, 1, 1);
        a.fail();
        b.wait(Channel::Bags, 0, 1).unwrap();
    }

    #[test]
    fn ranks_leave_together() {
        let [a, b] = pads(10_000);
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| a.close());
            b.close().unwrap();
            closing.join().unwrap().unwrap();
        });
        let error = a.wait(Channel::Bags, 1, 1).unwrap_err();
        assert!(error.to_string().contains("closed its exchange"), "{error}");
        let [alone, _silent] = pads(5);
        assert!(alone.close().is_err());
    }
}
