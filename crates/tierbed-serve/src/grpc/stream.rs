//! Inference calls of many messages: `ModelStreamInfer`, an extension of Triton.
//!
//! ```text
//! messages ─▶ a task each, answered beside each other ─▶ answers, in the order of the messages
//! ```
//!
//! Each message is a request: with its own time, place, log line and count. A request that is
//! refused is answered in its turn, and the call goes on; a message that cannot be read ends it.

use std::convert::Infallible;
use std::future::{poll_fn, Future};
use std::pin::{pin, Pin};
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request as HttpRequest, State};
use axum::http::{header, HeaderMap, HeaderValue};
use axum::response::Response;
use hyper::body::Frame;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Sleep;

use super::call::{made, Call as Asking};
use super::calls::{Call, Calls};
use super::message::{Addressed, TYPE};
use super::messages::Messages;
use super::reply::{self, Framed};
use super::{status, ENCODING, STREAM};
use crate::answer::Refusal;
use crate::body::Held;
use crate::coding::Coding;
use crate::job::Made;
use crate::origin::Origin;
use crate::routes::{counted, BodyBytes, Deadline, Service, Shared};
use crate::spans;

/// Requests of a call that are worked on or wait to be taken; the client's others are not read.
const REQUESTS_MAX: usize = 32;

/// Answers a call of many messages.
pub(super) async fn answer(State(service): Shared, request: HttpRequest) -> Response {
    begin(service, request).unwrap_or_else(status::told)
}

fn begin(service: Arc<Service>, request: HttpRequest) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    let coding = Coding::given(&head.headers, ENCODING.as_str())?;
    let time_us = status::timeout_us(&head.headers)?;
    let Some(calls) = head.extensions.get::<Arc<Calls>>().cloned() else {
        panic!("a call belongs to a connection");
    };
    // One more is the next to be taken.
    let (answers, waiting) = mpsc::channel(REQUESTS_MAX - 1);
    let messages = Messages::new(body);
    let answered = Arc::clone(&service);
    tokio::spawn(Reader { service, calls, headers: head.headers, coding, messages }.run(answers));
    let end = time_us.map(|us| Box::pin(tokio::time::sleep(Duration::from_micros(us))));
    let body =
        Answers { service: answered, waiting, next: None, taken: None, end, has_ended: false };
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(TYPE));
    Ok(response)
}

/// What comes of a call, in order.
enum Item {
    Answer(Answering),
    /// There are no more messages, or the next cannot be read.
    End(Result<(), Refusal>),
}

/// A request that is worked on; dropped, it is no more.
struct Answering(JoinHandle<Answered>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Answered {
    id: String,
    made: Result<Made, Refusal>,
    /// Ends when the client has taken the answer.
    call: Call,
}

/// Reads messages, and begins to answer each.
struct Reader {
    service: Arc<Service>,
    calls: Arc<Calls>,
    headers: HeaderMap,
    coding: Option<Coding>,
    messages: Messages,
}

impl Reader {
    async fn run(mut self, answers: mpsc::Sender<Item>) {
        let end = self.read(&answers).await;
        // A client that has left does not miss it.
        let _ = answers.send(Item::End(end)).await;
    }

    async fn read(&mut self, answers: &mpsc::Sender<Item>) -> Result<(), Refusal> {
        let (_, mut before) = oneshot::channel();
        loop {
            // Whoever does not take answers is not read.
            let Ok(place) = answers.reserve().await else { return Ok(()) };
            let mut held = self.service.buffers.hold_nothing();
            let Some(framed) = self.next(&mut held).await? else { return Ok(()) };
            self.service.metrics.body_bytes.inc_by(framed.bytes.len() as u64);
            let call = self.calls.begin(true);
            let asking = spans::Call::Grpc { path: STREAM };
            let origin = self.service.spans.origin(&self.headers, asking);
            let asked = Asked { framed, held, coding: self.coding, origin };
            let (done, after) = oneshot::channel();
            let service = Arc::clone(&self.service);
            let earlier = std::mem::replace(&mut before, after);
            place.send(Item::Answer(Answering(tokio::spawn(async move {
                let (id, made) = asked.answer(&service).await;
                // From now on the client takes it, when those before it are made.
                let _ = earlier.await;
                call.is_answered();
                drop::<oneshot::Sender<()>>(done);
                Answered { id, made, call }
            }))));
        }
    }

    /// Returns the next message; a server that stops waits for none.
    async fn next(&mut self, held: &mut Held) -> Result<Option<Framed>, Refusal> {
        let mut stopping = self.service.stopping.clone();
        let mut is_stopping = pin!(stopping.wait_for(|&stop| stop));
        let mut next = pin!(self.messages.next(&self.service.limits, held));
        poll_fn(|cx| {
            if is_stopping.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(Refusal::busy("stopping", "the server stops")));
            }
            next.as_mut().poll(cx)
        })
        .await
    }
}

/// A request whose message has arrived.
struct Asked {
    framed: Framed,
    held: Held,
    coding: Option<Coding>,
    origin: Origin,
}

impl Asked {
    /// Answers the request within its time; its id is that of the message.
    async fn answer(self, service: &Arc<Service>) -> (String, Result<Made, Refusal>) {
        let Self { framed, mut held, coding, origin } = self;
        let (start_us, body_bytes) = (service.clock.now_us(), framed.bytes.len() as u64);
        let time = Duration::from_millis(service.limits.request_ms_max);
        let deadline = Deadline(start_us.saturating_add(service.limits.request_ms_max * 1_000));
        let mut id = String::new();
        let asking = async {
            let message = framed.plain(service.limits.body_bytes_max, coding, &mut held).await?;
            let addressed: Addressed = reply::decode(message.clone())?;
            id.clone_from(&addressed.id);
            let (route, told_as) = (STREAM, None);
            let origin = &origin;
            let asking = Asking { route, start_us, deadline, origin, body_bytes, held, told_as };
            made(service, asking, addressed, message).await
        };
        let mut answered = None;
        let answering = async {
            let late = |_| Err(Refusal::late(format!("request took longer than {time:?}")));
            let made = tokio::time::timeout(time, asking).await.unwrap_or_else(late);
            let refusal = made.as_ref().err().cloned();
            let mut response = refusal.map_or_else(Response::default, status::told);
            response.extensions_mut().insert(BodyBytes(body_bytes));
            answered = Some(made);
            response
        };
        counted(service, STREAM, &origin, answering).await;
        let Some(made) = answered else { panic!("a request is answered when it is counted") };
        (id, made)
    }
}

/// The answers of a call on their way.
struct Answers {
    service: Arc<Service>,
    waiting: mpsc::Receiver<Item>,
    next: Option<Answering>,
    taken: Option<Taken>,
    /// When the client's time for the whole call is over.
    end: Option<Pin<Box<Sleep>>>,
    has_ended: bool,
}

/// An answer that the client takes.
struct Taken {
    parts: std::vec::IntoIter<Bytes>,
    _held: Option<Held>,
    _call: Option<Call>,
}

impl Answers {
    fn told(&self, answered: Result<Answered, tokio::task::JoinError>) -> Taken {
        let (id, made, call) = match answered {
            Ok(Answered { id, made, call }) => (id, made, Some(call)),
            Err(error) => {
                let refusal = match error.try_into_panic() {
                    Ok(panic) => self.service.panicked(&*panic),
                    Err(_) => Refusal::busy("stopping", "the server stops"),
                };
                (String::new(), Err(refusal), None)
            }
        };
        let (parts, held) = match made {
            Ok(made) => (reply::within_stream(&made.body.bytes).to_vec(), Some(made.held)),
            Err(refusal) => (vec![reply::refused_in_stream(id, refusal.message())], None),
        };
        Taken { parts: parts.into_iter(), _held: held, _call: call }
    }

    /// Returns the next part of an answer, or how the call ends.
    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Result<(), Refusal>>> {
        loop {
            if let Some(taken) = &mut self.taken {
                if let Some(part) = taken.parts.next() {
                    return Poll::Ready(Ok(part));
                }
                self.taken = None;
            }
            if self.end.as_mut().is_some_and(|end| end.as_mut().poll(cx).is_ready()) {
                let late = Refusal::late("the time of the call is over");
                return Poll::Ready(Err(Err(late)));
            }
            if let Some(Answering(next)) = &mut self.next {
                let answered = ready!(Pin::new(next).poll(cx));
                self.taken = Some(self.told(answered));
                self.next = None;
                continue;
            }
            match ready!(self.waiting.poll_recv(cx)) {
                Some(Item::Answer(next)) => self.next = Some(next),
                Some(Item::End(end)) => return Poll::Ready(Err(end)),
                None => return Poll::Ready(Err(Err(self.service.panicked(&"no end of a call")))),
            }
        }
    }
}

impl hyper::body::Body for Answers {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let frame = match ready!(self.poll_part(cx)) {
            Ok(part) => Frame::data(part),
            Err(end) => {
                self.has_ended = true;
                self.waiting.close();
                Frame::trailers(end.map_or_else(status::trailers, |()| reply::trailers()))
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }
}
