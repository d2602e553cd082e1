//! The two routes of almost all requests, without the router and its layers.
//!
//! ```text
//! head ─▶ one of the two? ─▶ token ─▶ time ─▶ body, work ─▶ counts, log ─▶ answer
//!           └ no ─▶ router ─▶ layer: token, time ─▶ handler ─▶ counts, log ─▶ answer
//! ```
//!
//! `POST /v1/lookup` and `POST /v2/models/<model>/infer` are answered by the functions that the
//! router's handlers call: tokens, times, bodies, statuses, counts and lines of the log are the
//! same. What is left out is boxes, copies of heads, and the search for a handler. Bodies that are
//! compressed, and names that are not those of models, are the router's.

use std::sync::Arc;

use axum::body::{to_bytes, Body, Bytes};
use axum::http::{header, Method, Request, Response, StatusCode};
use axum::response::IntoResponse;

use super::work::{self, Asking, LOOKUP};
use super::{Counting, Service, Time};
use crate::answer::Refusal;
use crate::body::{Arriving, Coming, Held};
use crate::connection::{Callee, Protocol};
use crate::job::Made;
use crate::log::Told;
use crate::oip::infer::{inferred, Begun};
use crate::oip::model::Kind;
use crate::oip::{self, INFER};
use crate::origin::Origin;
use crate::sending::Streamed;
use crate::spans::Call;
use crate::tokens::Scope;
use crate::wire::Pulse;

/// A route that is often asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hot {
    Lookup,
    Infer(Kind),
}

impl Hot {
    /// Finds the route of a request; `None` is for the router to answer.
    pub(crate) fn of<B>(callee: &Callee, request: &Request<B>) -> Option<Self> {
        let is_ours = callee.protocol == Protocol::Http && request.method() == Method::POST;
        if !is_ours || request.headers().contains_key(header::CONTENT_ENCODING) {
            return None;
        }
        let path = request.uri().path();
        if path == LOOKUP {
            return Some(Self::Lookup);
        }
        let name = path.strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
        let service = &callee.service;
        service.kinds().find(|kind| service.models.name(*kind) == name).map(Self::Infer)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Lookup => LOOKUP,
            Self::Infer(_) => INFER,
        }
    }

    /// Returns its route in the router's words.
    fn pattern(self) -> &'static str {
        match self {
            Self::Lookup => LOOKUP,
            Self::Infer(_) => "/v2/models/{model}/infer",
        }
    }

    /// Answers a request, and counts it.
    pub(crate) async fn answer(
        self,
        service: &Service,
        request: Request<impl Coming>,
        pulse: &Pulse,
    ) -> Outgoing {
        let (head, body) = request.into_parts();
        let (headers, route) = (&head.headers, self.name());
        let (method, path) = (&head.method, head.uri.path());
        let call = Call::Http { method, path, route: Some(self.pattern()) };
        let origin = service.spans.origin(headers, call);
        let counting = Counting::begin(service, route, &origin);
        let mut body_bytes = 0;
        let arriving = Arriving { headers, body, pulse: Some(pulse) };
        let made = self.made(service, arriving, &origin, &mut body_bytes).await;
        let (status, refusal) = match &made {
            Ok(_) => (StatusCode::OK, None),
            Err(refusal) => (refusal.status(), Some(refusal)),
        };
        let status = status.as_u16();
        let us = counting.end(status, refusal);
        service.note(Told { route, status, us, body_bytes, origin: &origin }, refusal);
        let mut outgoing = match made {
            Ok(made) => Outgoing::made(made),
            Err(refusal) => self.refused(refusal).await,
        };
        origin.tell(outgoing.head.headers_mut());
        outgoing
    }

    async fn made(
        self,
        service: &Service,
        arriving: Arriving<'_, impl Coming>,
        origin: &Origin,
        body_bytes: &mut u64,
    ) -> Result<Made, Refusal> {
        service.authorize(arriving.headers, Some(Scope::Infer))?;
        let time = Time::of(service, None, arriving.headers)?;
        let deadline = time.deadline;
        match self {
            Self::Lookup => {
                let asking = Asking { deadline, origin };
                time.wait(work::lookup(service, asking, arriving, body_bytes)).await?
            }
            Self::Infer(kind) => {
                let begun = Begun { kind, deadline, origin };
                time.wait(inferred(service, begun, arriving, body_bytes)).await?
            }
        }
    }

    /// Words a refusal as the router's answers do.
    async fn refused(self, refusal: Refusal) -> Outgoing {
        let response = refusal.into_response();
        let response = if oip::is_ours(self.name()) { oip::worded(response) } else { response };
        Outgoing::of(response).await
    }
}

/// An answer as it goes to its connection.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) head: Response<()>,
    pub(crate) body: Going,
}

/// The body of an answer that goes to its connection.
#[derive(Debug)]
pub(crate) enum Going {
    Whole {
        bytes: Bytes,
        /// The memory that it takes.
        held: Option<Held>,
    },
    /// It comes over time.
    Stream(Body),
}

impl Outgoing {
    fn made(Made { body, held, phases }: Made) -> Self {
        let mut head = Response::new(());
        body.tell(head.headers_mut());
        phases.tell(head.headers_mut());
        Self { head, body: Going::Whole { bytes: body.bytes, held: Some(held) } }
    }

    /// Takes an answer of the router.
    pub(crate) async fn of(response: Response<Body>) -> Self {
        let (mut head, body) = response.into_parts();
        head.extensions.remove::<Refusal>();
        let held = head.extensions.remove::<Arc<Held>>().and_then(Arc::into_inner);
        let body = if head.extensions.remove::<Streamed>().is_some() {
            Going::Stream(body)
        } else {
            // All others are whole; a body that is not would be a mistake of ours.
            let bytes = to_bytes(body, usize::MAX).await.unwrap_or_else(|_| {
                head.status = StatusCode::INTERNAL_SERVER_ERROR;
                Bytes::new()
            });
            Going::Whole { bytes, held }
        };
        Self { head: Response::from_parts(head, ()), body }
    }
}
