//! Executor: a queue of jobs, and the threads that take all that wait as one batch.
//!
//! ```text
//! job ─▶ queue, by deadline ─▶ batch ─▶ each prepared alone ─▶ looked up together ─▶ each encoded
//! ```
//!
//! No request waits for company: a batch is what came while the threads were busy. At low load it
//! is one request. A job whose client has left, or whose time is over, is dropped without work.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tierbed_core::{Error, Result};

use crate::batch;
use crate::job::{Job, Work};
use crate::routes::Service;

/// Most bytes of bodies that are taken together; a larger body is taken alone. Small requests do
/// not wait until large ones are decoded, and a batch's memory stays bounded.
const BATCH_BYTES_MAX: u64 = 256 << 10;

/// The queue, and who works on it.
#[derive(Debug, Default)]
pub(crate) struct Executor {
    state: Mutex<State>,
    has_jobs: Condvar,
    thread_ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By deadline in microseconds, then by arrival.
    jobs: BTreeMap<(u64, u64), Job>,
    arrived: u64,
    /// Threads that wait for a job.
    idle_count: usize,
    thread_count: usize,
    is_closed: bool,
}

/// Counts a thread down, however it ends.
struct Ending(Arc<Executor>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.lock().thread_count -= 1;
        self.0.thread_ended.notify_all();
    }
}

impl Executor {
    /// Starts the threads that work for `service`; they end when the executor is closed.
    ///
    /// # Errors
    /// `Io` when a thread cannot be made; those that were end.
    pub(crate) fn start(service: &Arc<Service>, thread_count: usize) -> Result<()> {
        for _ in 0..thread_count {
            let (working, executor) = (Arc::clone(service), Arc::clone(&service.executor));
            executor.lock().thread_count += 1;
            let work = move || {
                let _ending = Ending(executor);
                // Let go of before the thread counts as ended: who waits for it may close files.
                let working = working;
                while let Some(jobs) = working.executor.take() {
                    batch::run(&working, jobs);
                }
            };
            let spawned = std::thread::Builder::new().name("tierbed-lookup".to_owned()).spawn(work);
            if let Err(cause) = spawned {
                service.executor.lock().thread_count -= 1;
                service.executor.close();
                return Err(Error::os("cannot start the server's threads", cause));
            }
        }
        Ok(())
    }

    /// Puts a job into the queue; a closed executor drops it.
    pub(crate) fn push(&self, deadline_us: u64, job: Job) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        state.arrived += 1;
        let number = state.arrived;
        state.jobs.insert((deadline_us, number), job);
        drop(state);
        self.has_jobs.notify_one();
    }

    /// Waits for jobs and takes those that belong together; `None` once closed.
    fn take(&self) -> Option<Vec<Job>> {
        let mut state = self.lock();
        state.idle_count += 1;
        while state.jobs.is_empty() && !state.is_closed {
            state = self.has_jobs.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.idle_count -= 1;
        if state.is_closed {
            return None;
        }
        Some(state.take())
    }

    /// Takes no more jobs, and drops those that wait.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let dropped = std::mem::take(&mut state.jobs);
        drop(state);
        drop(dropped);
        self.has_jobs.notify_all();
    }

    /// Waits until all threads have ended, at most `time`.
    pub(crate) fn wait(&self, time: Duration) {
        let waited =
            self.thread_ended.wait_timeout_while(self.lock(), time, |state| state.thread_count > 0);
        drop(waited);
    }

    // The queue and the counts are whole after every statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the jobs with the earliest deadlines: lookups together, up to this thread's share
    /// and the bytes of a batch, anything else alone.
    fn take(&mut self) -> Vec<Job> {
        // Threads that wait have been woken, and take theirs.
        let share = self.jobs.len().div_ceil(self.idle_count + 1);
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(first) = self.jobs.first_entry() {
            let job = first.get();
            let is_lookup = matches!(job.work, Work::Lookup(_));
            let is_more = taken.len() == share || bytes + job.body_bytes > BATCH_BYTES_MAX;
            if !taken.is_empty() && (is_more || !is_lookup) {
                break;
            }
            bytes += job.body_bytes;
            taken.push(first.remove());
            if !is_lookup {
                break;
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests;
