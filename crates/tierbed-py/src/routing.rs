//! Shards that a gateway or a client asks for rows, for Python.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::process::Owned;
use tierbed_serve::{
    GatewayOptions, Hosted, HostedAnswer, HostedInput, HostedRequest, LogLevel, LogOptions,
    MissingShard, Routing, RowType, ServeOptions, Server, ShardAccess,
};

use crate::errors::run;
use crate::opened::OpenedSnapshot;
use crate::plain::Plain;
use crate::server::{self, Asked, NativeServer};
use crate::snapshot::NativeSnapshot;

/// Shards that have been found, until a gateway or a client takes them.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeRouting {
    routing: Owned<Mutex<Option<Routing>>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenRouting {
    route: PathBuf,
    members: String,
    missing_shard: String,
    row_type: String,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    server_name: Option<String>,
    token: Option<PathBuf>,
    wait_s: f64,
}

impl GivenRouting {
    fn options(self) -> Result<GatewayOptions> {
        let wait = Duration::try_from_secs_f64(self.wait_s)
            .map_err(|cause| Error::invalid("shard_wait is out of range").with("cause", cause))?;
        Ok(GatewayOptions {
            missing: MissingShard::from_name(&self.missing_shard)?,
            row_type: RowType::from_name(&self.row_type)?,
            access: ShardAccess {
                ca: self.ca,
                certificate: self.certificate,
                key: self.key,
                server_name: self.server_name,
                token: self.token,
            },
            wait,
            ..GatewayOptions::new(self.route, self.members)
        })
    }
}

fn taken() -> Error {
    Error::new(ErrorKind::Closed, "a server or client asks the shards already")
        .with("remedy", "make another Route")
}

impl NativeRouting {
    fn with<T>(&self, work: impl FnOnce(&mut Option<Routing>) -> Result<T>) -> Result<T> {
        // It is there or taken after every statement.
        work(&mut self.routing.get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl NativeRouting {
    #[new]
    fn new(py: Python<'_>, options: Plain<GivenRouting>) -> PyResult<Self> {
        let routing = run(py, || Routing::begin(&options.0.options()?))?;
        let remedy = "start another one in the process that shall answer";
        Ok(Self { routing: Owned::new(Mutex::new(Some(routing)), "the shards", remedy) })
    }

    /// What the shards publish beside rows, to be closed before a server answers.
    fn snapshot(&self, py: Python<'_>) -> PyResult<NativeSnapshot> {
        let opened = run(py, || {
            let head = self.with(|it| it.as_ref().map(Routing::snapshot).ok_or_else(taken))?;
            let once = Mutex::new(Some(head));
            OpenedSnapshot::new(move || {
                once.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(taken)
            })
        })?;
        Ok(NativeSnapshot::of(opened))
    }

    /// Answers as a gateway.
    #[pyo3(signature = (address, model, options))]
    fn serve(
        &self,
        py: Python<'_>,
        address: &str,
        model: Option<Py<PyAny>>,
        options: Plain<server::GivenOptions>,
    ) -> PyResult<NativeServer> {
        let first = || self.with(|it| it.as_ref().map(Routing::snapshot).ok_or_else(taken));
        let asked = Asked { snapshot: first, model };
        NativeServer::begin(py, address, asked, options.0, |options, predictor| {
            let routing = self.with(|it| it.take().ok_or_else(taken))?;
            Server::route(options, routing, predictor)
        })
    }

    /// Asks the shards from this process.
    fn client(&self, py: Python<'_>) -> PyResult<NativeShardClient> {
        let hosted = run(py, || {
            let routing = self.with(|it| it.take().ok_or_else(taken))?;
            let log = LogOptions { level: LogLevel::Off, ..LogOptions::default() };
            Hosted::route(&ServeOptions { log, ..ServeOptions::default() }, routing)
        })?;
        let remedy = "start another one in the process that shall answer";
        Ok(NativeShardClient { hosted: Owned::new(hosted, "the client", remedy) })
    }
}

/// Lookups of a divided model without a gateway.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeShardClient {
    hosted: Owned<Hosted>,
}

/// A feature's bags: name, values and lengths as little-endian words, weights where there are some.
type GivenBags = (String, Vec<u8>, Vec<u8>, Option<Vec<u8>>);

/// An output: name, rows, elements of a row, and their bytes.
type Output = (String, usize, usize, Vec<u8>);

fn request(bags: Vec<GivenBags>, pooling: Option<String>) -> HostedRequest {
    let mut request = HostedRequest { pooling, takes_all: false, ..HostedRequest::default() };
    for (name, values, lengths, weights) in bags {
        let mut put = |part: &str, datatype: &str, size: usize, bytes: Vec<u8>| {
            request.inputs.push(HostedInput {
                name: format!("{name}.{part}"),
                datatype: datatype.to_owned(),
                shape: vec![(bytes.len() / size) as i64],
                bytes,
            });
        };
        put("values", "INT64", size_of::<i64>(), values);
        put("lengths", "INT64", size_of::<i64>(), lengths);
        if let Some(weights) = weights {
            put("weights", "FP32", size_of::<f32>(), weights);
        }
        request.outputs.push(name);
    }
    request
}

fn outputs(answer: &HostedAnswer) -> Vec<Output> {
    let told = answer.outputs().map(|output| {
        let mut bytes = Vec::with_capacity(output.byte_count());
        output.for_each_piece(|piece| bytes.extend_from_slice(piece));
        let shape = output.shape();
        let (rows, dim) = (shape.first().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
        (output.name().to_owned(), rows, dim, bytes)
    });
    told.collect()
}

#[pymethods]
impl NativeShardClient {
    /// Looks bags up: generation, and a matrix for each feature.
    #[pyo3(signature = (bags, pooling))]
    fn lookup(
        &self,
        py: Python<'_>,
        bags: Vec<GivenBags>,
        pooling: Option<String>,
    ) -> PyResult<(String, Vec<Output>)> {
        run(py, || {
            let mut answers = self.hosted.get()?.answer(vec![request(bags, pooling)]);
            let Some(answered) = answers.pop() else { panic!("a request without an answer") };
            let answer = answered.map_err(|refused| {
                let kind = match refused.status {
                    400..=499 => ErrorKind::Invalid,
                    503 => ErrorKind::Closed,
                    _ => ErrorKind::Io,
                };
                Error::new(kind, refused.message)
            })?;
            Ok((answer.generation().to_owned(), outputs(&answer)))
        })
    }

    /// Names of the features that the shards serve.
    #[getter]
    fn features(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        run(py, || {
            let outputs = self.hosted.get()?.outputs();
            let names = outputs.into_iter().map(|output| output.name);
            Ok(names.filter(|name| name != "pooled").collect())
        })
    }
}
