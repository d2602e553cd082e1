//! The HTTP server, for Python: lookups stay in Rust, predictions come back to a callable.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::process::Owned;
use tierbed_io::FsFolder;
use tierbed_serve::{
    Limits, LogLevel, LogOptions, ModelInputs, Predictor, ServeOptions, Server, TlsFiles,
};
use tierbed_snapshot::{Generation, View};

use crate::ending::attached_or_closed;
use crate::errors::run;
use crate::plain::Plain;
use crate::snapshot::NativeSnapshot;

/// The dense parameters of a published model, as Python names them.
const DENSE: &str = "dense.safetensors";

/// HTTP in front of a snapshot.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeServer {
    server: Owned<Server>,
}

/// A Python callable that turns the body of a request into that of the answer.
struct PythonPredictor {
    callable: Py<PyAny>,
    inputs: Option<ModelInputs>,
}

impl PythonPredictor {
    /// Takes a callable; one that names its features and numbers is described by them.
    fn new(py: Python<'_>, callable: Py<PyAny>) -> PyResult<Self> {
        let inputs = match callable.getattr(py, "features") {
            Ok(features) => Some(ModelInputs {
                dense_count: callable.getattr(py, "dense_count")?.extract(py)?,
                features: features.extract(py)?,
            }),
            Err(_) => None,
        };
        Ok(Self { callable, inputs })
    }
}

impl Predictor for PythonPredictor {
    fn predict(&self, body: &[u8], content_type: &str) -> Result<(Vec<u8>, String)> {
        attached_or_closed(|py| {
            let answer = self.callable.call1(py, (PyBytes::new(py, body),));
            let bytes = answer.and_then(|answer| answer.extract::<Vec<u8>>(py));
            let bytes =
                bytes.map_err(|raised| failed(py, &raised, "prediction failed", ErrorKind::Io))?;
            Ok((bytes, content_type.to_owned()))
        })?
    }

    fn next(&self, view: &View<'_>) -> Result<Option<Arc<dyn Predictor>>> {
        let [config, dense] = [view.attachment("model.json")?, view.attachment(DENSE)?];
        let (Some(config), Some(dense)) = (config, dense) else { return Ok(None) };
        attached_or_closed(|py| {
            let parts = (PyBytes::new(py, &config), PyBytes::new(py, &dense));
            let next = self.callable.call_method1(py, "successor", parts);
            let next = next.and_then(|callable| Self::new(py, callable)).map_err(|raised| {
                failed(py, &raised, "the delta's model cannot be used", ErrorKind::Invalid)
            })?;
            Ok(Some(Arc::new(next) as Arc<dyn Predictor>))
        })?
    }

    fn inputs(&self) -> Option<ModelInputs> {
        self.inputs.clone()
    }
}

/// What errors of the engine know of the thing that failed.
const CONTEXT: [&str; 4] = ["path", "page_id", "table_id", "row"];

/// Turns what the model raised into an error of the kind it had in the engine, or of kind `other`.
fn failed(py: Python<'_>, raised: &PyErr, what: &str, other: ErrorKind) -> Error {
    let value = raised.value(py);
    let kind = value.getattr("kind").and_then(|kind| kind.extract::<String>());
    let kind = match kind.as_deref() {
        Ok("corruption") => ErrorKind::Corruption,
        Ok("closed") => ErrorKind::Closed,
        Ok("poisoned") => ErrorKind::Poisoned,
        // What the model calls a bad value is the client's; anything else is ours.
        _ if raised.is_instance_of::<PyValueError>(py) => ErrorKind::Invalid,
        _ => other,
    };
    let error = Error::new(kind, format!("{what}: {raised}"));
    let Ok(context) = value.getattr("context") else { return error };
    CONTEXT.into_iter().fold(error, |error, key| {
        match context.get_item(key).and_then(|value| value.extract::<String>()) {
            Ok(value) => error.with(key, value),
            Err(_) => error,
        }
    })
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GivenOptions {
    grpc_address: Option<String>,
    tokens: Option<PathBuf>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_names: Vec<String>,
    require_auth: bool,
    deltas: Option<PathBuf>,
    worker_threads: Option<usize>,
    lookup_threads: Option<usize>,
    snapshot_name: Option<String>,
    model_name: Option<String>,
    log_level: Option<String>,
    access_log: Option<bool>,
    slow_ms: Option<u64>,
    limits: Limits,
}

impl GivenOptions {
    fn options(given: Self, address: &str) -> Result<ServeOptions> {
        let defaults = ServeOptions::default();
        let level = given.log_level.as_deref().map(LogLevel::parse).transpose()?;
        Ok(ServeOptions {
            address: address.to_owned(),
            grpc_address: given.grpc_address,
            tokens: given.tokens,
            tls: TlsFiles::given(
                given.tls_cert,
                given.tls_key,
                given.tls_client_ca,
                given.tls_client_names,
            )?,
            requires_auth: given.require_auth,
            deltas: given.deltas,
            worker_threads: given.worker_threads.unwrap_or(defaults.worker_threads),
            lookup_threads: given.lookup_threads.unwrap_or(defaults.lookup_threads),
            snapshot_name: given.snapshot_name,
            model_name: given.model_name.unwrap_or(defaults.model_name),
            limits: given.limits,
            log: LogOptions {
                level: level.unwrap_or(defaults.log.level),
                has_access: given.access_log.unwrap_or(defaults.log.has_access),
                slow_ms: given.slow_ms.unwrap_or(defaults.log.slow_ms),
                target: defaults.log.target,
            },
            ..defaults
        })
    }
}

#[pymethods]
impl NativeServer {
    #[new]
    #[pyo3(signature = (snapshot, address, predict, options))]
    fn new(
        snapshot: &Bound<'_, NativeSnapshot>,
        address: &str,
        predict: Option<Py<PyAny>>,
        options: Plain<GivenOptions>,
    ) -> PyResult<Self> {
        let handle = snapshot.get();
        let predictor = predict
            .map(|callable| PythonPredictor::new(snapshot.py(), callable))
            .transpose()?
            .map(|predictor| Arc::new(predictor) as Arc<dyn Predictor>);
        let server = run(snapshot.py(), || {
            let options = GivenOptions::options(options.0, address)?;
            Server::start(&options, handle.shared()?, predictor)
        })?;
        let remedy = "start another one in the process that shall answer";
        Ok(Self { server: Owned::new(server, "the server", remedy) })
    }

    /// The limits of a server that is told none.
    #[staticmethod]
    fn default_limits() -> Plain<Limits> {
        Plain(Limits::default())
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        run(py, || Ok(self.server.get()?.address().to_string()))
    }

    #[getter]
    fn grpc_address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        run(py, || Ok(self.server.get()?.grpc_address().map(|address| address.to_string())))
    }

    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        run(py, || {
            let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0))
                .map_err(|cause| Error::invalid("timeout is out of range").with("cause", cause))?;
            Ok(self.server.get()?.wait(timeout))
        })
    }

    fn apply(&self, py: Python<'_>, folder: PathBuf) -> PyResult<Plain<Generation>> {
        run(py, || self.server.get()?.apply(Arc::new(FsFolder::open(folder)?)).map(Plain))
    }

    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || {
            self.server.get()?.drain();
            Ok(())
        })
    }

    fn stop(&self, py: Python<'_>) -> PyResult<bool> {
        // A forked child never answered anybody.
        run(py, || Ok(!self.server.is_here() || self.server.get()?.stop()))
    }
}
