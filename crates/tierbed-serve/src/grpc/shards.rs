//! What gateways ask of a shard: which generations answer, and all of them but the rows.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::Request as HttpRequest;
use axum::response::Response;
use tierbed_core::Error;

use super::call::{only_message, OnlyMessage};
use super::reply::{decode, told};
use super::shard_pb::describe_response::{Attachment, Feature};
use super::shard_pb::generations_response::Generation;
use super::shard_pb::{
    AttachmentRequest, AttachmentResponse, DescribeRequest, DescribeResponse, GenerationsRequest,
    GenerationsResponse,
};
use super::status;
use crate::answer::Refusal;
use crate::body::Arriving;
use crate::oip::model::Kind;
use crate::routes::{BodyBytes, Service, Shared};

/// Bytes of an attachment in one answer.
const PART_BYTES: usize = 16 << 20;

/// Answers a call of one message by one.
pub(super) async fn answer(
    State(service): Shared,
    Path(method): Path<String>,
    request: HttpRequest<Body>,
) -> Response {
    let (head, body) = request.into_parts();
    let arriving = Arriving { headers: &head.headers, body, pulse: None };
    let mut body_bytes = 0;
    let answered = match only_message(&service, arriving, &mut body_bytes).await {
        Ok(OnlyMessage { message, .. }) => asked(&service, method, message).await,
        Err(refusal) => Err(refusal),
    };
    let mut response = answered.unwrap_or_else(status::told);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

/// Answers away from the threads that move bytes: attachments are read.
async fn asked(
    service: &Arc<Service>,
    method: String,
    message: Bytes,
) -> Result<Response, Refusal> {
    let service = Arc::clone(service);
    let work = move || match method.as_str() {
        "Generations" => Ok(told(&generations(&service, &decode(message)?)?)),
        "Describe" => Ok(told(&describe(&service, &decode(message)?)?)),
        "Attachment" => Ok(told(&attachment(&service, &decode(message)?)?)),
        _ => Err(status::unknown_method()),
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| {
        Err(Error::new(tierbed_core::ErrorKind::Io, panic.to_string()).into())
    })
}

fn generations(
    service: &Service,
    request: &GenerationsRequest,
) -> Result<GenerationsResponse, Refusal> {
    if !request.using.is_empty() {
        // To be asked for is to be kept.
        drop(service.answering.view_of(&request.using));
    }
    let mut response = GenerationsResponse {
        model: service.models.name(Kind::Rows).to_owned(),
        ..GenerationsResponse::default()
    };
    for view in service.answering.views() {
        let parts = service.generations.of(&view)?;
        let Some(tag) = parts.shard else { continue };
        (response.shard, response.shard_count) = (tag.shard, tag.shard_count);
        let identity = view.identity().to_string();
        let generation = Generation { identity, publish: tag.publish, delta: tag.delta };
        response.generations.push(generation);
    }
    Ok(response)
}

fn describe(service: &Service, request: &DescribeRequest) -> Result<DescribeResponse, Refusal> {
    let serving = service.serving(Some(&request.generation))?;
    let schema = serde_json::to_string(serving.view.schema())
        .map_err(|cause| Error::invalid("cannot encode the tables").with("cause", cause))?;
    let features = serving
        .parts
        .features
        .iter()
        .map(|feature| Feature { name: feature.name.clone(), table: feature.table_name.clone() });
    let attachments = serving
        .view
        .attachments()
        .iter()
        .map(|attachment| Attachment { name: attachment.name.clone(), bytes: attachment.bytes });
    Ok(DescribeResponse {
        schema,
        features: features.collect(),
        attachments: attachments.collect(),
    })
}

fn attachment(
    service: &Service,
    request: &AttachmentRequest,
) -> Result<AttachmentResponse, Refusal> {
    let serving = service.serving(Some(&request.generation))?;
    let bytes = serving.view.attachment(&request.name)?.ok_or_else(|| {
        Error::invalid("the generation has no such attachment").with("name", &request.name)
    })?;
    let bytes = Bytes::from(bytes);
    let start = usize::try_from(request.offset).unwrap_or(usize::MAX).min(bytes.len());
    let end = (start + PART_BYTES).min(bytes.len());
    Ok(AttachmentResponse { part: bytes.slice(start..end) })
}
