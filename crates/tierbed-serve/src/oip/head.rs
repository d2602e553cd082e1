//! The JSON of an inference request, and where it ends.

use std::borrow::Cow;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue};
use serde::de::IgnoredAny;
use serde::Deserialize;
use serde_json::value::RawValue;
use tierbed_core::{Error, Result};

use crate::job::HEADER_LENGTH;

/// Largest head that is searched for a `timeout` before the request waits for a place: an async
/// thread reads no more than this.
const SEARCHED_BYTES_MAX: usize = 64 << 10;

/// An inference request without its binary tensors. What is not named here is ignored.
#[derive(Debug, Deserialize)]
pub(super) struct Head<'a> {
    pub(super) id: Option<String>,
    #[serde(default)]
    pub(super) parameters: Option<Parameters>,
    #[serde(borrow)]
    pub(super) inputs: Vec<Input<'a>>,
    pub(super) outputs: Option<Vec<Output>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Parameters {
    pub(super) pooling: Option<String>,
    pub(super) output_dtype: Option<String>,
    /// Microseconds.
    pub(super) timeout: Option<u64>,
    pub(super) binary_data_output: Option<bool>,
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
pub(super) struct Output {
    pub(super) name: String,
    #[serde(default)]
    pub(super) parameters: Option<OutputParameters>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct OutputParameters {
    pub(super) binary_data: Option<bool>,
    classification: Option<IgnoredAny>,
    shared_memory_region: Option<IgnoredAny>,
}

impl Output {
    /// Tells whether the output is wanted as binary data; `default` where it does not say.
    ///
    /// # Errors
    /// `Invalid` for extensions that change the answer and are not there.
    pub(super) fn is_binary(&self, default: bool) -> Result<bool> {
        let Some(parameters) = &self.parameters else { return Ok(default) };
        if parameters.classification.is_some() || parameters.shared_memory_region.is_some() {
            return Err(Error::invalid("classification and shared memory are not supported")
                .with("output", &self.name)
                .with("remedy", "ask for the tensor itself"));
        }
        Ok(parameters.binary_data.unwrap_or(default))
    }
}

/// A body's JSON, and the binary tensors behind it.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) json: Bytes,
    pub(super) binary: Bytes,
}

impl Parts {
    /// Cuts a body where its header says.
    ///
    /// # Errors
    /// `Invalid` for a length that is no number, or longer than the body.
    pub(super) fn cut(headers: &HeaderMap, body: &Bytes) -> Result<Self> {
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

    /// Returns the request's own time in microseconds, where it has one and is not too large to
    /// be searched for it.
    pub(super) fn timeout_us(&self) -> Option<u64> {
        #[derive(Deserialize)]
        struct Timed {
            parameters: Option<Parameters>,
        }
        let is_searched = self.json.len() <= SEARCHED_BYTES_MAX;
        let word = b"\"timeout\"";
        if !is_searched || !self.json.windows(word.len()).any(|found| found == word) {
            return None;
        }
        // What is no JSON is refused where it is decoded.
        let timed = serde_json::from_slice::<Timed>(&self.json).ok()?;
        timed.parameters?.timeout.filter(|us| *us > 0)
    }

    /// Decodes the JSON.
    ///
    /// # Errors
    /// `Invalid` for anything but the protocol's form.
    pub(super) fn head(&self) -> Result<Head<'_>> {
        serde_json::from_slice(&self.json).map_err(|cause| {
            Error::invalid("failed to parse the request JSON")
                .with("expected", r#"{"inputs": [{"name", "shape", "datatype", "data"}]}"#)
                .with("cause", cause)
        })
    }
}
