//! The HTTP server, for Python: lookups stay in Rust, predictions come back to a callable.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::process::Owned;
use tierbed_serve::{Predictor, ServeOptions, Server};

use crate::errors::run;
use crate::snapshot::NativeSnapshot;

/// HTTP in front of a snapshot.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeServer {
    server: Owned<Server>,
}

/// A Python callable that turns the body of a request into that of the answer.
struct PythonPredictor {
    callable: Py<PyAny>,
}

impl Predictor for PythonPredictor {
    fn predict(&self, body: &[u8], content_type: &str) -> Result<(Vec<u8>, String)> {
        Python::attach(|py| {
            let answer = self.callable.call1(py, (PyBytes::new(py, body),));
            let bytes = answer.and_then(|answer| answer.extract::<Vec<u8>>(py));
            let bytes = bytes.map_err(|error: PyErr| {
                // What the model calls a bad value is the client's; anything else is ours.
                let kind = match error.is_instance_of::<PyValueError>(py) {
                    true => ErrorKind::Invalid,
                    false => ErrorKind::Io,
                };
                Error::new(kind, format!("prediction failed: {error}"))
            })?;
            Ok((bytes, content_type.to_owned()))
        })
    }
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GivenOptions {
    worker_threads: Option<usize>,
    lookup_threads: Option<usize>,
    body_bytes_max: Option<usize>,
    indices_max: Option<usize>,
    requests_max: Option<usize>,
    request_ms_max: Option<u64>,
    stop_ms_max: Option<u64>,
    snapshot_name: Option<String>,
}

impl GivenOptions {
    fn parse(json: &str, address: &str) -> Result<ServeOptions> {
        let given: Self = serde_json::from_str(json)
            .map_err(|cause| Error::invalid("server options are wrong").with("cause", cause))?;
        let defaults = ServeOptions::default();
        Ok(ServeOptions {
            address: address.to_owned(),
            worker_threads: given.worker_threads.unwrap_or(defaults.worker_threads),
            lookup_threads: given.lookup_threads.unwrap_or(defaults.lookup_threads),
            body_bytes_max: given.body_bytes_max.unwrap_or(defaults.body_bytes_max),
            indices_max: given.indices_max.unwrap_or(defaults.indices_max),
            requests_max: given.requests_max.unwrap_or(defaults.requests_max),
            request_ms_max: given.request_ms_max.unwrap_or(defaults.request_ms_max),
            stop_ms_max: given.stop_ms_max.unwrap_or(defaults.stop_ms_max),
            snapshot_name: given.snapshot_name,
            ..defaults
        })
    }
}

#[pymethods]
impl NativeServer {
    #[new]
    #[pyo3(signature = (snapshot, address, predict, options_json))]
    fn new(
        snapshot: &Bound<'_, NativeSnapshot>,
        address: &str,
        predict: Option<Py<PyAny>>,
        options_json: &str,
    ) -> PyResult<Self> {
        let handle = snapshot.get();
        let predictor =
            predict.map(|callable| Arc::new(PythonPredictor { callable }) as Arc<dyn Predictor>);
        let server = run(snapshot.py(), || {
            let options = GivenOptions::parse(options_json, address)?;
            Server::start(&options, handle.shared()?, predictor)
        })?;
        let remedy = "start another one in the process that shall answer";
        Ok(Self { server: Owned::new(server, "the server", remedy) })
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        run(py, || Ok(self.server.get()?.address().to_string()))
    }

    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        run(py, || {
            let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0))
                .map_err(|cause| Error::invalid("timeout is out of range").with("cause", cause))?;
            Ok(self.server.get()?.wait(timeout))
        })
    }

    fn stop(&self, py: Python<'_>) -> PyResult<bool> {
        // A forked child never answered anybody.
        run(py, || Ok(!self.server.is_here() || self.server.get()?.stop()))
    }
}
