//! Executor: a queue of jobs, and the threads that take all that wait as one batch.
//!
//! ```text
//! job ─▶ queue, by deadline ─▶ batch ─▶ each prepared alone ─▶ looked up together ─▶ each encoded
//! ```
//!
//! No request waits for company: a batch is what came while the threads were busy. At low load it
//! is one request. [`crate::admission`] tells who may wait. A job whose client has left leaves the
//! queue; one whose time is over is answered without work.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tierbed_core::env::Clock;
use tierbed_core::{Error, Result};

use crate::admission::{admit, cost, wait_us, Arrival, Busy, Found, Pace, Priority, Rule, Verdict};
use crate::answer::Refusal;
use crate::batch;
use crate::job::{Job, Work};
use crate::routes::Service;

/// Most bytes of bodies that are taken together; a larger body is taken alone. Small requests do
/// not wait until large ones are decoded, and a batch's memory stays bounded.
const BATCH_BYTES_MAX: u64 = 256 << 10;

/// The queue, and who works on it.
#[derive(Debug)]
pub(crate) struct Executor {
    clock: Arc<dyn Clock>,
    rule: Rule,
    state: Mutex<State>,
    has_jobs: Condvar,
    thread_ended: Condvar,
    /// Jobs that left the queue without work.
    pub(crate) dropped: Counter,
}

/// Where a job stands in the queue: by deadline in microseconds, then by arrival.
pub(crate) type Ticket = (u64, u64);

/// What a job says of itself when it comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) deadline_us: u64,
    pub(crate) priority: Priority,
    /// Other requests that wait or are worked on.
    pub(crate) request_count: usize,
}

#[derive(Debug, Default)]
struct State {
    jobs: BTreeMap<Ticket, Job>,
    arrived: u64,
    /// Cost of the jobs that wait.
    queued: Costs,
    paces: Paces,
    /// What each thread works on.
    tasks: Vec<Option<Task>>,
    /// Threads that wait for a job.
    idle_count: usize,
    thread_count: usize,
    is_closed: bool,
}

/// Costs of lookups, and of predictions: they have paces of their own.
#[derive(Debug, Clone, Copy, Default)]
struct Costs {
    lookups: u64,
    predictions: u64,
}

#[derive(Debug, Default)]
struct Paces {
    lookups: Pace,
    predictions: Pace,
}

#[derive(Debug, Clone, Copy)]
struct Task {
    busy: Busy,
    costs: Costs,
}

impl Costs {
    fn of(&mut self, job: &Job) -> &mut u64 {
        match job.work {
            Work::Lookup(_) => &mut self.lookups,
            Work::Prediction(_) => &mut self.predictions,
        }
    }

    fn add(&mut self, job: &Job) {
        *self.of(job) += cost(job.body_bytes);
    }

    fn take(&mut self, job: &Job) {
        let of = self.of(job);
        let Some(left) = of.checked_sub(cost(job.body_bytes)) else {
            panic!("{job:?} was not counted when it came");
        };
        *of = left;
    }
}

impl Paces {
    fn predict_us(&self, costs: Costs) -> u64 {
        let Costs { lookups, predictions } = costs;
        let lookups_us = self.lookups.predict_us(lookups);
        lookups_us.saturating_add(self.predictions.predict_us(predictions))
    }

    /// Learns from a thread's work, which is of one kind.
    fn learn(&mut self, us: u64, costs: Costs) {
        match costs {
            Costs { lookups: 0, predictions: 0 } => {}
            Costs { lookups: 0, predictions } => self.predictions.learn(us, predictions),
            Costs { lookups, .. } => self.lookups.learn(us, lookups),
        }
    }
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
    pub(crate) fn new(clock: &Arc<dyn Clock>, rule: Rule) -> Self {
        Self {
            clock: Arc::clone(clock),
            rule,
            state: Mutex::default(),
            has_jobs: Condvar::new(),
            thread_ended: Condvar::new(),
            dropped: Counter::default(),
        }
    }

    /// Starts the threads that work for `service`; they end when the executor is closed.
    ///
    /// # Errors
    /// `Io` when a thread cannot be made; those that were end.
    pub(crate) fn start(service: &Arc<Service>, thread_count: usize) -> Result<()> {
        for at in 0..thread_count {
            let (working, executor) = (Arc::clone(service), Arc::clone(&service.executor));
            executor.lock().count_in();
            let work = move || {
                let _ending = Ending(executor);
                // Let go of before the thread counts as ended: who waits for it may close files.
                let working = working;
                while let Some(jobs) = working.executor.take(at) {
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

    /// Puts a job into the queue if it may wait; a closed executor drops it.
    ///
    /// # Errors
    /// The verdict against it.
    pub(crate) fn push(&self, offer: Offer, job: Job) -> std::result::Result<Ticket, Verdict> {
        let Offer { deadline_us, priority, request_count } = offer;
        let mut state = self.lock();
        let now_us = self.clock.now_us();
        let left_us = deadline_us.saturating_sub(now_us);
        let found = Found { request_count: request_count as u64, wait_us: state.wait_us(now_us) };
        match admit(self.rule, found, Arrival { left_us, priority }) {
            Verdict::Admitted => {}
            refused => return Err(refused),
        }
        state.arrived += 1;
        let ticket = (deadline_us, state.arrived);
        if !state.is_closed {
            state.queued.add(&job);
            state.jobs.insert(ticket, job);
            let is_awaited = state.idle_count > 0;
            drop(state);
            // Waking nobody costs a system call.
            if is_awaited {
                self.has_jobs.notify_one();
            }
        }
        Ok(ticket)
    }

    /// Tells whether a request may be answered where it is: it does not wait.
    pub(crate) fn admits_at_once(&self, offer: Offer) -> Verdict {
        let Offer { deadline_us, priority, request_count } = offer;
        let left_us = deadline_us.saturating_sub(self.clock.now_us());
        let found = Found { request_count: request_count as u64, wait_us: 0 };
        admit(self.rule, found, Arrival { left_us, priority })
    }

    /// Removes a job that nobody waits for, unless it was taken before.
    pub(crate) fn forget(&self, ticket: Ticket) {
        let mut state = self.lock();
        let Some(job) = state.jobs.remove(&ticket) else { return };
        state.queued.take(&job);
        drop(state);
        drop(job);
        self.dropped.inc();
    }

    /// Returns how many jobs wait, and how long one that came now would.
    pub(crate) fn queue(&self) -> Found {
        let (state, now_us) = (self.lock(), self.clock.now_us());
        Found { request_count: state.jobs.len() as u64, wait_us: state.wait_us(now_us) }
    }

    /// Tells whether no job waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().jobs.is_empty()
    }

    /// Ends what thread `at` worked on, waits for jobs and takes those that belong together;
    /// `None` once closed.
    fn take(&self, at: usize) -> Option<Vec<Job>> {
        let mut state = self.lock();
        state.end(at, self.clock.now_us());
        loop {
            state.idle_count += 1;
            while state.jobs.is_empty() && !state.is_closed {
                state = self.has_jobs.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.idle_count -= 1;
            if state.is_closed {
                return None;
            }
            let now_us = self.clock.now_us();
            let late = state.take_late(now_us);
            let jobs = state.take(at, now_us);
            drop(state);
            for job in late {
                self.dropped.inc();
                job.done.send(Err(Refusal::late("the request's time is over")));
            }
            if !jobs.is_empty() {
                return Some(jobs);
            }
            state = self.lock();
        }
    }

    /// Takes no more jobs, and drops those that wait.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let dropped = std::mem::take(&mut state.jobs);
        state.queued = Costs::default();
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
    fn count_in(&mut self) {
        self.thread_count += 1;
        self.tasks.push(None);
    }

    fn wait_us(&self, now_us: u64) -> u64 {
        let busy = self.tasks.iter().map(|task| task.map(|task| task.busy));
        wait_us(self.paces.predict_us(self.queued), &busy.collect::<Vec<_>>(), now_us)
    }

    /// Learns from the work that thread `at` has ended.
    fn end(&mut self, at: usize, now_us: u64) {
        if let Some(Task { busy, costs }) = self.task(at).take() {
            self.paces.learn(now_us.saturating_sub(busy.since_us), costs);
        }
    }

    fn task(&mut self, at: usize) -> &mut Option<Task> {
        let count = self.tasks.len();
        let Some(task) = self.tasks.get_mut(at) else { panic!("thread {at} of {count}") };
        task
    }

    /// Takes the jobs whose time is over.
    fn take_late(&mut self, now_us: u64) -> Vec<Job> {
        let mut late = Vec::new();
        while let Some(first) = self.jobs.first_entry() {
            if first.key().0 > now_us {
                break;
            }
            let job = first.remove();
            self.queued.take(&job);
            late.push(job);
        }
        late
    }

    /// Takes the jobs with the earliest deadlines for thread `at`: those of one kind together, up
    /// to this thread's share, the bytes of a batch, and what can be done before the first
    /// deadline.
    fn take(&mut self, at: usize, now_us: u64) -> Vec<Job> {
        // Threads that wait have been woken, and take theirs.
        let share = self.jobs.len().div_ceil(self.idle_count + 1);
        let (mut taken, mut bytes, mut costs) = (Vec::new(), 0, Costs::default());
        let first_us = self.jobs.first_key_value().map(|((deadline_us, _), _)| *deadline_us);
        let left_us = first_us.map_or(0, |first_us| first_us.saturating_sub(now_us));
        let mut kind = None;
        while let Some(first) = self.jobs.first_entry() {
            let job = first.get();
            let is_other = *kind.get_or_insert(job.work.kind()) != job.work.kind();
            // All are answered together, when the last one is done.
            let mut with_it = costs;
            with_it.add(job);
            let is_more = taken.len() == share
                || bytes + job.body_bytes > BATCH_BYTES_MAX
                || self.paces.predict_us(with_it) > left_us;
            if !taken.is_empty() && (is_more || is_other) {
                break;
            }
            bytes += job.body_bytes;
            self.queued.take(job);
            costs = with_it;
            taken.push(first.remove());
        }
        if !taken.is_empty() {
            let predicted_us = self.paces.predict_us(costs);
            let busy = Busy { since_us: now_us, predicted_us };
            *self.task(at) = Some(Task { busy, costs });
        }
        taken
    }
}

#[cfg(test)]
mod tests;
