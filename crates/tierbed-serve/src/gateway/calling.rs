//! What a lookup elsewhere knows of the batch that it is part of, on the thread of the batch.
//!
//! Lookups go through crates that know nothing of servers, so the time that a batch has, and how
//! many rows had no answer, go around them.

use std::cell::Cell;

thread_local! {
    /// When the last request of the batch must be answered.
    static DEADLINE_US: Cell<Option<u64>> = const { Cell::new(None) };
    /// Rows for which initial values stood.
    static DEFAULT_ROWS: Cell<u64> = const { Cell::new(0) };
}

/// The time of a batch, until dropped.
#[derive(Debug)]
pub(crate) struct Time {
    before: Option<u64>,
}

impl Time {
    /// Gives what this thread does until then, in microseconds of the server's clock.
    pub(crate) fn until(deadline_us: Option<u64>) -> Self {
        Self { before: DEADLINE_US.replace(deadline_us) }
    }

    /// Returns when the work of this thread must be done, where that is known.
    pub(super) fn deadline_us() -> Option<u64> {
        DEADLINE_US.get()
    }
}

impl Drop for Time {
    fn drop(&mut self) {
        DEADLINE_US.set(self.before);
    }
}

/// Counts the rows of lookups in `work` for which initial values stood.
pub(crate) fn counted<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = DEFAULT_ROWS.replace(0);
    let done = work();
    (done, DEFAULT_ROWS.replace(before))
}

/// Notes rows for which initial values stand.
pub(super) fn stand_in(rows: u64) {
    DEFAULT_ROWS.set(DEFAULT_ROWS.get() + rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_its_own_time_and_count() {
        let time = Time::until(Some(7));
        assert_eq!(Time::deadline_us(), Some(7));
        let ((), inner) = counted(|| stand_in(2));
        let (nested, outer) = counted(|| {
            stand_in(1);
            counted(|| stand_in(5)).1
        });
        assert_eq!((inner, nested, outer), (2, 5, 1));
        drop(time);
        assert_eq!(Time::deadline_us(), None);
    }
}
