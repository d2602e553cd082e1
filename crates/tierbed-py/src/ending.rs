//! Threads that are in the engine while the Python interpreter shuts down.
//!
//! When the interpreter ends, a daemon thread that comes back for its lock is ended by unwinding
//! its stack. Frames of ours on that stack turn this into an abort, after all work is safe. So
//! nobody comes back any more: a hook that runs before the end shuts a gate, waits for those who
//! are on their way through, and whoever arrives later stays where it is until the process is
//! gone. Newer interpreters do the same by themselves.
//!
//! ```text
//! engine ─▶ gate ─▶ Python      open: counted while passing; shut: waits for ever
//! ```

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, ErrorKind, Result};

/// How long the end waits for threads that are within Python code called by the engine.
const PASSING_US: u64 = 5_000_000;
/// How long the end waits for threads that use the engine to arrive at the gate.
const ARRIVING_US: u64 = 200_000;
const PAUSE: Duration = Duration::from_millis(1);

static IS_SHUT: AtomicBool = AtomicBool::new(false);
/// Threads on their way through the gate, and within Python called by the engine.
static PASSING: AtomicUsize = AtomicUsize::new(0);
/// Threads that have used the engine and live.
static USING: AtomicUsize = AtomicUsize::new(0);
/// Of these, those that wait at the shut gate.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Counts a thread for as long as it lives.
struct User;

impl Drop for User {
    fn drop(&mut self) {
        USING.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    static USER: User = {
        USING.fetch_add(1, Ordering::SeqCst);
        User
    };
    /// Set in the thread that ends the interpreter: it may pass.
    static IS_ENDING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A thread on its way through the gate.
pub(crate) struct Passing(());

impl Passing {
    /// Passes the gate, or `None` when it is shut.
    fn try_begin() -> Option<Self> {
        // Either this sees the gate shut, or who shuts it sees this: both orders are total.
        PASSING.fetch_add(1, Ordering::SeqCst);
        let passing = Self(());
        let may_pass = !IS_SHUT.load(Ordering::SeqCst) || IS_ENDING.get();
        may_pass.then_some(passing)
    }

    /// Passes the gate; stays here for good when it is shut. To be called without the GIL.
    pub(crate) fn begin() -> Self {
        if let Some(passing) = Self::try_begin() {
            return passing;
        }
        WAITING.fetch_add(1, Ordering::SeqCst);
        loop {
            std::thread::park();
        }
    }
}

impl Passing {
    /// As [`begin`](Self::begin), with the GIL, which nobody keeps who stays here.
    pub(crate) fn begin_attached(py: Python<'_>) -> Self {
        Self::try_begin().unwrap_or_else(|| py.detach(Self::begin))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        PASSING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs `work` without the GIL, and comes back through the gate.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    // A thread that is being taken down has no counter any more; it is not waited for.
    let _ = USER.try_with(|_| ());
    let (done, passing) = py.detach(|| {
        drop(Passing::begin());
        let done = work();
        (done, Passing::begin())
    });
    drop(passing);
    done
}

/// Calls Python from a thread that works for it.
pub(crate) fn attached<T>(call: impl FnOnce(Python<'_>) -> T) -> T {
    let _passing = Passing::begin();
    Python::attach(call)
}

/// Calls Python from a thread of the engine's own, which must be able to end.
///
/// # Errors
/// `Closed` when Python is ending.
pub(crate) fn attached_or_closed<T>(call: impl FnOnce(Python<'_>) -> T) -> Result<T> {
    let passing = Passing::try_begin()
        .ok_or_else(|| Error::new(ErrorKind::Closed, "the Python interpreter is ending"))?;
    let done = Python::attach(call);
    drop(passing);
    Ok(done)
}

/// Shuts the gate. Called once, by the interpreter, before it ends.
#[pyfunction]
fn end_engine_calls(py: Python<'_>) {
    IS_ENDING.set(true);
    IS_SHUT.store(true, Ordering::SeqCst);
    py.detach(|| {
        let clock = SystemClock::default();
        loop {
            let is_passing = PASSING.load(Ordering::SeqCst) > 0;
            let mine = usize::from(USER.try_with(|_| ()).is_ok());
            let arriving = USING.load(Ordering::SeqCst).saturating_sub(mine);
            let all_arrived = WAITING.load(Ordering::SeqCst) >= arriving;
            let us = clock.now_us();
            let is_over = !is_passing && (all_arrived || us > ARRIVING_US);
            if is_over || us > PASSING_US {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    });
}

/// Has the interpreter call [`end_engine_calls`] before it ends.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_engine_calls, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
