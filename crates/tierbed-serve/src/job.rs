//! Jobs: what a request wants done away from the async threads, in steps.
//!
//! ```text
//! body ─▶ decode, check ─▶ Prepared: queries with room ─▶ look up ─▶ encode ─▶ Made
//! ```
//!
//! A lookup that was prepared where it was received, and must wait after all, waits prepared. When
//! its turn comes in another generation, it is prepared anew.

use std::fmt;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::{header, HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use tierbed_snapshot::{Begun, LookupStats};
use tokio::sync::{oneshot, OwnedSemaphorePermit};

use crate::answer::Refusal;
use crate::body::Held;
use crate::coding::{Coding, Pack};
use crate::generation::{Parts, Serving};
use crate::pending::Awaited;
use crate::predict;
use crate::query::Query;
use crate::spans::Steps;

/// The header that says where the JSON of a body ends and its binary tensors begin.
pub(crate) const HEADER_LENGTH: HeaderName =
    HeaderName::from_static("inference-header-content-length");

/// The header that counts rows whose shard did not answer, for which initial values stand.
pub(crate) const DEFAULT_ROWS: HeaderName = HeaderName::from_static("tierbed-default-rows");

/// Makes the answer of looked up queries, or of scores.
pub(crate) type Encode<T = Vec<Query>> = Box<dyn FnOnce(T) -> Result<Body, Refusal> + Send>;

/// Decodes and checks a request, whose memory is given; as often as generations change meanwhile.
type Prepare<P> = Box<dyn Fn(&Serving<'_>, Held) -> Result<P, Refusal> + Send>;

/// A request that was decoded and checked.
pub(crate) trait Checked: Sized {
    /// Tells whether such requests may be answered by the thread that received them.
    fn may_be_quick(serving: &Serving<'_>) -> bool;

    /// Answers the request, or begins to read its pages, if it is small and nobody is waited for;
    /// else gives it back.
    ///
    /// # Errors
    /// Those of the work.
    fn at_once(self, serving: &Serving<'_>, steps: &Steps) -> Result<AtOnce<Self>, Refusal>;

    /// Returns the query that was begun.
    ///
    /// # Panics
    /// When there are several.
    fn query(&mut self) -> &mut Query;

    /// Answers from the rows, which have been found.
    ///
    /// # Errors
    /// Those of encoding, and of the model.
    fn found(
        self,
        stats: &LookupStats,
        serving: &Serving<'_>,
        steps: &Steps,
    ) -> Result<Answered, Refusal>;

    /// Goes on from a lookup that was begun.
    ///
    /// # Errors
    /// Those of [`found`](Self::found).
    fn begun(
        self,
        begun: Begun,
        serving: &Serving<'_>,
        steps: &Steps,
    ) -> Result<AtOnce<Self>, Refusal> {
        Ok(match begun {
            Begun::Left => AtOnce::Left(self),
            Begun::Pending(pages) => {
                AtOnce::Pending { prepared: self, awaited: Awaited::Pages(pages) }
            }
            Begun::Done(stats) => AtOnce::Answered(self.found(&stats, serving, steps)?),
        })
    }

    /// Gives the memory of the body back, to decode it again.
    fn into_held(self) -> Held;

    /// Packs the answer when it is encoded.
    fn packing(self, pack: Pack) -> Self;
}

/// What became of a request that shall not wait.
pub(crate) enum AtOnce<P> {
    Answered(Answered),
    /// Its rows are on their way.
    Pending {
        prepared: P,
        awaited: Awaited,
    },
    Left(P),
}

/// What a request is answered with.
pub(crate) struct Answered {
    pub(crate) body: Body,
    pub(crate) held: Held,
    pub(crate) sample_count: u64,
    /// When all was found and scored, and the answer was about to be encoded.
    pub(crate) found_us: u64,
}

/// What is to be done for a request. Each may be joined with others of its kind.
pub(crate) enum Work {
    Lookup(Waits<Prepared>),
    Prediction(Waits<predict::Prepared>),
}

/// A request that waits for a thread.
pub(crate) struct Waits<P> {
    prepare: Prepare<P>,
    stage: Stage<P>,
}

/// How far a request has come.
pub(crate) enum Stage<P> {
    /// Its body has arrived; with its memory.
    Received(Held),
    /// It is decoded and checked, in the generation whose parts these are.
    Prepared(Box<InGeneration<P>>),
}

/// A request as it is prepared in one generation.
pub(crate) struct InGeneration<P> {
    pub(crate) parts: Arc<Parts>,
    pub(crate) prepared: P,
}

impl<P: Checked + 'static> Waits<P> {
    /// Waits at `stage`, with what decodes its body.
    pub(crate) fn new(
        stage: Stage<P>,
        prepare: impl Fn(&Serving<'_>, Held) -> Result<P, Refusal> + Send + 'static,
    ) -> Self {
        Self { prepare: Box::new(prepare), stage }
    }

    /// Decodes and checks the request, unless that was done in the same generation.
    ///
    /// # Errors
    /// Those of decoding and checking.
    pub(crate) fn prepared(self, serving: &Serving<'_>) -> Result<P, Refusal> {
        let held = match self.stage {
            Stage::Received(held) => held,
            Stage::Prepared(before) if Arc::ptr_eq(&before.parts, &serving.parts) => {
                return Ok(before.prepared);
            }
            Stage::Prepared(before) => before.prepared.into_held(),
        };
        (self.prepare)(serving, held)
    }

    /// Packs the answer where it is encoded. What was prepared before has not been asked for that.
    fn packed(self, pack: Pack) -> Self {
        let Self { prepare, stage } = self;
        Self::new(stage, move |serving, held| Ok(prepare(serving, held)?.packing(pack)))
    }
}

impl Work {
    /// Returns what may be joined with it: work of the same kind.
    pub(crate) fn kind(&self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(self)
    }

    /// Packs the answer where it is encoded: away from the async threads.
    pub(crate) fn packed(self, pack: Option<Pack>) -> Self {
        let Some(pack) = pack else { return self };
        match self {
            Self::Lookup(waits) => Self::Lookup(waits.packed(pack)),
            Self::Prediction(waits) => Self::Prediction(waits.packed(pack)),
        }
    }
}

/// Packs what `encode` makes.
pub(crate) fn packing<T: 'static>(encode: Encode<T>, pack: Pack) -> Encode<T> {
    Box::new(move |answered| encode(answered)?.packed(pack))
}

/// A request that waits for a thread.
pub(crate) struct Job {
    pub(crate) route: &'static str,
    pub(crate) queued_us: u64,
    pub(crate) body_bytes: u64,
    /// When it must be answered, in microseconds of the server's clock.
    pub(crate) deadline_us: u64,
    /// The generation that it wants; `None`: the newest.
    pub(crate) generation: Option<Arc<str>>,
    pub(crate) work: Work,
    pub(crate) steps: Steps,
    pub(crate) done: Done,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("route", &self.route).finish_non_exhaustive()
    }
}

/// Where a request's answer goes, and the place it takes until then.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) place: OwnedSemaphorePermit,
    pub(crate) answer: oneshot::Sender<Result<Made, Refusal>>,
}

impl Done {
    /// Tells whether no caller waits any more: the client has left, or its time is over.
    pub(crate) fn is_closed(&self) -> bool {
        self.answer.is_closed()
    }

    pub(crate) fn send(self, made: Result<Made, Refusal>) {
        // Whoever gets the answer finds a place for the next request.
        drop(self.place);
        // A client that has left meanwhile does not miss it.
        let _ = self.answer.send(made);
    }
}

/// A request that was decoded and checked.
pub(crate) struct Prepared {
    /// With room for their answers.
    pub(crate) queries: Vec<Query>,
    /// The memory of body and answer.
    pub(crate) held: Held,
    pub(crate) sample_count: u64,
    /// Time that encoding takes, in elements that are copied.
    pub(crate) encode_cost: usize,
    pub(crate) encode: Encode,
}

/// Elements that are copied in the time that one is written as JSON.
pub(crate) const JSON_COST: usize = 16;

/// The body of an answer.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    pub(crate) body_type: &'static str,
    /// Bytes of the JSON before binary tensors.
    pub(crate) header_bytes: Option<usize>,
    pub(crate) coding: Option<Coding>,
}

impl Body {
    /// Writes what the head of an answer says of its body.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.body_type));
        if let Some(header_bytes) = self.header_bytes {
            headers.insert(HEADER_LENGTH, HeaderValue::from(header_bytes));
        }
        if let Some(coding) = self.coding {
            let name = HeaderValue::from_static(coding.name());
            headers.insert(header::CONTENT_ENCODING, name);
        }
    }

    /// Packs the bytes for their client.
    fn packed(self, pack: Pack) -> Result<Self, Refusal> {
        let bytes = pack.apply(&self.bytes)?;
        let coding = if let Pack::Body(coding) = pack { Some(coding) } else { None };
        Ok(Self { bytes, coding, ..self })
    }
}

/// An answer, and the memory it takes.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) body: Body,
    pub(crate) held: Held,
    pub(crate) phases: Phases,
}

impl IntoResponse for Made {
    fn into_response(self) -> Response {
        let mut response = Response::default();
        self.body.tell(response.headers_mut());
        self.phases.tell(response.headers_mut());
        *response.body_mut() = self.body.bytes.into();
        response.extensions_mut().insert(Arc::new(self.held));
        response
    }
}

/// How long the steps of a request took, in microseconds, and how much it asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Phases {
    pub(crate) queue_us: u64,
    pub(crate) input_us: u64,
    pub(crate) infer_us: u64,
    pub(crate) output_us: u64,
    pub(crate) sample_count: u64,
    /// Rows whose shard did not answer, for which initial values stand.
    pub(crate) default_rows: u64,
}

impl Phases {
    /// Writes what the head of an answer says of rows that are not those asked for.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        if self.default_rows > 0 {
            headers.insert(DEFAULT_ROWS, HeaderValue::from(self.default_rows));
        }
    }
}
