//! Predictions: the protocol's tensors as the safetensors that a [`Predictor`] takes, and back.

use std::borrow::Cow;

use safetensors::tensor::{serialize, TensorView};
use safetensors::{Dtype as Kinds, SafeTensors, View};
use tierbed_core::{Error, Result};

use super::inputs::Tensor;
use super::model::Kind;
use super::outputs::{Dtype, Origin, Output, Outputs};
use super::request::{Named, Request};
use super::rows::by_feature;
use crate::answer::Refusal;
use crate::body::Held;
use crate::columns::check_answer;
use crate::generation::Serving;
use crate::job::{Made, Phases};
use crate::server::Predictor;
use crate::tensors::SAFETENSORS;

/// What a model answers, in the order of the metadata.
const OUTPUTS: [&str; 2] = ["probability", "logit"];

/// Answers one request.
///
/// # Errors
/// 400 for what the model does not take, 500 when it fails, 503 when there is no memory.
pub(super) fn answer(
    service: &Serving<'_>,
    predictor: &dyn Predictor,
    decode: impl FnOnce() -> Result<Request>,
    mut held: Held,
) -> std::result::Result<Made, Refusal> {
    let start_us = service.clock.now_us();
    let Request { id, output_dtype, tensors, outputs, is_binary, form, .. } = decode()?;
    let dtype = Dtype::parse(output_dtype.as_deref())?;
    let dense_count = predictor.inputs().map(|inputs| inputs.dense_count);
    let body = request(tensors, dense_count)?;
    let read_us = service.clock.now_us();
    let (answer, _) = predictor.predict(&body, SAFETENSORS)?;
    let answered_us = service.clock.now_us();
    let answered = SafeTensors::deserialize(&answer).map_err(unreadable)?;
    let outputs = Outputs {
        id,
        model: service.models.name(Kind::Predictions).to_owned(),
        generation: service.parts.identity.to_string(),
        dtype,
        form,
        outputs: told(&answered, outputs, is_binary)?,
    };
    outputs.check()?;
    let answer_bytes = outputs.byte_count();
    check_answer(answer_bytes, &service.limits)?;
    held.resize(answer_bytes)?;
    let sample_count = outputs.outputs.first().map_or(0, |output| output.shape.iter().product());
    let body = outputs.encode(&[])?;
    let phases = Phases {
        input_us: read_us.saturating_sub(start_us),
        infer_us: answered_us.saturating_sub(read_us),
        output_us: service.clock.now_us().saturating_sub(answered_us),
        sample_count: sample_count as u64,
        ..Phases::default()
    };
    Ok(Made { body, held, phases })
}

/// One tensor for a predictor.
struct Given {
    dtype: Kinds,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Given {
    fn dtype(&self) -> Kinds {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn integers(ids: &[i64]) -> Given {
    Given { dtype: Kinds::I64, shape: vec![ids.len()], bytes: bytemuck::cast_slice(ids).to_vec() }
}

/// Makes the body for a predictor. A model without numerical features needs no `dense`.
fn request(tensors: Vec<Tensor>, dense_count: Option<usize>) -> Result<Vec<u8>> {
    let mut given: Vec<(&str, Given)> = Vec::new();
    let mut sample_count = None;
    for tensor in tensors {
        match tensor.name.as_str() {
            "dense" => {
                let shape = tensor.matrix()?.to_vec();
                let bytes = bytemuck::cast_slice(&tensor.floats()?).to_vec();
                given.push(("dense", Given { dtype: Kinds::F32, shape, bytes }));
            }
            "ids" => {
                let [samples, features] = tensor.matrix()?;
                sample_count = Some(samples);
                let ids = by_feature(tensor.integers()?, samples, features);
                given.push(("values", integers(&ids)));
            }
            name @ ("values" | "lengths") => {
                tensor.check_flat()?;
                let name = if name == "values" { "values" } else { "lengths" };
                given.push((name, integers(&tensor.integers()?)));
            }
            name => {
                return Err(Error::invalid("unknown input")
                    .with("tensor", name)
                    .with("expected", "dense, and ids or values and lengths"))
            }
        }
    }
    let has = |name: &str| given.iter().filter(|(known, _)| *known == name).count();
    if has("values") != 1 || (sample_count.is_some() && has("lengths") > 0) {
        return Err(Error::invalid("inputs must be of one form")
            .with("expected", "dense, and ids or values and lengths"));
    }
    if let (0, Some(0), Some(samples)) = (has("dense"), dense_count, sample_count) {
        let dense = Given { dtype: Kinds::F32, shape: vec![samples, 0], bytes: Vec::new() };
        given.push(("dense", dense));
    }
    serialize(given.iter().map(|(name, tensor)| (*name, tensor)), None)
        .map_err(|cause| Error::invalid("cannot encode the inputs").with("cause", cause))
}

/// Takes the outputs that a request names, or all, from what a predictor answered.
fn told(tensors: &SafeTensors<'_>, wanted: Vec<Named>, default: bool) -> Result<Vec<Output>> {
    let output = |name: &str, is_binary| {
        let tensor = tensors.tensor(name).map_err(unreadable)?;
        let (shape, values) = (tensor.shape().to_vec(), floats(&tensor)?);
        Ok(Output { name: name.to_owned(), shape, is_binary, from: Origin::Values(values) })
    };
    if wanted.is_empty() {
        return OUTPUTS.iter().map(|name| output(name, default)).collect();
    }
    let told = wanted.into_iter().map(|Named { name, is_binary }| {
        if OUTPUTS.contains(&name.as_str()) {
            return output(&name, is_binary);
        }
        Err(Error::invalid("unknown output")
            .with("output", name)
            .with("expected", OUTPUTS.join(", ")))
    });
    told.collect()
}

fn floats(tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    if tensor.dtype() != Kinds::F32 {
        return Err(unreadable(format_args!("{:?} instead of F32", tensor.dtype())));
    }
    let (words, _) = tensor.data().as_chunks();
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

/// The fault is the server's: a model answers with the tensors above.
fn unreadable(cause: impl std::fmt::Display) -> Error {
    let kind = tierbed_core::ErrorKind::Io;
    Error::new(kind, "the model's answer cannot be read").with("cause", cause)
}
