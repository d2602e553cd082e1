//! Lookups within a process that has a server of its own, such as Triton: no listener and no queue.
//!
//! ```text
//! requests of one call ─▶ each decoded and checked ─▶ looked up together ─▶ tensors of each
//! ```
//!
//! Tensors, forms and refusals are those of the model `NAME.rows` (docs/reference/oip.md). All
//! answers of a call are of one generation.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use tierbed_core::Result;
use tierbed_snapshot::Snapshot;
use tokio::sync::watch;

use crate::answer::Refusal;
use crate::batch::{guarded, look_up_all, Looked};
use crate::body::Held;
use crate::follow::Following;
use crate::gateway::Routing;
use crate::generation::Serving;
use crate::oip::config::{inputs, outputs, Tensor};
use crate::oip::inputs::{collect, lengths, Data, Tensor as Given};
use crate::oip::lookup::{make_room, resolve, Resolved};
use crate::oip::model::Kind;
use crate::oip::outputs::{Dtype, Output, Outputs};
use crate::oip::request::{check_once, Form, Named, Request};
use crate::options::ServeOptions;
use crate::query::Query;
use crate::routes::Service;
use crate::server::{self, Moving, Thread};

/// Lookups of a snapshot, or of the version that a channel is at.
#[derive(Debug)]
pub struct Hosted {
    service: Arc<Service>,
    follower: Mutex<Option<Thread>>,
    stop_ms_max: u64,
    /// Whoever waits for the end hears of it when this is dropped.
    _stop: watch::Sender<bool>,
}

/// What a caller asks.
#[derive(Debug, Clone, Default)]
pub struct HostedRequest {
    /// Tensors of one of the three forms.
    pub inputs: Vec<HostedInput>,
    /// Names of outputs; none: what the model answers by default.
    pub outputs: Vec<String>,
    /// Every output that the inputs give, whatever is named.
    pub takes_all: bool,
    /// `sum`, `mean` or `none`, in place of the features' own.
    pub pooling: Option<String>,
    /// `FP32`, `FP16` or `BF16`.
    pub output_dtype: Option<String>,
}

/// A tensor that a caller gives.
#[derive(Debug, Clone, Default)]
pub struct HostedInput {
    /// Its name.
    pub name: String,
    /// `INT64`, `INT32` or `FP32`.
    pub datatype: String,
    /// Its lengths.
    pub shape: Vec<i64>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The status that a server of ours answers over HTTP: 400 is the caller's mistake, 501 is not
    /// supported, 503 may be asked again, 500 failed.
    pub status: u16,
    /// What is wrong, with its remedy.
    pub message: String,
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self { status: refusal.status().as_u16(), message: refusal.message().to_owned() }
    }
}

/// The rows of a request.
#[derive(Debug)]
pub struct HostedAnswer {
    queries: Vec<Query>,
    outputs: Outputs,
    sample_count: u64,
    /// The memory of inputs and rows.
    _held: Held,
}

/// A request that was decoded and checked.
struct Begun {
    outputs: Outputs,
    sample_count: u64,
    held: Held,
    looked: Looked,
}

impl Hosted {
    /// Answers from a snapshot. Of the options those count that say what is looked up and logged.
    ///
    /// # Errors
    /// `Invalid` for options out of range and for features that do not fit the snapshot.
    pub fn start(options: &ServeOptions, snapshot: Arc<Snapshot>) -> Result<Self> {
        Self::begin(options, snapshot, Moving::Nothing)
    }

    /// As [`start`](Self::start); answers from the version that a channel is at, and follows it.
    ///
    /// # Errors
    /// As [`start`](Self::start), and `Io` when its thread cannot be made.
    pub fn follow(options: &ServeOptions, following: Following) -> Result<Self> {
        let snapshot = Arc::clone(following.snapshot());
        let name = options.snapshot_name.clone().unwrap_or_else(|| following.name());
        let options = ServeOptions { snapshot_name: Some(name), ..options.clone() };
        Self::begin(&options, snapshot, Moving::Channel(Box::new(following)))
    }

    /// As [`start`](Self::start); asks the servers of shards for rows.
    ///
    /// # Errors
    /// As [`start`](Self::start), and `Io` when its thread cannot be made.
    pub fn route(options: &ServeOptions, routing: Routing) -> Result<Self> {
        let name = options.snapshot_name.clone().unwrap_or_else(|| routing.name().to_owned());
        let clock = Arc::clone(routing.clock());
        let options = ServeOptions { snapshot_name: Some(name), clock, ..options.clone() };
        let head = routing.snapshot();
        Self::begin(&options, head, Moving::Shards(Box::new(routing)))
    }

    fn begin(options: &ServeOptions, snapshot: Arc<Snapshot>, moving: Moving) -> Result<Self> {
        options.check()?;
        let (stop, stopping) = watch::channel(false);
        let service =
            Arc::new(server::service_of(options, snapshot, None, stopping, moving.gateway())?);
        let follower = Mutex::new(Thread::start(moving, &service)?);
        service.begin();
        Ok(Self { service, follower, stop_ms_max: options.limits.stop_ms_max, _stop: stop })
    }

    /// Returns the tensors that a lookup may have.
    #[must_use]
    pub fn inputs(&self) -> Vec<Tensor> {
        inputs(&self.service, Kind::Rows)
    }

    /// Returns the tensors that a lookup may answer; the default comes first.
    #[must_use]
    pub fn outputs(&self) -> Vec<Tensor> {
        outputs(&self.service, Kind::Rows)
    }

    /// Answers all requests of a call, in order, from one generation and by one lookup. A mistake
    /// is its own request's.
    pub fn answer(
        &self,
        requests: Vec<HostedRequest>,
    ) -> Vec<std::result::Result<HostedAnswer, Refused>> {
        let service = &*self.service;
        let serving = match guarded(service, || service.serving(None)) {
            Ok(serving) => serving,
            Err(refusal) => return requests.iter().map(|_| Err(refusal.clone().into())).collect(),
        };
        let mut begun: Vec<_> = requests
            .into_iter()
            .map(|request| guarded(service, || prepared(&serving, request)))
            .collect();
        let mut all: Vec<_> = begun.iter_mut().flatten().map(|begun| &mut begun.looked).collect();
        service.metrics.batch_requests.observe(all.len() as f64);
        look_up_all(&serving, &mut all, |_, _| {});
        begun.into_iter().map(|begun| answered(begun).map_err(Refused::from)).collect()
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        let follower = self.follower.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(follower) = follower.take() {
            follower.stop(Duration::from_millis(self.stop_ms_max));
        }
        self.service.log.flush();
    }
}

fn prepared(serving: &Serving<'_>, request: HostedRequest) -> std::result::Result<Begun, Refusal> {
    let mut held = serving.buffers.hold_nothing();
    let request = decoded(request)?;
    let Resolved { mut queries, outputs, sample_count } = resolve(serving, request, &mut held)?;
    make_room(serving.source(), &mut queries, &[])?;
    Ok(Begun { outputs, sample_count, held, looked: Ok(queries) })
}

fn answered(
    begun: std::result::Result<Begun, Refusal>,
) -> std::result::Result<HostedAnswer, Refusal> {
    let Begun { outputs, sample_count, held, looked } = begun?;
    Ok(HostedAnswer { queries: looked?, outputs, sample_count, _held: held })
}

fn decoded(request: HostedRequest) -> Result<Request> {
    let HostedRequest { inputs, outputs, takes_all, pooling, output_dtype } = request;
    let raw_bytes = inputs.iter().map(|input| input.bytes.len()).sum();
    let tensors = collect(inputs, |input| {
        let HostedInput { name, datatype, shape, bytes } = input;
        (name.clone(), given(name, &datatype, &shape, bytes.into()))
    })?;
    let named = |name| Named { name, is_binary: true };
    let outputs: Vec<_> = outputs.into_iter().map(named).collect();
    check_once(&outputs)?;
    Ok(Request {
        id: None,
        pooling,
        output_dtype,
        tensors,
        outputs,
        takes_all,
        is_ragged: false,
        is_binary: true,
        raw_bytes,
        // It is not encoded: the caller takes the tensors.
        form: Form::Message,
    })
}

fn given(name: String, datatype: &str, shape: &[i64], bytes: Bytes) -> Result<Given> {
    let lengths = lengths(shape)?;
    Given::new(name, lengths, Data::from_bytes(datatype, bytes)?)
}

impl HostedAnswer {
    /// Returns the identity of the generation that answered.
    #[must_use]
    pub fn generation(&self) -> &str {
        &self.outputs.generation
    }

    /// Returns how many samples were asked for.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.sample_count
    }

    /// Returns the type of all outputs: `FP32`, `FP16` or `BF16`.
    #[must_use]
    pub fn datatype(&self) -> &'static str {
        self.outputs.dtype.name()
    }

    /// Returns the outputs, in order.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = HostedOutput<'_>> {
        let Self { queries, outputs, .. } = self;
        let dtype = outputs.dtype;
        outputs.outputs.iter().map(move |output| HostedOutput { output, queries, dtype })
    }
}

/// An output of an answer.
#[derive(Debug, Clone, Copy)]
pub struct HostedOutput<'a> {
    output: &'a Output,
    queries: &'a [Query],
    dtype: Dtype,
}

impl<'a> HostedOutput<'a> {
    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        &self.output.name
    }

    /// Returns its lengths.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        &self.output.shape
    }

    /// Returns how many bytes its elements have.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.output.len() * self.dtype.size()
    }

    /// Hands the elements to `put` as little-endian bytes, piece by piece and in order.
    pub fn for_each_piece(&self, mut put: impl FnMut(&[u8])) {
        let mut narrow = Vec::new();
        for piece in self.output.slices(self.queries) {
            if self.dtype == Dtype::F32 {
                // In memory as on the wire, since both are little-endian.
                put(bytemuck::cast_slice(piece));
                continue;
            }
            narrow.clear();
            self.dtype.append(piece, &mut narrow);
            put(&narrow);
        }
    }
}
