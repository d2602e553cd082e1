//! Methods of the inference service.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderValue, Request as HttpRequest};
use axum::response::Response;

use super::message::Addressed;
use super::pb::{
    ModelConfigRequest, ModelMetadataRequest, ModelReadyRequest, ModelStatisticsRequest,
};
use super::reply::{decode, told, whole, Framed};
use super::{about, status, ENCODING, INFER};
use crate::answer::Refusal;
use crate::body::{Arriving, Coming, Held, Received};
use crate::coding::{Coding, Pack};
use crate::job::Made;
use crate::oip::infer::{self, Asked};
use crate::oip::model::Kind;
use crate::oip::request::Encoded;
use crate::origin::Origin;
use crate::routes::work::received;
use crate::routes::{counted, BodyBytes, Deadline, Service, Shared, Time};
use crate::spans;
use crate::tokens::Scope;

/// Answers a call of one message by one: of all methods but `ModelInfer`.
pub(super) async fn answer(
    State(service): Shared,
    Path(method): Path<String>,
    request: HttpRequest<Body>,
) -> Response {
    let (head, body) = request.into_parts();
    let arriving = Arriving { headers: &head.headers, body, pulse: None };
    let mut body_bytes = 0;
    let answered = only_message(&service, arriving, &mut body_bytes).await;
    let answered =
        answered.and_then(|OnlyMessage { message, .. }| described(&service, &method, message));
    let mut response = answered.unwrap_or_else(status::told);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

/// Answers `ModelInfer`, which almost all calls are, beside the router: token, time, counts and
/// lines of the log are those of its layer.
pub(super) async fn infer(service: &Service, request: HttpRequest<impl Coming>) -> Response {
    let (head, body) = request.into_parts();
    let headers = &head.headers;
    let origin = service.spans.origin(headers, spans::Call::Grpc { path: INFER });
    let answering = async {
        let mut body_bytes = 0;
        let answered = async {
            service.authorize(headers, Some(Scope::Infer))?;
            let time = Time::of(service, status::timeout_us(headers)?, headers)?;
            let arriving = Arriving { headers, body, pulse: None };
            let inferring = inferred(service, time.deadline, &origin, arriving, &mut body_bytes);
            time.wait(inferring).await?
        };
        let mut response = answered.await.unwrap_or_else(status::told);
        response.extensions_mut().insert(BodyBytes(body_bytes));
        response
    };
    counted(service, INFER, &origin, answering).await
}

async fn inferred(
    service: &Service,
    deadline: Deadline,
    origin: &Origin,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Answered {
    let start_us = service.clock.now_us();
    let OnlyMessage { message, held, told_as } =
        only_message(service, arriving, body_bytes).await?;
    let (route, body_bytes) = (INFER, *body_bytes);
    let call = Call { route, start_us, deadline, origin, body_bytes, held, told_as };
    let addressed: Addressed = decode(message.clone())?;
    Ok(told_whole(made(service, call, addressed, message).await?, told_as))
}

/// The only message of a call.
pub(super) struct OnlyMessage {
    pub(super) message: Bytes,
    held: Held,
    /// The coding of the answer: that of the question, where the client reads it.
    told_as: Option<Coding>,
}

/// Receives the only message of a call; tells how long its body is, once that is known.
///
/// # Errors
/// 415 for an unknown coding, 400 for another number of messages; those of [`received`] and of
/// [`Framed::plain`].
pub(super) async fn only_message(
    service: &Service,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Result<OnlyMessage, Refusal> {
    let coding = Coding::given(arriving.headers, ENCODING.as_str())?;
    let told_as = coding.filter(|coding| coding.is_read(arriving.headers));
    let Received { bytes, mut held } = received(service, arriving).await?;
    *body_bytes = bytes.len() as u64;
    let bytes_max = service.limits.body_bytes_max;
    let message = Framed::only(&bytes)?.plain(bytes_max, coding, &mut held).await?;
    Ok(OnlyMessage { message, held, told_as })
}

type Answered = Result<Response, Refusal>;

fn described(service: &Arc<Service>, method: &str, message: Bytes) -> Answered {
    let kind = |name: &str, version: &str| kind(service, name, version);
    Ok(match method {
        "ServerLive" => told(&about::live()),
        "ServerReady" => told(&about::ready(service)),
        "ModelReady" => {
            let ModelReadyRequest { name, version } = decode(message)?;
            kind(&name, &version)?;
            told(&about::model_ready(service))
        }
        "ServerMetadata" => told(&about::server()),
        "ModelMetadata" => {
            let ModelMetadataRequest { name, version } = decode(message)?;
            told(&about::model(service, kind(&name, &version)?))
        }
        "ModelConfig" => {
            let ModelConfigRequest { name, version } = decode(message)?;
            told(&about::config(service, kind(&name, &version)?))
        }
        "ModelStatistics" => {
            let ModelStatisticsRequest { name, version } = decode(message)?;
            let one = (!name.is_empty()).then(|| kind(&name, &version)).transpose()?;
            told(&about::statistics(service, one))
        }
        "RepositoryIndex" => told(&about::index(service)),
        _ => return Err(status::unknown_method()),
    })
}

fn kind(service: &Service, name: &str, version: &str) -> Result<Kind, Refusal> {
    service.kind_of(name, Some(version).filter(|version| !version.is_empty()))
}

/// What is known of a request for inference beside its message.
pub(super) struct Call<'a> {
    pub(super) route: &'static str,
    pub(super) start_us: u64,
    pub(super) deadline: Deadline,
    pub(super) origin: &'a Origin,
    pub(super) body_bytes: u64,
    pub(super) held: Held,
    pub(super) told_as: Option<Coding>,
}

/// Answers a request for inference.
///
/// # Errors
/// Those of [`infer::answer`]; 404 for an unknown model.
pub(super) async fn made(
    service: &Service,
    call: Call<'_>,
    addressed: Addressed,
    message: Bytes,
) -> Result<Made, Refusal> {
    let Call { route, start_us, deadline, origin, body_bytes, held, told_as } = call;
    origin.name(&addressed.id);
    let kind = kind(service, &addressed.model_name, &addressed.model_version)?;
    let hurry = addressed.hurry()?;
    let pack = told_as.map(Pack::Message);
    let steps = &origin.steps;
    let generation = addressed.generation()?;
    let asked =
        Asked { route, kind, start_us, deadline, hurry, generation, body_bytes, pack, steps };
    let made = infer::answer(service, asked, Encoded::Message(message), held).await;
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(made.as_ref().ok().map(|made| &made.phases), us);
    made
}

fn told_whole(made: Made, told_as: Option<Coding>) -> Response {
    let mut response = whole(made.body.bytes);
    if let Some(coding) = told_as {
        response.headers_mut().insert(ENCODING, HeaderValue::from_static(coding.name()));
    }
    made.phases.tell(response.headers_mut());
    response.extensions_mut().insert(Arc::new(made.held));
    response
}
