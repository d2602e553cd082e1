//! Does a job come back from the background thread, whatever happens when? The protocol of
//! compaction (`tierbed-lsm`) and of the storage thread (`tierbed-train`).

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use common::{check_mistakes, in_many_orders, Case, Row};
use loom::thread;
use std::sync::Arc;

/// The rendezvous under its own and its mistaken names.
trait AnyRendezvous: Default + Send + Sync + 'static {
    fn give(&self, row: Row);
    fn collect(&self) -> Option<Option<Row>>;
    fn wait(&self) -> Option<Row>;
    fn close(&self);
    fn serve(&self, work: impl FnMut(Row) -> Row);
}

macro_rules! all_rendezvous {
    ($($module:ident)*) => {$(
        impl AnyRendezvous for tierbed_models::$module::Rendezvous<Row, Row> {
            fn give(&self, row: Row) {
                self.give(row);
            }
            fn collect(&self) -> Option<Option<Row>> {
                self.collect().ok()
            }
            fn wait(&self) -> Option<Row> {
                self.wait().ok()
            }
            fn close(&self) {
                self.close();
            }
            fn serve(&self, work: impl FnMut(Row) -> Row) {
                self.serve(work);
            }
        }
    )*};
}

all_rendezvous! {
    rendezvous rendezvous_give_wakes_nobody rendezvous_deliver_wakes_nobody
    rendezvous_close_wakes_nobody rendezvous_disconnect_wakes_nobody rendezvous_without_last_word
    rendezvous_sleeps_after_looking rendezvous_wait_sees_the_end_first
}

fn bring(row: Row) -> Row {
    row.bring();
    row
}

fn start<D: AnyRendezvous>(work: fn(Row) -> Row) -> (Arc<D>, thread::JoinHandle<()>) {
    let rendezvous = Arc::new(D::default());
    let there = Arc::clone(&rendezvous);
    (rendezvous, thread::spawn(move || there.serve(work)))
}

/// Two windows, as the storage thread brings them: each is there, and is read as it was brought.
fn windows_come_in_order<D: AnyRendezvous>() {
    let (rendezvous, worker) = start::<D>(bring);
    let row = Row::new();
    for window in 1..=2 {
        rendezvous.give(row.clone());
        let back = match rendezvous.collect().unwrap() {
            Some(back) => back,
            None => rendezvous.wait().unwrap(),
        };
        assert_eq!(back.version(), window);
    }
    rendezvous.close();
    worker.join().unwrap();
}

/// A store may be closed while work is under way: nobody waits for ever, and what comes back was
/// done.
fn closing_lets_everyone_go<D: AnyRendezvous>() {
    let (rendezvous, worker) = start::<D>(bring);
    rendezvous.give(Row::new());
    rendezvous.close();
    if let Some(row) = rendezvous.wait() {
        assert_eq!(row.version(), 1);
        assert!(rendezvous.wait().is_none(), "nothing comes twice");
    }
    worker.join().unwrap();
}

/// A closed rendezvous with nothing on it.
fn an_idle_worker_goes<D: AnyRendezvous>() {
    let (rendezvous, worker) = start::<D>(bring);
    rendezvous.close();
    worker.join().unwrap();
    assert!(rendezvous.wait().is_none());
}

/// Work that panics ends the worker; the caller must hear of it.
fn a_worker_that_died_is_missed<D: AnyRendezvous>() {
    let rendezvous = Arc::new(D::default());
    let there = Arc::clone(&rendezvous);
    let worker = thread::spawn(move || {
        let die = |_| std::panic::resume_unwind(Box::new("died"));
        let died = std::panic::AssertUnwindSafe(|| there.serve(die));
        assert!(std::panic::catch_unwind(died).is_err());
    });
    rendezvous.give(Row::new());
    assert!(rendezvous.wait().is_none());
    worker.join().unwrap();
}

/// The last thing a worker made counts, although it is gone.
fn the_last_result_is_not_lost<D: AnyRendezvous>() {
    let rendezvous = Arc::new(D::default());
    let there = Arc::clone(&rendezvous);
    let worker = thread::spawn(move || {
        there.serve(|row| {
            there.close();
            bring(row)
        });
    });
    rendezvous.give(Row::new());
    assert_eq!(rendezvous.wait().unwrap().version(), 1);
    worker.join().unwrap();
}

fn scenarios<D: AnyRendezvous>() -> [fn(); 5] {
    [
        windows_come_in_order::<D>,
        closing_lets_everyone_go::<D>,
        an_idle_worker_goes::<D>,
        a_worker_that_died_is_missed::<D>,
        the_last_result_is_not_lost::<D>,
    ]
}

type Right = tierbed_models::rendezvous::Rendezvous<Row, Row>;

#[test]
fn the_rendezvous_holds_in_many_orders() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(4, scenario));
}

#[test]
#[ignore = "every order"]
fn the_rendezvous_holds_in_every_order() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(20, scenario));
}

/// A caller that trains on without having the window back would read it before it was brought.
fn a_caller_that_does_not_wait() {
    let (rendezvous, worker) = start::<Right>(bring);
    let row = Row::new();
    rendezvous.give(row.clone());
    let _ = rendezvous.collect();
    let version = row.version();
    rendezvous.close();
    worker.join().unwrap();
    assert_eq!(version, 1);
}

#[test]
fn every_mistake_is_refused() {
    use tierbed_models as wrong;
    let cases: [Case<'_>; 9] = [
        ("right", &scenarios::<Right>()),
        ("caller that does not wait", &[a_caller_that_does_not_wait]),
        ("give", &scenarios::<wrong::rendezvous_give_wakes_nobody::Rendezvous<Row, Row>>()),
        ("deliver", &scenarios::<wrong::rendezvous_deliver_wakes_nobody::Rendezvous<Row, Row>>()),
        ("close", &scenarios::<wrong::rendezvous_close_wakes_nobody::Rendezvous<Row, Row>>()),
        (
            "disconnect",
            &scenarios::<wrong::rendezvous_disconnect_wakes_nobody::Rendezvous<Row, Row>>(),
        ),
        ("no last word", &scenarios::<wrong::rendezvous_without_last_word::Rendezvous<Row, Row>>()),
        (
            "late sleep",
            &scenarios::<wrong::rendezvous_sleeps_after_looking::Rendezvous<Row, Row>>(),
        ),
        (
            "end first",
            &scenarios::<wrong::rendezvous_wait_sees_the_end_first::Rendezvous<Row, Row>>(),
        ),
    ];
    check_mistakes("every_mistake_is_refused", &cases);
}
