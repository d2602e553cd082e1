//! The laboratory's part of the native module: what only `tierbed_bench` calls.
//!
//! The cargo feature `lab` of `tierbed-py` compiles it; a wheel is built without it and has none
//! of these names.

// The tests of the exchange have the same rows as its measurement.
#[path = "../../../crates/tierbed-exchange/tests/common/array_rows.rs"]
mod array_rows;
mod cache;
mod exchange;
mod generator;

use pyo3::prelude::*;

use crate::errors;

/// Adds the names of the laboratory, the stores and the policies to compare with.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    tierbed_compare::register_stores();
    tierbed_lab::register_policies();
    module.add_function(wrap_pyfunction!(bench_worker, module)?)?;
    module.add_function(wrap_pyfunction!(bench_lookup, module)?)?;
    module.add_function(wrap_pyfunction!(bench_serve, module)?)?;
    exchange::register(module)?;
    generator::register(module)?;
    cache::register(module)
}

/// Serves the commands of `tierbed bench training` on standard input until it ends.
#[pyfunction]
fn bench_worker(py: Python<'_>) -> PyResult<()> {
    let serve =
        || tierbed_bench::training::serve(std::io::stdin().lock(), std::io::stdout().lock());
    errors::run(py, serve)
}

/// Carries out one command of `tierbed bench lookup --log`; both sides are JSON objects.
#[pyfunction]
fn bench_lookup(py: Python<'_>, command: &str) -> PyResult<String> {
    errors::run(py, || Ok(tierbed_bench::lookup::serve(command)?.to_string()))
}

/// Carries out one command of `tierbed bench serve`; both sides are JSON objects.
#[pyfunction]
fn bench_serve(py: Python<'_>, command: &str) -> PyResult<String> {
    errors::run(py, || Ok(tierbed_bench::serve::serve(command)?.to_string()))
}
