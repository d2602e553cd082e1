//! Failures without each part of the protocol, and errors when a rank fails.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{exchanges, plan_of, Batch, TestRows, LIMITS};
use tierbed_core::env::{SplitMix64, SystemClock};
use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_exchange::pad::pad_bytes;
use tierbed_exchange::protocol::Turns;
use tierbed_exchange::{
    Channel, Layout, Limits, LocalHeap, LookupRows, Pad, Sharding, SymmetricHeap, Wants,
};
use tierbed_kernels::Destination;

const ONLY_LOOK: Wants = Wants { backward: false, weight_grads: false };
const TRAIN: Wants = Wants { backward: true, weight_grads: false };
const ROW_COUNTS: [u64; 4] = [40, 7, 100, 40];

fn whole(ranks: usize) -> impl Fn(u64, usize) -> Sharding {
    move |rows, _| Sharding::Whole { rank: rows as usize % ranks }
}

/// A fast rank writes two steps ahead of a slow reader, as far as signals allow.
fn read_slowly(turns: Turns) -> u32 {
    let buffer = pad_bytes(2);
    let bytes = buffer + 4 * turns.count();
    let heap: Arc<dyn SymmetricHeap> = Arc::new(LocalHeap::new(2, bytes).unwrap());
    let pad = |rank| {
        let clock = Arc::new(SystemClock::default());
        Pad::new(heap.clone(), rank, clock, Duration::from_millis(100)).unwrap()
    };
    let (fast, slow) = (pad(0), pad(1));
    for step in 1..=2 {
        let at = buffer + 4 * turns.buffer(u64::from(step));
        heap.region(1).writer().values(at, 1).fill(step);
        fast.put(Channel::Outputs, 1, step);
        if step == 1 {
            slow.put(Channel::Outputs, 0, step);
            fast.wait(Channel::Outputs, 1, step).unwrap();
        }
    }
    slow.wait(Channel::Outputs, 0, 1).unwrap();
    heap.region(1).read::<u32>(buffer + 4 * turns.buffer(1), 1)[0]
}

#[test]
fn one_buffer_is_overwritten_by_a_rank_that_is_ahead_and_two_are_not() {
    assert_eq!(read_slowly(Turns::new(2)), 1);
    assert_eq!(read_slowly(Turns::new(1)), 2);
}

struct Unreadable;

impl LookupRows for Unreadable {
    fn lookup(&mut self, _: usize, _: &Bags<'_>, _: &mut impl Destination) -> Result<()> {
        Err(Error::corruption("page checksum mismatch"))
    }
}

/// An error of one rank's store must not leave the others waiting.
#[test]
fn a_rank_that_fails_is_named_to_the_others_at_once() {
    let plan = plan_of(2, whole(2));
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let [mut failing, mut other] = <[_; 2]>::try_from(exchanges(&plan, &layout, 60_000)).unwrap();
    let batch = Batch::draw(&mut SplitMix64::new(1), &ROW_COUNTS, 3, 3, false);
    let mut rows = TestRows::new(&plan, 1);
    std::thread::scope(|scope| {
        let bags = batch.bags();
        let thread = scope.spawn(move || {
            let error = failing.forward(&bags, ONLY_LOOK, &mut Unreadable).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
            let error = failing.forward(&bags, ONLY_LOOK, &mut Unreadable).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned);
        });
        let error = other.forward(&batch.bags(), ONLY_LOOK, &mut rows).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().starts_with("rank 0 failed"), "{error}");
        thread.join().unwrap();
    });
}

#[test]
fn a_rank_that_stays_away_is_named_after_the_time_out() {
    let plan = plan_of(2, whole(2));
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let mut ranks = exchanges(&plan, &layout, 30);
    let batch = Batch::draw(&mut SplitMix64::new(1), &ROW_COUNTS, 3, 3, false);
    let mut rows = TestRows::new(&plan, 1);
    let error = ranks[1].forward(&batch.bags(), ONLY_LOOK, &mut rows).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 did not answer"), "{error}");
    // Rank 0 comes late, and learns that nobody waits any more.
    let mut rows = TestRows::new(&plan, 0);
    let error = ranks[0].forward(&batch.bags(), ONLY_LOOK, &mut rows).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 failed"), "{error}");
}

#[test]
fn a_bad_batch_changes_nothing_and_may_be_mended() {
    let plan = plan_of(1, whole(1));
    let layout = Layout::new(&plan, Limits { samples_max: 4, indices_max: 64 }).unwrap();
    let mut alone = exchanges(&plan, &layout, 1_000).remove(0);
    let mut rows = TestRows::new(&plan, 0);
    let mut rng = SplitMix64::new(1);
    let good = Batch::draw(&mut rng, &ROW_COUNTS, 3, 3, false);
    let long = Batch::draw(&mut rng, &ROW_COUNTS, 5, 3, false);
    let mut outside = good.clone();
    outside.indices[0] = 40;
    let narrow = Batch::draw(&mut rng, &[40, 7, 100], 3, 3, false);
    for (bad, what) in [(long, "larger"), (outside, "out of range"), (narrow, "features")] {
        let error = alone.forward(&bad.bags(), TRAIN, &mut rows).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(what), "{error}");
    }
    let output = alone.forward(&good.bags(), TRAIN, &mut rows).unwrap();
    let grad = vec![0.0; 3 * plan.output_dim()];
    let short = alone.backward(output.step, &grad[1..], None, &mut rows);
    assert_eq!(short.unwrap_err().kind(), ErrorKind::Invalid);
    alone.backward(output.step, &grad, None, &mut rows).unwrap();
    let again = alone.backward(output.step, &grad, None, &mut rows).unwrap_err();
    assert!(again.to_string().contains("not waiting"), "{again}");
}

#[test]
fn ranks_with_different_plans_are_told() {
    let plan = plan_of(2, whole(2));
    let other = plan_of(2, |_, _| Sharding::Whole { rank: 0 });
    let layout = Layout::new(&other, LIMITS).unwrap();
    let heap: Arc<dyn SymmetricHeap> =
        Arc::new(LocalHeap::new(2, layout.region_bytes() * 2).unwrap());
    let batch = Batch::draw(&mut SplitMix64::new(1), &ROW_COUNTS, 3, 3, false);
    std::thread::scope(|scope| {
        for (rank, plan) in [plan, other].into_iter().enumerate() {
            let (heap, batch, layout) = (heap.clone(), &batch, &layout);
            scope.spawn(move || {
                let mut rows = TestRows::new(&plan, rank);
                let mut exchange = common::exchange(&plan, layout, heap, rank, 20_000);
                let error = exchange.forward(&batch.bags(), ONLY_LOOK, &mut rows).unwrap_err();
                let told = error.to_string();
                assert!(told.contains("another plan") || told.contains("failed"), "{told}");
            });
        }
    });
}
