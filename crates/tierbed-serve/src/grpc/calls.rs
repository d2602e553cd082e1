//! Calls of a connection, and when its client's time is over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::options::Limits;

/// After `stop`, a connection without calls is kept this long: one may be on its way.
const STOP_IDLE: Duration = Duration::from_millis(250);

/// The calls of a connection. They run on tasks of their own; the connection's waits for them.
#[derive(Debug)]
pub(super) struct Calls {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    begun: u64,
    /// Calls that end with their only answer.
    finite: usize,
    /// Calls that last as long as their client wants.
    endless: usize,
    /// When the last call ended.
    idle: Instant,
    /// When the answers that are being taken were made, in order.
    answers: BTreeMap<u64, Instant>,
    connection: Option<Waker>,
}

/// A call; it has ended when this is dropped.
#[derive(Debug)]
pub(super) struct Call {
    calls: Arc<Calls>,
    number: u64,
    is_finite: bool,
}

impl Calls {
    pub(super) fn new() -> Self {
        let state = State {
            begun: 0,
            finite: 0,
            endless: 0,
            idle: Instant::now(),
            answers: BTreeMap::new(),
            connection: None,
        };
        Self { state: Mutex::new(state) }
    }

    /// Returns when the client's time is over; `None` while the server works. The connection is
    /// woken when that changes.
    pub(super) fn deadline(
        &self,
        limits: &Limits,
        stop: Option<Instant>,
        cx: &Context<'_>,
    ) -> Option<Instant> {
        let mut state = self.lock();
        state.connection = Some(cx.waker().clone());
        if let Some(since) = state.answers.values().next() {
            return Some(*since + Duration::from_millis(limits.answer_ms_max));
        }
        if state.finite > 0 {
            return None;
        }
        let idle = Duration::from_millis(limits.idle_ms_max);
        match (stop, state.endless) {
            (Some(stop), _) => Some(state.idle.max(stop) + STOP_IDLE),
            (None, 0) => Some(state.idle + idle),
            (None, _) => None,
        }
    }

    /// Tells whether the client has answers to take.
    pub(super) fn owe_answers(&self) -> bool {
        !self.lock().answers.is_empty()
    }

    /// Begins a call.
    pub(super) fn begin(self: &Arc<Self>, is_finite: bool) -> Call {
        let mut state = self.lock();
        state.begun += 1;
        *state.running(is_finite) += 1;
        Call { calls: Arc::clone(self), number: state.begun, is_finite }
    }

    // The state is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn running(&mut self, is_finite: bool) -> &mut usize {
        if is_finite {
            &mut self.finite
        } else {
            &mut self.endless
        }
    }

    fn wake(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.wake();
        }
    }
}

impl Call {
    /// The answer is made: from now on the client takes it.
    pub(super) fn is_answered(&self) {
        if self.is_finite {
            let mut state = self.calls.lock();
            state.answers.insert(self.number, Instant::now());
            state.wake();
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = self.calls.lock();
        state.answers.remove(&self.number);
        *state.running(self.is_finite) -= 1;
        state.idle = Instant::now();
        state.wake();
    }
}
