use tierbed_core::env::ManualClock;
use tokio::sync::{oneshot, Semaphore};

use super::*;
use crate::body::{Buffers, Held};
use crate::generation::Serving;
use crate::job::{Done, Made, Stage, Waits};
use crate::spans::Steps;

type Answer = oneshot::Receiver<std::result::Result<Made, Refusal>>;

fn job(route: &'static str, body_bytes: u64, work: Work) -> (Job, Answer) {
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let (answer, made) = oneshot::channel();
    let (steps, done) = (Steps::default(), Done { place, answer });
    let (deadline_us, generation) = (u64::MAX, None);
    (Job { route, queued_us: 0, body_bytes, deadline_us, generation, work, steps, done }, made)
}

fn lookup(route: &'static str, body_bytes: u64) -> (Job, Answer) {
    let stage = Stage::Received(Buffers::new(1).hold_nothing());
    let left = |_: &Serving<'_>, _: Held| Err(Refusal::left());
    job(route, body_bytes, Work::Lookup(Waits::new(stage, left)))
}

fn prediction(route: &'static str) -> (Job, Answer) {
    let stage = Stage::Received(Buffers::new(1).hold_nothing());
    let left = |_: &Serving<'_>, _: Held| Err(Refusal::left());
    job(route, 1, Work::Prediction(Waits::new(stage, left)))
}

fn routes(jobs: Option<Vec<Job>>) -> Vec<&'static str> {
    jobs.unwrap().iter().map(|job| job.route).collect()
}

/// An executor of one thread, which the test is.
fn executor() -> (Executor, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let rule = Rule { queue_us_max: 1_000, requests_max: 100 };
    let executor = Executor::new(&(Arc::clone(&clock) as Arc<dyn Clock>), rule);
    executor.lock().count_in();
    (executor, clock)
}

fn offer(deadline_us: u64) -> Offer {
    Offer { deadline_us, priority: Priority::High, request_count: 0 }
}

#[test]
fn those_who_wait_are_taken_together_earliest_deadline_first() {
    let (executor, _) = executor();
    for (deadline_us, route) in [(30, "c"), (10, "a"), (30, "d"), (20, "b")] {
        executor.push(offer(deadline_us), lookup(route, 1).0).unwrap();
    }
    assert_eq!(routes(executor.take(0)), ["a", "b", "c", "d"]);
}

#[test]
fn lookups_predictions_and_large_bodies_are_taken_apart() {
    let (executor, _) = executor();
    executor.push(offer(1), lookup("a", 1).0).unwrap();
    executor.push(offer(2), prediction("predict").0).unwrap();
    executor.push(offer(2), prediction("predict").0).unwrap();
    executor.push(offer(3), lookup("b", BATCH_BYTES_MAX - 1).0).unwrap();
    executor.push(offer(4), lookup("c", 1).0).unwrap();
    executor.push(offer(5), lookup("large", BATCH_BYTES_MAX + 1).0).unwrap();
    let taken: Vec<_> = (0..4).map(|_| routes(executor.take(0))).collect();
    assert_eq!(taken, [vec!["a"], vec!["predict"; 2], vec!["b", "c"], vec!["large"]]);
}

#[test]
fn threads_that_wait_get_their_share() {
    let (executor, _) = executor();
    for _ in 0..7 {
        executor.push(offer(9), lookup("a", 1).0).unwrap();
    }
    let mut state = executor.lock();
    state.idle_count = 2;
    assert_eq!((state.take(0, 0).len(), state.jobs.len()), (3, 4));
}

#[test]
fn a_closed_executor_drops_what_waits_and_what_comes() {
    let (executor, _) = executor();
    let (first, mut waited) = lookup("a", 1);
    executor.push(offer(1), first).unwrap();
    executor.close();
    assert!(waited.try_recv().is_err(), "dropped without an answer");
    executor.push(offer(2), lookup("b", 1).0).unwrap();
    assert!(executor.take(0).is_none());
}

#[test]
fn expired_requests_do_no_work() {
    let (executor, clock) = executor();
    let (job, mut answer) = lookup("expired", 1);
    executor.push(offer(10), job).unwrap();
    executor.push(offer(30), lookup("in time", 1).0).unwrap();
    clock.advance_us(20);
    assert_eq!(routes(executor.take(0)), ["in time"]);
    let refusal = answer.try_recv().unwrap().unwrap_err();
    assert_eq!((refusal.reason(), executor.dropped.get()), (Some("deadline"), 1));
    assert_eq!(executor.push(offer(20), lookup("late", 1).0), Err(Verdict::Late));
}

#[test]
fn a_client_that_hangs_up_is_forgotten() {
    let (executor, _) = executor();
    let place = executor.push(offer(10), lookup("left", 1).0).unwrap();
    executor.push(offer(20), lookup("stays", 1).0).unwrap();
    executor.forget(place);
    executor.forget(place);
    assert_eq!(executor.dropped.get(), 1);
    assert_eq!(executor.queue().request_count, 1);
    assert_eq!(routes(executor.take(0)), ["stays"]);
    assert_eq!(executor.lock().queued.lookups, 0);
}

#[test]
fn requests_that_would_wait_too_long_are_refused() {
    let (executor, clock) = executor();
    executor.push(offer(1 << 40), prediction("predict").0).unwrap();
    executor.push(offer(1 << 41), lookup("a", 1).0).unwrap();
    assert_eq!(routes(executor.take(0)), ["predict"]);
    clock.advance_us(600);
    // Ends the prediction, and begins the lookup, of whose pace nothing is known.
    assert_eq!(routes(executor.take(0)), ["a"]);
    for _ in 0..2 {
        executor.push(offer(1 << 40), prediction("predict").0).unwrap();
    }
    assert_eq!(executor.queue().wait_us, 1_200);
    assert_eq!(executor.push(offer(1 << 40), lookup("b", 1).0), Err(Verdict::Slow));
    assert_eq!(routes(executor.take(0)), ["predict"; 2]);
    clock.advance_us(200);
    assert_eq!(executor.queue().wait_us, 1_000);
    executor.push(offer(1 << 40), lookup("b", 1).0).unwrap();
    assert_eq!(executor.push(offer(1_400), lookup("c", 1).0), Err(Verdict::Slow));
}

#[test]
fn a_batch_ends_before_its_first_deadline() {
    let (executor, clock) = executor();
    executor.push(offer(1 << 40), lookup("a", 1).0).unwrap();
    assert_eq!(routes(executor.take(0)), ["a"]);
    clock.advance_us(100);
    for (deadline_us, route) in [(310, "b"), (1 << 40, "c"), (1 << 40, "d")] {
        executor.push(offer(deadline_us), lookup(route, 1).0).unwrap();
    }
    // 100 us each: two end before the first must be answered.
    assert_eq!(routes(executor.take(0)), ["b", "c"]);
    assert_eq!(routes(executor.take(0)), ["d"]);
}
