//! An inference request in no protocol's form, and the form of its answer.

use axum::body::Bytes;
use tierbed_core::{Error, Result};

use super::head::Parts;
use super::inputs::Tensor;
use super::outputs::OCTETS;
use crate::admission::Priority;
use crate::grpc::message;
use crate::known::Cut;

/// A decoded inference request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: Option<String>,
    pub(crate) pooling: Option<String>,
    pub(crate) output_dtype: Option<String>,
    pub(crate) tensors: Vec<Tensor>,
    /// What is asked for; none: what the model answers by default.
    pub(crate) outputs: Vec<Named>,
    /// All is asked for that the inputs give, whatever is named.
    pub(crate) takes_all: bool,
    /// Features may have different numbers of samples.
    pub(crate) is_ragged: bool,
    /// Outputs that are not named are answered as binary data.
    pub(crate) is_binary: bool,
    /// Bytes of the body that tensors may lie in.
    pub(crate) raw_bytes: usize,
    pub(crate) form: Form,
}

/// An output that a request names.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) is_binary: bool,
}

/// A request as it came.
#[derive(Debug)]
pub(crate) enum Encoded {
    Json(Parts),
    Message(Bytes),
}

impl Encoded {
    /// Decodes the request.
    ///
    /// # Errors
    /// `Invalid` for anything but the protocol's form.
    pub(crate) fn request(&self) -> Result<Request> {
        match self {
            Self::Json(parts) => parts.request(),
            Self::Message(bytes) => message::request(bytes.clone()),
        }
    }

    /// Cuts it before its binary tensor, where there is one, last of all.
    pub(super) fn cut(&self) -> Option<Cut> {
        match self {
            Self::Json(Parts { json, binary }) => {
                Some(Cut { body_type: OCTETS, head: json.clone(), binary: binary.clone() })
            }
            Self::Message(bytes) => message::cut(bytes),
        }
    }
}

/// How an answer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// JSON, and binary tensors behind it.
    Json,
    /// A message of gRPC.
    Message,
}

/// How soon a request wants to be answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Hurry {
    /// The request's own time in microseconds.
    pub(crate) timeout_us: Option<u64>,
    pub(crate) priority: Priority,
}

impl Hurry {
    /// Of the parameters `timeout`, where 0 is none, and `priority`: 0 is normal, 1 high, more is
    /// low.
    pub(crate) fn new(timeout_us: Option<u64>, priority: Option<u64>) -> Self {
        let priority = match priority {
            Some(1) => Priority::High,
            Some(2..) => Priority::Low,
            Some(0) | None => Priority::Normal,
        };
        Self { timeout_us: timeout_us.filter(|us| *us > 0), priority }
    }
}

/// Extensions that would change an answer, and are not there.
///
/// # Errors
/// `Invalid`, naming the output.
pub(crate) fn unsupported(output: &str) -> Error {
    Error::invalid("classification and shared memory are not supported")
        .with("output", output)
        .with("remedy", "ask for the tensor itself")
}

/// Checks that no output is asked for twice.
///
/// # Errors
/// `Invalid`, naming it.
pub(crate) fn check_once(outputs: &[Named]) -> Result<()> {
    let is_known = |at: usize, name: &str| outputs.iter().take(at).any(|known| known.name == name);
    match outputs.iter().enumerate().find(|(at, output)| is_known(*at, &output.name)) {
        Some((_, output)) => {
            Err(Error::invalid("output occurs twice").with("output", &output.name))
        }
        None => Ok(()),
    }
}
