use tokio::sync::{oneshot, Semaphore};

use super::*;
use crate::answer::Refusal;
use crate::job::{Done, Made};

type Answer = oneshot::Receiver<std::result::Result<Made, Refusal>>;

fn job(route: &'static str, body_bytes: u64, work: Work) -> (Job, Answer) {
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let (answer, made) = oneshot::channel();
    (Job { route, queued_us: 0, body_bytes, work, done: Done { place, answer } }, made)
}

fn lookup(route: &'static str, body_bytes: u64) -> (Job, Answer) {
    job(route, body_bytes, Work::Lookup(Box::new(|_| Err(Refusal::left()))))
}

fn alone(route: &'static str) -> (Job, Answer) {
    job(route, 1, Work::Alone(Box::new(|_| Err(Refusal::left()))))
}

fn routes(jobs: Option<Vec<Job>>) -> Vec<&'static str> {
    jobs.unwrap().iter().map(|job| job.route).collect()
}

#[test]
fn those_who_wait_are_taken_together_earliest_deadline_first() {
    let executor = Executor::default();
    for (deadline_us, route) in [(30, "c"), (10, "a"), (30, "d"), (20, "b")] {
        executor.push(deadline_us, lookup(route, 1).0);
    }
    assert_eq!(routes(executor.take()), ["a", "b", "c", "d"]);
}

#[test]
fn predictions_and_large_bodies_are_taken_alone() {
    let executor = Executor::default();
    executor.push(1, lookup("a", 1).0);
    executor.push(2, alone("predict").0);
    executor.push(3, lookup("b", BATCH_BYTES_MAX - 1).0);
    executor.push(4, lookup("c", 1).0);
    executor.push(5, lookup("large", BATCH_BYTES_MAX + 1).0);
    let taken: Vec<_> = (0..4).map(|_| routes(executor.take())).collect();
    assert_eq!(taken, [vec!["a"], vec!["predict"], vec!["b", "c"], vec!["large"]]);
}

#[test]
fn threads_that_wait_get_their_share() {
    let mut state = State { idle_count: 2, ..State::default() };
    for number in 0..7 {
        state.jobs.insert((0, number), lookup("a", 1).0);
    }
    assert_eq!((state.take().len(), state.jobs.len()), (3, 4));
}

#[test]
fn a_closed_executor_drops_what_waits_and_what_comes() {
    let executor = Executor::default();
    let (first, mut waited) = lookup("a", 1);
    executor.push(1, first);
    executor.close();
    assert!(waited.try_recv().is_err(), "dropped without an answer");
    executor.push(2, lookup("b", 1).0);
    assert!(executor.take().is_none());
}
