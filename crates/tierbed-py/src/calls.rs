//! The order of a store's calls: who has it now, and updates that come later but belong here.
//!
//! A backward on a GPU returns before its gradient has arrived. Its update has a place in the
//! order of calls all the same: the backward reserves it, and calls made after it wait until a
//! worker has made the update. So a program sees the rows that it would see without a worker.
//!
//! ```text
//! backward: reserve ─┐                    next lookup: waits ─────────┐
//! worker:            └▶ gradient arrives ─▶ update ─▶ end(ticket) ────┴▶ reads stepped rows
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use pyo3::prelude::*;
use tierbed_core::{Error, ErrorKind, Result};

/// The calls of one store.
#[derive(Default)]
pub(crate) struct Calls {
    holder: Mutex<Option<ThreadId>>,
    reserved: Mutex<Reserved>,
    ended: Condvar,
    /// Whether a call has to look at `reserved`.
    is_expected: AtomicBool,
}

#[derive(Default)]
struct Reserved {
    last: u64,
    /// Ticket of the update that is to come.
    open: Option<u64>,
    /// Why the last one failed, until somebody is told.
    failure: Option<PyErr>,
}

/// The call that has the engine.
pub(crate) struct Holding<'a>(&'a Calls);

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        *locked(&self.0.holder) = None;
    }
}

// Every change of what these mutexes hold is one assignment.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Calls {
    /// Notes that this thread has the engine, until the result is dropped.
    pub(crate) fn hold(&self) -> Holding<'_> {
        *locked(&self.holder) = Some(std::thread::current().id());
        Holding(self)
    }

    /// Checks that this thread may wait for the engine.
    ///
    /// # Errors
    /// `Invalid` in a function that a call of the same store calls: it would wait for itself.
    pub(crate) fn check_free(&self) -> Result<()> {
        if *locked(&self.holder) != Some(std::thread::current().id()) {
            return Ok(());
        }
        Err(Error::invalid("the store is called by a function that the store itself calls").with(
            "remedy",
            "collect what the function of a scan is given, and call the store after the scan",
        ))
    }

    /// Tells whether an update is to come, or has failed: [`wait`](Self::wait) knows more.
    pub(crate) fn is_expected(&self) -> bool {
        self.is_expected.load(Ordering::Acquire)
    }

    /// Waits for the update that is to come; returns why it failed, once. Without the GIL.
    pub(crate) fn wait(&self) -> Option<PyErr> {
        let mut reserved = self.wait_for_end();
        self.is_expected.store(false, Ordering::Release);
        reserved.failure.take()
    }

    /// Reserves the next place for an update, whose ticket is returned. Without the GIL.
    ///
    /// Whoever reserves calls [`wait`](Self::wait) before, to hear of an earlier failure.
    pub(crate) fn reserve(&self) -> u64 {
        let mut reserved = self.wait_for_end();
        reserved.last += 1;
        reserved.open = Some(reserved.last);
        self.is_expected.store(true, Ordering::Release);
        reserved.last
    }

    /// Checks that `ticket` is the one whose update is to come.
    ///
    /// # Errors
    /// `Invalid` when it is not.
    pub(crate) fn check_ticket(&self, ticket: u64) -> Result<()> {
        match locked(&self.reserved).open {
            Some(open) if open == ticket => Ok(()),
            open => Err(Error::new(ErrorKind::Invalid, "no update was reserved by this ticket")
                .with("ticket", ticket)
                .with("reserved", open.map_or("none".to_owned(), |open| open.to_string()))),
        }
    }

    /// Ends a reservation: its update was made, or failed.
    ///
    /// # Errors
    /// As [`check_ticket`](Self::check_ticket).
    pub(crate) fn end(&self, ticket: u64, failure: Option<PyErr>) -> Result<()> {
        self.check_ticket(ticket)?;
        let mut reserved = locked(&self.reserved);
        reserved.open = None;
        // An earlier failure that nobody was told of is the cause of this one.
        if reserved.failure.is_none() {
            reserved.failure = failure;
        }
        self.ended.notify_all();
        Ok(())
    }

    fn wait_for_end(&self) -> MutexGuard<'_, Reserved> {
        let mut reserved = locked(&self.reserved);
        while reserved.open.is_some() {
            reserved = self.ended.wait(reserved).unwrap_or_else(PoisonError::into_inner);
        }
        reserved
    }
}
