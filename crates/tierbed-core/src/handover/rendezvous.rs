//! A rendezvous that gives one job at a time to a background thread and takes back its result.
//!
//! It has room for one job and one result. A thread that waits sleeps on a condition variable and
//! is woken by what it waits for.
//!
//! ```text
//! caller   give ─▶ [job] ─▶ serve   worker
//!          collect, wait ◀─ [done] ◀──┘
//!          close ─▶ serve returns; a worker that ends, however it ends, disconnects
//! ```

use std::sync::PoisonError;

use super::sync::{Condvar, Mutex, MutexGuard};

/// Joins one caller and one worker. See the module documentation.
#[derive(Debug)]
pub struct Rendezvous<J, D> {
    state: Mutex<State<J, D>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<J, D> {
    job: Option<J>,
    done: Option<D>,
    is_closed: bool,
    is_disconnected: bool,
}

/// The worker is gone: it panicked, or the rendezvous was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disconnected;

impl<J, D> Default for Rendezvous<J, D> {
    fn default() -> Self {
        let state = State { job: None, done: None, is_closed: false, is_disconnected: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

/// Says so when the worker ends, however it ends.
struct LastWord<'a, J, D>(&'a Rendezvous<J, D>);

impl<J, D> Drop for LastWord<'_, J, D> {
    fn drop(&mut self) {
        self.0.disconnect();
    }
}

impl<J, D> Rendezvous<J, D> {
    /// Builds an empty rendezvous.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    // The state is whole after every statement, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State<J, D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a job over. Caller; only when nothing is under way.
    ///
    /// # Panics
    /// When a job or a result lies there already.
    pub fn give(&self, job: J) {
        let mut state = self.lock();
        assert!(state.job.is_none() && state.done.is_none(), "one job at a time");
        state.job = Some(job);
        drop(state);
        self.changed.notify_all();
    }

    /// Does jobs until the rendezvous is closed. The worker's whole life.
    pub fn serve(&self, mut work: impl FnMut(J) -> D) {
        let last_word = LastWord(self);
        while let Some(job) = self.take() {
            self.deliver(work(job));
        }
        drop(last_word);
    }

    // Waits for a job; `None` when the rendezvous is closed.
    fn take(&self) -> Option<J> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.job.take() {
                return Some(job);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn deliver(&self, done: D) {
        self.lock().done = Some(done);
        self.changed.notify_all();
    }

    /// Takes the result if there is one; never waits. Caller.
    ///
    /// # Errors
    /// [`Disconnected`] when no result will ever come.
    pub fn collect(&self) -> Result<Option<D>, Disconnected> {
        let mut state = self.lock();
        match state.done.take() {
            None if state.is_disconnected => Err(Disconnected),
            done => Ok(done),
        }
    }

    /// Waits for the result of the job given last. Caller.
    ///
    /// # Errors
    /// [`Disconnected`] when no result will ever come.
    pub fn wait(&self) -> Result<D, Disconnected> {
        let mut state = self.lock();
        loop {
            if let Some(done) = state.done.take() {
                return Ok(done);
            }
            if state.is_disconnected {
                return Err(Disconnected);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells the worker to go; a job it has not taken yet is not done. Caller.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    // Wakes the caller: there is no worker any more.
    fn disconnect(&self) {
        self.lock().is_disconnected = true;
        self.changed.notify_all();
    }
}
