//! Does a job come back from the background thread, whatever happens when? The protocol of
//! compaction (`tierbed-lsm`) and of the storage thread (`tierbed-train`).

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use common::{check_mistakes, in_many_orders, Case, Row};
use loom::thread;
use std::sync::Arc;

/// The desk under its own and its mistaken names.
trait AnyDesk: Default + Send + Sync + 'static {
    fn give(&self, row: Row);
    fn collect(&self) -> Option<Option<Row>>;
    fn wait(&self) -> Option<Row>;
    fn close(&self);
    fn serve(&self, work: impl FnMut(Row) -> Row);
}

macro_rules! desks {
    ($($module:ident)*) => {$(
        impl AnyDesk for tierbed_models::$module::Desk<Row, Row> {
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

desks! {
    desk desk_give_wakes_nobody desk_deliver_wakes_nobody desk_close_wakes_nobody
    desk_desert_wakes_nobody desk_without_last_word desk_sleeps_after_looking
    desk_wait_sees_the_end_first
}

fn bring(row: Row) -> Row {
    row.bring();
    row
}

fn start<D: AnyDesk>(work: fn(Row) -> Row) -> (Arc<D>, thread::JoinHandle<()>) {
    let desk = Arc::new(D::default());
    let there = Arc::clone(&desk);
    (desk, thread::spawn(move || there.serve(work)))
}

/// Two windows, as the storage thread brings them: each is there, and is read as it was brought.
fn windows_come_in_order<D: AnyDesk>() {
    let (desk, worker) = start::<D>(bring);
    let row = Row::new();
    for window in 1..=2 {
        desk.give(row.clone());
        let back = match desk.collect().unwrap() {
            Some(back) => back,
            None => desk.wait().unwrap(),
        };
        assert_eq!(back.version(), window);
    }
    desk.close();
    worker.join().unwrap();
}

/// A store may be closed while work is under way: nobody waits for ever, and what comes back was
/// done.
fn closing_lets_everyone_go<D: AnyDesk>() {
    let (desk, worker) = start::<D>(bring);
    desk.give(Row::new());
    desk.close();
    if let Some(row) = desk.wait() {
        assert_eq!(row.version(), 1);
        assert!(desk.wait().is_none(), "nothing comes twice");
    }
    worker.join().unwrap();
}

/// A closed desk with nothing on it.
fn an_idle_worker_goes<D: AnyDesk>() {
    let (desk, worker) = start::<D>(bring);
    desk.close();
    worker.join().unwrap();
    assert!(desk.wait().is_none());
}

/// Work that panics ends the worker; the caller must hear of it.
fn a_worker_that_died_is_missed<D: AnyDesk>() {
    let desk = Arc::new(D::default());
    let there = Arc::clone(&desk);
    let worker = thread::spawn(move || {
        let die = |_| std::panic::resume_unwind(Box::new("died"));
        let died = std::panic::AssertUnwindSafe(|| there.serve(die));
        assert!(std::panic::catch_unwind(died).is_err());
    });
    desk.give(Row::new());
    assert!(desk.wait().is_none());
    worker.join().unwrap();
}

/// The last thing a worker made counts, although it is gone.
fn the_last_result_is_not_lost<D: AnyDesk>() {
    let desk = Arc::new(D::default());
    let there = Arc::clone(&desk);
    let worker = thread::spawn(move || {
        there.serve(|row| {
            there.close();
            bring(row)
        });
    });
    desk.give(Row::new());
    assert_eq!(desk.wait().unwrap().version(), 1);
    worker.join().unwrap();
}

fn scenarios<D: AnyDesk>() -> [fn(); 5] {
    [
        windows_come_in_order::<D>,
        closing_lets_everyone_go::<D>,
        an_idle_worker_goes::<D>,
        a_worker_that_died_is_missed::<D>,
        the_last_result_is_not_lost::<D>,
    ]
}

type Right = tierbed_models::desk::Desk<Row, Row>;

#[test]
fn the_desk_holds_in_many_orders() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(4, scenario));
}

#[test]
#[ignore = "every order"]
fn the_desk_holds_in_every_order() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(20, scenario));
}

/// A caller that trains on without having the window back would read it before it was brought.
fn a_caller_that_does_not_wait() {
    let (desk, worker) = start::<Right>(bring);
    let row = Row::new();
    desk.give(row.clone());
    let _ = desk.collect();
    let version = row.version();
    desk.close();
    worker.join().unwrap();
    assert_eq!(version, 1);
}

#[test]
fn every_mistake_is_refused() {
    use tierbed_models as wrong;
    let cases: [Case<'_>; 9] = [
        ("right", &scenarios::<Right>()),
        ("caller that does not wait", &[a_caller_that_does_not_wait]),
        ("give", &scenarios::<wrong::desk_give_wakes_nobody::Desk<Row, Row>>()),
        ("deliver", &scenarios::<wrong::desk_deliver_wakes_nobody::Desk<Row, Row>>()),
        ("close", &scenarios::<wrong::desk_close_wakes_nobody::Desk<Row, Row>>()),
        ("desert", &scenarios::<wrong::desk_desert_wakes_nobody::Desk<Row, Row>>()),
        ("no last word", &scenarios::<wrong::desk_without_last_word::Desk<Row, Row>>()),
        ("late sleep", &scenarios::<wrong::desk_sleeps_after_looking::Desk<Row, Row>>()),
        ("end first", &scenarios::<wrong::desk_wait_sees_the_end_first::Desk<Row, Row>>()),
    ];
    check_mistakes("every_mistake_is_refused", &cases);
}
