//! The server, for Python.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tierbed_core::{Error, Result};
use tierbed_io::process::Owned;
use tierbed_io::FsFolder;
use tierbed_serve::{Limits, LogLevel, LogOptions, Predictor, ServeOptions, Server, TlsFiles};
use tierbed_snapshot::{Generation, Snapshot};

use crate::compiled::CompiledPredictor;
use crate::errors::run;
use crate::plain::Plain;
use crate::predictor::PythonPredictor;
use crate::snapshot::NativeSnapshot;

/// HTTP in front of a snapshot.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeServer {
    server: Owned<Server>,
}

/// What scores samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Predict {
    /// A module of Python.
    #[default]
    Python,
    /// The compiled model that was published.
    Aoti,
}

/// A snapshot that answers first, and the module that was given for it.
pub(crate) struct Asked<S> {
    pub(crate) snapshot: S,
    pub(crate) model: Option<Py<PyAny>>,
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct GivenOptions {
    grpc_address: Option<String>,
    admin_address: Option<String>,
    tokens: Option<PathBuf>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_names: Vec<String>,
    require_auth: bool,
    deltas: Option<PathBuf>,
    /// Seconds, as a number in a text.
    generation_grace: Option<String>,
    worker_threads: Option<usize>,
    lookup_threads: Option<usize>,
    snapshot_name: Option<String>,
    model_name: Option<String>,
    predict: Predict,
    log_level: Option<String>,
    access_log: Option<bool>,
    slow_ms: Option<u64>,
    otlp_endpoint: Option<String>,
    limits: Limits,
}

impl GivenOptions {
    fn options(given: Self, address: &str) -> Result<ServeOptions> {
        let defaults = ServeOptions::default();
        let level = given.log_level.as_deref().map(LogLevel::parse).transpose()?;
        Ok(ServeOptions {
            address: address.to_owned(),
            grpc_address: given.grpc_address,
            admin_address: given.admin_address,
            tokens: given.tokens,
            tls: TlsFiles::given(
                given.tls_cert,
                given.tls_key,
                given.tls_client_ca,
                given.tls_client_names,
            )?,
            requires_auth: given.require_auth,
            deltas: given.deltas,
            generation_grace_ms: grace_ms(given.generation_grace.as_deref())?,
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
            otlp_endpoint: given.otlp_endpoint,
            ..defaults
        })
    }
}

fn grace_ms(seconds: Option<&str>) -> Result<Option<u64>> {
    let Some(seconds) = seconds else { return Ok(None) };
    let number: f64 = seconds.parse().map_err(|cause| {
        Error::invalid("generation_grace is no number of seconds").with("cause", cause)
    })?;
    Ok(Some((number * 1e3) as u64))
}

impl NativeServer {
    /// Makes one by `start`, with a model of Python or the compiled one of the snapshot.
    pub(crate) fn begin(
        py: Python<'_>,
        address: &str,
        asked: Asked<impl FnOnce() -> Result<Arc<Snapshot>> + Send>,
        options: GivenOptions,
        start: impl FnOnce(&ServeOptions, Option<Arc<dyn Predictor>>) -> Result<Server> + Send,
    ) -> PyResult<Self> {
        let Asked { snapshot, model } = asked;
        let predictor = model
            .map(|model| PythonPredictor::new(py, model))
            .transpose()?
            .map(|predictor| Arc::new(predictor) as Arc<dyn Predictor>);
        let is_compiled = options.predict == Predict::Aoti;
        let server = run(py, || {
            let options = GivenOptions::options(options, address)?;
            if !is_compiled {
                return start(&options, predictor);
            }
            // Those that move bytes score small requests.
            let threads = options.lookup_threads + options.worker_threads;
            let compiled = CompiledPredictor::load(&snapshot()?.view(), threads)?;
            start(&options, Some(Arc::new(compiled)))
        })?;
        let remedy = "start another one in the process that shall answer";
        Ok(Self { server: Owned::new(server, "the server", remedy) })
    }
}

#[pymethods]
impl NativeServer {
    #[new]
    #[pyo3(signature = (snapshot, address, model, options))]
    fn new(
        snapshot: &Bound<'_, NativeSnapshot>,
        address: &str,
        model: Option<Py<PyAny>>,
        options: Plain<GivenOptions>,
    ) -> PyResult<Self> {
        let handle = snapshot.get();
        let asked = Asked { snapshot: || handle.shared(), model };
        Self::begin(snapshot.py(), address, asked, options.0, |options, predictor| {
            Server::start(options, handle.shared()?, predictor)
        })
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

    #[getter]
    fn admin_address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        run(py, || Ok(self.server.get()?.admin_address().map(|address| address.to_string())))
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

    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || {
            self.server.get()?.reload();
            Ok(())
        })
    }

    fn stop(&self, py: Python<'_>) -> PyResult<bool> {
        // A forked child never answered anybody.
        run(py, || Ok(!self.server.is_here() || self.server.get()?.stop()))
    }
}
