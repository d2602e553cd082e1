//! Bodies of `/v1/predict`: JSON and safetensors. See docs/reference/http.md.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Bytes;
use safetensors::tensor::{serialize, TensorView};
use safetensors::{Dtype, SafeTensors, View};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

use super::given::{Dense, Given, GivenIds};
use super::{Prepared, Scores};
use crate::answer::{Refusal, JSON};
use crate::body::Held;
use crate::columns::check_answer;
use crate::generation::Serving;
use crate::job::Body;
use crate::lookup::JSON_BYTES;
use crate::predictor::{Model, ModelOutput};
use crate::query::Ids;
use crate::tensors::SAFETENSORS;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    dense: Option<Vec<Vec<f32>>>,
    values: Vec<i64>,
    lengths: Option<Vec<i64>>,
}

/// Decodes a request, checks it, and finds the memory for its rows and its answer.
///
/// # Errors
/// 400 for what the model does not take or too much, 503 when there is no memory.
pub(crate) fn prepare(
    serving: &Serving<'_>,
    body: &Bytes,
    mut held: Held,
    is_binary: bool,
) -> std::result::Result<Prepared, Refusal> {
    let given = if is_binary { from_safetensors(body)? } else { from_json(body)? };
    let model = serving.model()?;
    let samples = given.check(serving, model)?;
    let outputs = model.predictor.outputs();
    let elements: usize = outputs.iter().map(|output| output.len() * samples.count).sum();
    let answer_bytes = elements * if is_binary { size_of::<f32>() } else { JSON_BYTES };
    check_answer(answer_bytes, &serving.limits)?;
    held.resize(answer_bytes + samples.bytes())?;
    let (model, count) = (Arc::clone(model), samples.count);
    let encode = move |scores: Scores| {
        let told = told(&model, count, &scores);
        let bytes = if is_binary { to_safetensors(&told)? } else { to_json(&told)? };
        let body_type = if is_binary { SAFETENSORS } else { JSON };
        Ok(Body { bytes: bytes.into(), body_type, header_bytes: None, coding: None })
    };
    Ok(Prepared { samples, held, answer_bytes, encode: Box::new(encode) })
}

fn from_json(body: &[u8]) -> Result<Given> {
    let request = serde_json::from_slice(body).map_err(|cause| {
        Error::invalid("body is not the expected JSON")
            .with("expected", r#"{"dense": [[number, ...], ...], "values": [id, ...], "lengths"}"#)
            .with("cause", cause)
    })?;
    let Request { dense, values, lengths } = request;
    let dense = dense.map(matrix).transpose()?;
    let (values, lengths) = (Ids::Copied(values), lengths.map(Ids::Copied));
    Ok(Given { dense, ids: GivenIds::Bags { values, lengths } })
}

/// Puts rows of numbers behind each other.
fn matrix(rows: Vec<Vec<f32>>) -> Result<Dense> {
    let width = rows.first().map_or(0, Vec::len);
    let shape = [rows.len(), width];
    if let Some((at, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != width) {
        return Err(Error::invalid("rows of dense have different lengths")
            .with("row", at)
            .with("found", row.len())
            .with("expected", width));
    }
    let values: Vec<f32> = rows.into_iter().flatten().collect();
    // JSON's 1e39 is a number, but no 32-bit one.
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return Err(Error::invalid("dense has a number of more than 32 bits")
            .with("position", at)
            .with("expected", "-3.4e38 to 3.4e38"));
    }
    Ok(Dense { shape, values })
}

fn from_safetensors(body: &Bytes) -> Result<Given> {
    let tensors = SafeTensors::deserialize(body)
        .map_err(|cause| Error::invalid("body is not safetensors").with("cause", cause))?;
    let (mut dense, mut values, mut lengths) = (None, None, None);
    for (name, tensor) in tensors.iter() {
        match name {
            "dense" => dense = Some(floats(&tensor)?),
            "values" => values = Some(integers(name, &tensor, body)?),
            "lengths" => lengths = Some(integers(name, &tensor, body)?),
            _ => {
                return Err(Error::invalid("unknown tensor")
                    .with("tensor", name)
                    .with("expected", "dense, values, lengths"))
            }
        }
    }
    let values = values.ok_or_else(|| Error::invalid("the request lacks values"))?;
    Ok(Given { dense, ids: GivenIds::Bags { values, lengths } })
}

fn floats(tensor: &TensorView<'_>) -> Result<Dense> {
    let (Dtype::F32, [rows, columns]) = (tensor.dtype(), tensor.shape()) else {
        return Err(misshapen("dense", tensor, "F32 of two dimensions"));
    };
    // Tensors in a body lie at any address: copied, not cast.
    let (words, _) = tensor.data().as_chunks();
    let values = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
    Ok(Dense { shape: [*rows, *columns], values })
}

fn integers(name: &str, tensor: &TensorView<'_>, body: &Bytes) -> Result<Ids> {
    match (tensor.dtype(), tensor.shape().len()) {
        (Dtype::I64, 1) => Ok(Ids::from_le(body.slice_ref(tensor.data()))),
        _ => Err(misshapen(name, tensor, "I64 of one dimension")),
    }
}

fn misshapen(name: &str, tensor: &TensorView<'_>, expected: &str) -> Error {
    Error::invalid("tensor has another type or shape")
        .with("tensor", name)
        .with("expected", expected)
        .with("found", format_args!("{:?} of {:?}", tensor.dtype(), tensor.shape()))
}

/// An output of the model for the samples of a request.
struct Told<'a> {
    output: &'a ModelOutput,
    shape: Vec<usize>,
    elements: &'a [f32],
}

fn told<'a>(model: &'a Model, count: usize, scores: &'a [Vec<f32>]) -> Vec<Told<'a>> {
    let outputs = model.predictor.outputs().iter().zip(scores);
    let told = outputs.map(|(output, elements)| {
        let shape = [count].into_iter().chain(output.width).collect();
        Told { output, shape, elements }
    });
    told.collect()
}

impl Serialize for Told<'_> {
    /// Elements that are not finite become null, as JSON has no word for them.
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.output.width {
            None => serializer.collect_seq(self.elements),
            Some(width) => serializer.collect_seq(self.elements.chunks_exact(width)),
        }
    }
}

/// The outputs of an answer, by name.
struct Answer<'a>(&'a [Told<'a>]);

impl Serialize for Answer<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|told| (&told.output.name, told)))
    }
}

fn to_json(told: &[Told<'_>]) -> Result<Vec<u8>> {
    serde_json::to_vec(&Answer(told)).map_err(|cause| not_encoded(&cause))
}

impl View for &Told<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(bytemuck::cast_slice(self.elements))
    }

    fn data_len(&self) -> usize {
        size_of_val(self.elements)
    }
}

fn to_safetensors(told: &[Told<'_>]) -> Result<Vec<u8>> {
    let named = told.iter().map(|told| (told.output.name.as_str(), told));
    serialize(named, None).map_err(|cause| not_encoded(&cause))
}

fn not_encoded(cause: &dyn std::error::Error) -> Error {
    Error::invalid("cannot encode the answer").with("cause", cause)
}
