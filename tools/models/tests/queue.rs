//! Does the prefetch of a window arrive, whatever happens when? The pool of I/O threads takes
//! requests from a queue and sends each back when its bytes are there.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use common::{check_mistakes, in_many_orders, Case, Row};
use loom::sync::mpsc::{channel, Receiver};
use loom::thread;
use std::sync::Arc;

/// The queue under its own and its mistaken names.
trait AnyQueue: Default + Send + Sync + 'static {
    fn push(&self, row: Row);
    fn close(&self);
    fn take(&self) -> Option<Row>;
}

macro_rules! queues {
    ($($module:ident)*) => {$(
        impl AnyQueue for tierbed_models::$module::Queue<Row> {
            fn push(&self, row: Row) {
                self.push(row);
            }
            fn close(&self) {
                self.close();
            }
            fn take(&self) -> Option<Row> {
                self.take()
            }
        }
    )*};
}

queues! {
    queue queue_push_wakes_nobody queue_close_wakes_nobody queue_close_wakes_one
    queue_closes_with_work_left queue_sleeps_after_looking
}

/// Starts `count` I/O threads; what they read comes back by the receiver.
fn start<Q: AnyQueue>(count: usize) -> (Arc<Q>, Receiver<Row>, Vec<thread::JoinHandle<()>>) {
    let queue = Arc::new(Q::default());
    let (done, finished) = channel();
    let serve = |_| {
        let (queue, done) = (Arc::clone(&queue), done.clone());
        thread::spawn(move || {
            while let Some(row) = queue.take() {
                row.bring();
                done.send(row).unwrap();
            }
        })
    };
    let threads = (0..count).map(serve).collect();
    (queue, finished, threads)
}

/// Every row of a window arrives once, and is read as it was brought.
fn a_window_arrives<Q: AnyQueue>() {
    let (queue, finished, threads) = start::<Q>(2);
    for _ in 0..2 {
        queue.push(Row::new());
    }
    for _ in 0..2 {
        assert_eq!(finished.recv().unwrap().version(), 1);
    }
    queue.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A row that is asked for again goes and comes as the one it is.
fn a_row_comes_again<Q: AnyQueue>() {
    let (queue, finished, threads) = start::<Q>(1);
    let mut row = Row::new();
    for version in 1..=2 {
        queue.push(row);
        row = finished.recv().unwrap();
        assert_eq!(row.version(), version);
    }
    queue.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Writes that were asked for are done although the engine is dropped.
fn nothing_pushed_is_lost<Q: AnyQueue>() {
    let (queue, finished, threads) = start::<Q>(1);
    let row = Row::new();
    queue.push(row.clone());
    queue.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(row.version(), 1);
    finished.recv().unwrap();
}

/// Threads with nothing to do go, all of them.
fn idle_threads_go<Q: AnyQueue>() {
    let (queue, _finished, threads) = start::<Q>(2);
    queue.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn scenarios<Q: AnyQueue>() -> [fn(); 4] {
    [
        a_window_arrives::<Q>,
        a_row_comes_again::<Q>,
        nothing_pushed_is_lost::<Q>,
        idle_threads_go::<Q>,
    ]
}

type Right = tierbed_models::queue::Queue<Row>;

#[test]
fn the_queue_holds_in_many_orders() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(2, scenario));
}

#[test]
#[ignore = "many more orders: seconds"]
fn the_queue_holds_in_many_more_orders() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(4, scenario));
}

#[test]
fn every_mistake_is_refused() {
    use tierbed_models as wrong;
    let cases: [Case<'_>; 6] = [
        ("right", &scenarios::<Right>()),
        ("push", &scenarios::<wrong::queue_push_wakes_nobody::Queue<Row>>()),
        ("close", &scenarios::<wrong::queue_close_wakes_nobody::Queue<Row>>()),
        ("close wakes one", &scenarios::<wrong::queue_close_wakes_one::Queue<Row>>()),
        ("closes early", &scenarios::<wrong::queue_closes_with_work_left::Queue<Row>>()),
        ("late sleep", &scenarios::<wrong::queue_sleeps_after_looking::Queue<Row>>()),
    ];
    check_mistakes("every_mistake_is_refused", &cases);
}
