//! Progress callbacks of long calls, and their cancellation from Python.

use pyo3::prelude::*;
use tierbed_core::{Error, Result};

use crate::ending::attached;

/// A callback of `(done, total)`. Signals are checked at each call, so that Ctrl-C ends the work.
pub(crate) struct Progress {
    callback: Option<Py<PyAny>>,
    raised: Option<PyErr>,
}

impl Progress {
    /// Wraps the caller's callback, if there is one.
    pub(crate) fn new(callback: Option<Py<PyAny>>) -> Self {
        Self { callback, raised: None }
    }

    /// Tells the caller; to be called without the GIL.
    ///
    /// # Errors
    /// `Invalid` when the callback raised or a signal came; the work should end. What was raised
    /// is kept for [`finish`](Self::finish).
    pub(crate) fn tell(&mut self, done: u64, total: u64) -> Result<()> {
        let told = attached(|py| {
            py.check_signals()?;
            self.callback
                .as_ref()
                .map_or(Ok(()), |callback| callback.call1(py, (done, total)).map(drop))
        });
        told.map_err(|error| {
            self.raised = Some(error);
            Error::invalid("progress callback raised")
        })
    }

    /// Returns the result of the work, or the caller's own exception instead of ours about it.
    pub(crate) fn finish<T>(self, result: PyResult<T>) -> PyResult<T> {
        self.raised.map_or(result, Err)
    }
}
