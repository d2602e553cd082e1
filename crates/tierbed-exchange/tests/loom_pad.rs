//! Every order of two ranks' steps: what a rank reads is what was written for that step.
//!
//! The model checker tries all interleavings and all values that the memory model allows, on
//! the very code of `protocol`. Two mutations show that it would notice: one buffer instead of
//! two, and a signal without release.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test's own words")]

use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicU32;
use loom::sync::Arc;
use loom::thread;
use tierbed_exchange::protocol::{is_reached, signal, Turns, Word};

/// Steps of a run; a writer of the last one could overwrite the first one's buffer.
const STEPS: u32 = 3;
const RANKS: usize = 2;

struct Shared(AtomicU32);

impl Word for Shared {
    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
}

struct Heap {
    /// `signals[receiver][sender]`.
    signals: [[Shared; RANKS]; RANKS],
    /// `buffers[receiver][turn]`, written by the other rank; relaxed, so that only signals order.
    buffers: [Vec<AtomicU32>; RANKS],
}

fn heap(buffer_count: usize) -> Heap {
    let word = || Shared(AtomicU32::new(0));
    let buffers = || (0..buffer_count).map(|_| AtomicU32::new(0)).collect();
    Heap { signals: [[word(), word()], [word(), word()]], buffers: [buffers(), buffers()] }
}

fn run_rank(heap: &Heap, rank: usize, turns: Turns, put: impl Fn(&Shared, u32)) {
    let peer = 1 - rank;
    for step in 1..=STEPS {
        let turn = turns.buffer(u64::from(step));
        heap.buffers[peer][turn].store(step, Ordering::Relaxed);
        put(&heap.signals[peer][rank], step);
        while !is_reached(&heap.signals[rank][peer], step) {
            thread::yield_now();
        }
        let found = heap.buffers[rank][turn].load(Ordering::Relaxed);
        assert_eq!(found, step, "a rank read another step's values");
    }
}

fn check(buffer_count: usize, put: impl Fn(&Shared, u32) + Copy + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let heap = Arc::new(heap(buffer_count));
        let turns = Turns::new(buffer_count);
        let other = heap.clone();
        let peer = thread::spawn(move || run_rank(&other, 1, turns, put));
        run_rank(&heap, 0, turns, put);
        peer.join().unwrap();
    });
}

#[test]
fn two_buffers_and_signals_give_every_step_its_values() {
    check(2, signal);
}

#[test]
#[should_panic(expected = "another step's values")]
fn one_buffer_is_overwritten_while_it_is_read() {
    check(1, signal);
}

#[test]
#[should_panic(expected = "another step's values")]
fn a_signal_without_release_lets_old_values_be_read() {
    check(2, |word, epoch| word.store(epoch, Ordering::Relaxed));
}
