//! Conversion of engine errors to Python: the class of `tierbed.errors` for each kind.

use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tierbed_core::{Error, Result};

use crate::ending::detached;

/// Builds the Python exception of `error`: same message, same context.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failure| failure)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let context = pyo3::types::PyDict::new(py);
    for (key, value) in error.context() {
        context.set_item(key, value)?;
    }
    let exception = py.import("tierbed.errors")?.getattr("from_native")?.call1((
        error.kind().name(),
        error.to_string(),
        context,
        error.errno(),
    ))?;
    Ok(PyErr::from_value(exception))
}

/// Runs `work` without the GIL; errors and panics become exceptions.
///
/// A panic is a bug of ours. pyo3 would raise it as a `BaseException`, which `except Exception`
/// does not see; here it becomes a `RuntimeError` that says so.
pub(crate) fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    match detached(py, || catch_unwind(AssertUnwindSafe(work))) {
        Ok(result) => result.map_err(|error| to_python(py, &error)),
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("unknown panic");
            Err(PyRuntimeError::new_err(format!(
                "internal error in tierbed, please report it: {what}"
            )))
        }
    }
}
