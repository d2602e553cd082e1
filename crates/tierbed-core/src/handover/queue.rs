//! A queue of jobs for a pool of worker threads.
//!
//! ```text
//! caller  push ─▶ [job, job, ...] ─▶ take  workers
//!         try_push: only where there is room
//!         close ─▶ take returns None once the queue is empty: nothing pushed is lost
//! ```

use std::collections::VecDeque;
use std::sync::PoisonError;

use super::sync::{Condvar, Mutex, MutexGuard};

/// Joins one caller and many workers. See the module documentation.
#[derive(Debug)]
pub struct Queue<J> {
    state: Mutex<State<J>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<J> {
    jobs: VecDeque<J>,
    is_closed: bool,
}

impl<J> Default for Queue<J> {
    fn default() -> Self {
        let state = State { jobs: VecDeque::new(), is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<J> Queue<J> {
    // The state is whole after every statement, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job for the next free worker.
    pub fn push(&self, job: J) {
        self.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Adds a job unless `jobs_max` wait already; tells whether it did.
    pub fn try_push(&self, job: J, jobs_max: usize) -> bool {
        let mut state = self.lock();
        if state.jobs.len() >= jobs_max {
            return false;
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Takes a job if one waits.
    pub fn try_take(&self) -> Option<J> {
        self.lock().jobs.pop_front()
    }

    /// Tells the workers to go when nothing is left to do.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits for a job; `None` when the queue is closed and empty. Workers.
    pub fn take(&self) -> Option<J> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
