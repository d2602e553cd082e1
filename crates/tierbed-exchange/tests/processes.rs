//! Ranks as processes: they train together, and one that is killed is named to the other.
//!
//! The test starts itself again as rank 1, as the tests of kills do.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use common::{exchange, plan_of, Batch, TestRows, LIMITS};
use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::Result;
use tierbed_exchange::{Exchange, ExchangePlan, Layout, Sharding, ShmHeap, Wants};

/// What the child knows the memory by.
const TOKEN: u64 = 0x7157;
const HEAP: &str = "TIERBED_RANK_HEAP";
const STEPS: u64 = 3;

fn plan() -> ExchangePlan {
    plan_of(2, |rows, _| Sharding::Whole { rank: rows as usize % 2 })
}

fn batch(rank: u64, step: u64) -> Batch {
    let mut rng = SplitMix64::new(rank << 8 | step);
    Batch::draw(&mut rng, &[40, 7, 100, 40], 4, 3, false)
}

fn step(exchange: &mut Exchange, rows: &mut TestRows, step: u64) -> Result<Vec<f32>> {
    let batch = batch(exchange.rank() as u64, step);
    let wants = Wants { backward: true, weight_grads: false };
    let output = exchange.forward(&batch.bags(), wants, rows)?;
    let found = exchange.output(&output).to_vec();
    exchange.backward(output.step, &found, None, rows)?;
    Ok(found)
}

fn start_rank_one(heap: &ShmHeap, test: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(HEAP, heap.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Rank 1, in the process that was started for it: trains until it is told to leave, or killed.
fn be_rank_one(path: &Path, steps: u64) {
    let plan = plan();
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let heap = Arc::new(ShmHeap::open(path, 2, TOKEN).unwrap());
    let mut one = exchange(&plan, &layout, heap, 1, 60_000);
    let mut rows = TestRows::new(&plan, 1);
    for number in 0..steps {
        if step(&mut one, &mut rows, number).is_err() {
            return;
        }
    }
    one.close().unwrap();
}

fn heap_for(plan: &ExchangePlan) -> (Arc<ShmHeap>, Layout) {
    let layout = Layout::new(plan, LIMITS).unwrap();
    (Arc::new(ShmHeap::create(2, layout.region_bytes(), TOKEN).unwrap()), layout)
}

#[test]
fn two_processes_train_as_two_threads_do() {
    if let Some(path) = std::env::var_os(HEAP) {
        return be_rank_one(Path::new(&path), STEPS);
    }
    let plan = plan();
    let (heap, layout) = heap_for(&plan);
    let mut other = start_rank_one(&heap, "two_processes_train_as_two_threads_do");
    let mut zero = exchange(&plan, &layout, heap, 0, 60_000);
    let mut rows = TestRows::new(&plan, 0);
    let found: Vec<_> = (0..STEPS).map(|at| step(&mut zero, &mut rows, at).unwrap()).collect();
    zero.close().unwrap();
    assert!(other.wait().unwrap().success());

    let mut ranks = common::exchanges(&plan, &layout, 60_000);
    let (mut one, mut zero) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    std::thread::scope(|scope| {
        let mut of_one = TestRows::new(&plan, 1);
        scope.spawn(move || {
            for at in 0..STEPS {
                step(&mut one, &mut of_one, at).unwrap();
            }
        });
        let mut rows = TestRows::new(&plan, 0);
        for (at, found) in found.iter().enumerate() {
            assert_eq!(&step(&mut zero, &mut rows, at as u64).unwrap(), found, "step {at}");
        }
    });
}

#[test]
fn a_killed_rank_is_named_within_the_time_out() {
    if let Some(path) = std::env::var_os(HEAP) {
        return be_rank_one(Path::new(&path), u64::MAX);
    }
    let plan = plan();
    let (heap, layout) = heap_for(&plan);
    let mut other = start_rank_one(&heap, "a_killed_rank_is_named_within_the_time_out");
    // The first step waits for the other process to start; later ones have a short time-out.
    let timeout_ms = 2_000;
    let mut rows = TestRows::new(&plan, 0);
    let mut zero = exchange(&plan, &layout, heap, 0, 60_000);
    step(&mut zero, &mut rows, 0).unwrap();
    zero.set_timeout(std::time::Duration::from_millis(timeout_ms));
    other.kill().unwrap();
    other.wait().unwrap();
    let clock = SystemClock::default();
    let error = step(&mut zero, &mut rows, 1).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 did not answer"), "{error}");
    assert!(clock.now_us() < 20 * timeout_ms * 1_000);
}
