//! The JSON of an inference request, and where it ends.

use std::borrow::Cow;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue};
use serde::de::IgnoredAny;
use serde::Deserialize;
use serde_json::value::RawValue;
use tierbed_core::{Error, Result};

use super::inputs;
use super::request::{check_once, unsupported, Form, Hurry, Named, Request};
use crate::job::HEADER_LENGTH;
use crate::origin::Origin;

/// Largest head that is searched for `id`, `timeout` and `priority` before the request waits: an
/// async thread reads no more than this.
const SEARCHED_BYTES_MAX: usize = 64 << 10;

/// An inference request without its binary tensors. What is not named here is ignored.
#[derive(Debug, Deserialize)]
struct Head<'a> {
    id: Option<String>,
    #[serde(default)]
    parameters: Option<Parameters>,
    #[serde(borrow)]
    inputs: Vec<Input<'a>>,
    outputs: Option<Vec<Output>>,
}

#[derive(Debug, Default, Deserialize)]
struct Parameters {
    pooling: Option<String>,
    output_dtype: Option<String>,
    /// Microseconds.
    timeout: Option<u64>,
    priority: Option<u64>,
    generation: Option<String>,
    binary_data_output: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Input<'a> {
    #[serde(borrow)]
    pub(super) name: Cow<'a, str>,
    pub(super) shape: Vec<usize>,
    #[serde(borrow)]
    pub(super) datatype: Cow<'a, str>,
    #[serde(default)]
    pub(super) parameters: Option<InputParameters>,
    #[serde(borrow)]
    pub(super) data: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct InputParameters {
    pub(super) binary_data_size: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Output {
    name: String,
    #[serde(default)]
    parameters: Option<OutputParameters>,
}

#[derive(Debug, Default, Deserialize)]
struct OutputParameters {
    binary_data: Option<bool>,
    classification: Option<IgnoredAny>,
    shared_memory_region: Option<IgnoredAny>,
}

impl Output {
    /// Names the output; it is binary data by `default` where it does not say.
    ///
    /// # Errors
    /// `Invalid` for extensions that change the answer and are not there.
    fn named(self, default: bool) -> Result<Named> {
        let Self { name, parameters } = self;
        let parameters = parameters.unwrap_or_default();
        if parameters.classification.is_some() || parameters.shared_memory_region.is_some() {
            return Err(unsupported(&name));
        }
        Ok(Named { name, is_binary: parameters.binary_data.unwrap_or(default) })
    }
}

/// A body's JSON, and the binary tensors behind it.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    pub(crate) json: Bytes,
    pub(crate) binary: Bytes,
}

impl Parts {
    /// Cuts a body where its header says.
    ///
    /// # Errors
    /// `Invalid` for a length that is no number, or longer than the body.
    pub(crate) fn cut(headers: &HeaderMap, body: &Bytes) -> Result<Self> {
        let text = match headers.get(HEADER_LENGTH).map(HeaderValue::to_str) {
            None => return Ok(Self { json: body.clone(), binary: Bytes::new() }),
            Some(text) => text.unwrap_or("not ASCII"),
        };
        match text.parse::<usize>() {
            Ok(length) if length <= body.len() => {
                Ok(Self { json: body.slice(..length), binary: body.slice(length..) })
            }
            _ => Err(Error::invalid("Inference-Header-Content-Length does not fit the body")
                .with("found", format_args!("{text:?}"))
                .with("body_bytes", body.len())),
        }
    }

    /// Returns the request's own time and priority, and the generation that it wants, and names it,
    /// where the JSON is not too large to be searched for these.
    pub(crate) fn search(&self, origin: &Origin) -> (Hurry, Option<String>) {
        #[derive(Default, Deserialize)]
        struct Found {
            id: Option<String>,
            parameters: Option<Parameters>,
        }
        let words: [&[u8]; 4] = [b"id", b"timeout", b"priority", b"generation"];
        let mut quoted = self.json.split(|byte| *byte == b'"');
        let is_searched = self.json.len() <= SEARCHED_BYTES_MAX;
        if !is_searched || !quoted.any(|found| words.contains(&found)) {
            return (Hurry::default(), None);
        }
        // What is no JSON is refused where it is decoded.
        let Found { id, parameters } = serde_json::from_slice(&self.json).unwrap_or_default();
        if let Some(id) = id {
            origin.name(&id);
        }
        let parameters = parameters.unwrap_or_default();
        (Hurry::new(parameters.timeout, parameters.priority), parameters.generation)
    }

    /// Decodes the request.
    ///
    /// # Errors
    /// `Invalid` for anything but the protocol's form.
    pub(crate) fn request(&self) -> Result<Request> {
        let head = serde_json::from_slice(&self.json).map_err(|cause| {
            Error::invalid("failed to parse the request JSON")
                .with("expected", r#"{"inputs": [{"name", "shape", "datatype", "data"}]}"#)
                .with("cause", cause)
        });
        let Head { id, parameters, inputs, outputs } = head?;
        let Parameters { pooling, output_dtype, binary_data_output, .. } =
            parameters.unwrap_or_default();
        let is_binary = binary_data_output.unwrap_or(false);
        let outputs = outputs.unwrap_or_default().into_iter();
        let outputs: Vec<_> =
            outputs.map(|output| output.named(is_binary)).collect::<Result<_>>()?;
        check_once(&outputs)?;
        Ok(Request {
            id,
            pooling,
            output_dtype,
            tensors: inputs::read(inputs, self.binary.clone())?,
            outputs,
            takes_all: false,
            is_ragged: false,
            is_binary,
            raw_bytes: self.binary.len(),
            form: Form::Json,
        })
    }
}
