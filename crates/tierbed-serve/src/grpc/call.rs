//! Methods of the inference service.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, Path, Request as HttpRequest, State};
use axum::http::HeaderValue;
use axum::response::Response;

use super::message::{request, Addressed};
use super::pb::{
    ModelConfigRequest, ModelMetadataRequest, ModelReadyRequest, ModelStatisticsRequest,
};
use super::reply::{decode, told, whole, Framed};
use super::{about, status, ENCODING, INFER};
use crate::answer::Refusal;
use crate::body::{Held, Received};
use crate::coding::{Coding, Pack};
use crate::job::Made;
use crate::oip::infer::{self, Asked};
use crate::oip::model::Kind;
use crate::origin::Origin;
use crate::routes::work::received;
use crate::routes::{BodyBytes, Deadline, Service, Shared};

/// Answers a call of one message by one.
pub(super) async fn answer(
    State(service): Shared,
    Path(method): Path<String>,
    Extension(deadline): Extension<Deadline>,
    Extension(origin): Extension<Arc<Origin>>,
    request: HttpRequest,
) -> Response {
    let start_us = service.clock.now_us();
    let mut body_bytes = 0;
    let answering = async {
        let headers = request.headers();
        let coding = Coding::given(headers, ENCODING.as_str())?;
        let told_as = coding.filter(|coding| coding.is_read(headers));
        let Received { bytes, mut held } = received(&service, request).await?;
        body_bytes = bytes.len() as u64;
        let bytes_max = service.limits.body_bytes_max;
        let message = Framed::only(&bytes)?.plain(bytes_max, coding, &mut held).await?;
        match method.as_str() {
            "ModelInfer" => {
                let (route, origin) = (INFER, &*origin);
                let call = Call { route, start_us, deadline, origin, body_bytes, held, told_as };
                let addressed: Addressed = decode(message.clone())?;
                let made = made(&service, call, addressed, message).await?;
                Ok(told_whole(made, told_as))
            }
            _ => described(&service, &method, message),
        }
    };
    let mut response = answering.await.unwrap_or_else(status::told);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
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
    /// The coding of the answer: that of the question, where the client reads it.
    pub(super) told_as: Option<Coding>,
}

/// Answers a request for inference.
///
/// # Errors
/// Those of [`infer::answer`]; 404 for an unknown model.
pub(super) async fn made(
    service: &Arc<Service>,
    call: Call<'_>,
    addressed: Addressed,
    message: Bytes,
) -> Result<Made, Refusal> {
    let Call { route, start_us, deadline, origin, body_bytes, held, told_as } = call;
    origin.name(&addressed.id);
    let kind = kind(service, &addressed.model_name, &addressed.model_version)?;
    let hurry = addressed.hurry()?;
    let pack = told_as.map(Pack::Message);
    let asked = Asked { route, kind, start_us, deadline, hurry, body_bytes, pack };
    let made = infer::answer(service, asked, move || request(message.clone()), held).await;
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(made.as_ref().ok().map(|made| &made.phases), us);
    made
}

fn told_whole(made: Made, told_as: Option<Coding>) -> Response {
    let mut response = whole(made.body.bytes);
    if let Some(coding) = told_as {
        response.headers_mut().insert(ENCODING, HeaderValue::from_static(coding.name()));
    }
    response.extensions_mut().insert(Arc::new(made.held));
    response
}
