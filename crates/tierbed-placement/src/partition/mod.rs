//! Partitioners: one page per row, each a [`Placement`] without replicas.

mod bisect;
pub(crate) mod grow;
pub(crate) mod order;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::{Placement, QueryLog};

pub use bisect::{
    bisect, bisect_evenly, bisect_resumable, order_of_parts, BisectionOptions, ExchangeRule,
    LevelReport, Subtree,
};
pub(crate) use bisect::{rows_of_parts, split_evenly};
pub use grow::{grow, GrowthOptions, Way};
pub use order::{by_frequency, random};

/// Does every job on one of `thread_count` threads; results are in the order of jobs.
pub(crate) fn parallel<J: Send, T: Send>(
    jobs: Vec<J>,
    thread_count: usize,
    work: impl Fn(J) -> T + Sync,
) -> Vec<T> {
    let slots: Vec<Mutex<(Option<J>, Option<T>)>> =
        jobs.into_iter().map(|job| Mutex::new((Some(job), None))).collect();
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(slot) = slots.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.1 = slot.0.take().map(&work);
        }
    };
    thread::scope(|scope| {
        for _ in 1..thread_count.min(slots.len()) {
            scope.spawn(run);
        }
        run();
    });
    let slots =
        slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
    slots.filter_map(|slot| slot.1).collect()
}
