//! Inference requests and answers as messages.

use axum::body::Bytes;
use prost::encoding::{
    decode_key, decode_varint, encode_key, encode_varint, encoded_len_varint, key_len, WireType,
};
use prost::Message;
use tierbed_core::{Error, Result};

use super::pb::infer_parameter::ParameterChoice;
use super::pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use super::pb::model_infer_response::InferOutputTensor;
use super::pb::{InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse};
use super::reply;
use crate::known::Cut;
use crate::oip::inputs::{collect, lengths, unknown, Data, Tensor};
use crate::oip::outputs::Outputs;
use crate::oip::request::{check_once, unsupported, Form, Hurry, Named, Request};
use crate::oip::VERSION;
use crate::query::Ids;

/// The content type of answers.
pub(crate) const TYPE: &str = "application/grpc";

/// The field `raw_input_contents` of a request.
const RAW_INPUT_CONTENTS: u32 = 7;
/// The field `raw_output_contents` of an answer.
const RAW_OUTPUT_CONTENTS: u32 = 6;

/// The parameter by which a client names the generation that shall answer.
pub(crate) const GENERATION: &str = "generation";
/// The parameter that allows features to have different numbers of samples.
pub(crate) const RAGGED: &str = "ragged";

type Parameters = std::collections::HashMap<String, InferParameter>;

/// What is needed of a request before it waits: all but its tensors, which are passed over.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Addressed {
    #[prost(string, tag = "1")]
    pub(super) model_name: String,
    #[prost(string, tag = "2")]
    pub(super) model_version: String,
    #[prost(string, tag = "3")]
    pub(crate) id: String,
    #[prost(map = "string, message", tag = "4")]
    parameters: Parameters,
}

impl Addressed {
    /// Returns how soon the client wants its answer.
    ///
    /// # Errors
    /// `Invalid` for a timeout or a priority that is no integer, or below 0.
    pub(crate) fn hurry(&self) -> Result<Hurry> {
        Ok(Hurry::new(self.integer("timeout")?, self.integer("priority")?))
    }

    /// Returns the generation that the client wants, where it names one.
    ///
    /// # Errors
    /// `Invalid` for a name that is no string.
    pub(crate) fn generation(&self) -> Result<Option<&str>> {
        fn word(found: &InferParameter) -> Result<&str> {
            match &found.parameter_choice {
                Some(ParameterChoice::StringParam(word)) => Ok(word),
                _ => {
                    Err(Error::invalid("parameter must be a string").with("parameter", GENERATION))
                }
            }
        }
        self.parameters.get(GENERATION).map(word).transpose()
    }

    fn integer(&self, name: &str) -> Result<Option<u64>> {
        let integer = |InferParameter { parameter_choice: found }: &InferParameter| {
            let integer = match found {
                Some(ParameterChoice::Int64Param(found)) => u64::try_from(*found).ok(),
                Some(ParameterChoice::Uint64Param(found)) => Some(*found),
                _ => None,
            };
            integer.ok_or_else(|| {
                Error::invalid("parameter must be an integer of at least 0")
                    .with("parameter", name)
                    .with("found", format_args!("{found:?}"))
            })
        };
        self.parameters.get(name).map(integer).transpose()
    }
}

/// Decodes a request.
///
/// # Errors
/// `Invalid` for anything but the protocol's form.
pub(crate) fn request(message: Bytes) -> Result<Request> {
    let ModelInferRequest { id, mut parameters, inputs, outputs, raw_input_contents, .. } =
        reply::decode(message)?;
    let raw_bytes = raw_input_contents.iter().map(Bytes::len).sum();
    let has_raw = !raw_input_contents.is_empty();
    if has_raw && raw_input_contents.len() != inputs.len() {
        return Err(Error::invalid("raw_input_contents must have one entry per input")
            .with("found", raw_input_contents.len())
            .with("inputs", inputs.len()));
    }
    let mut raw = raw_input_contents.into_iter();
    let tensors = collect(inputs, |input| {
        let name = input.name.clone();
        (name, tensor(input, raw.next()))
    })?;
    let outputs: Vec<_> = outputs.into_iter().map(named).collect::<Result<_>>()?;
    check_once(&outputs)?;
    Ok(Request {
        id: Some(id).filter(|id| !id.is_empty()),
        pooling: word(&mut parameters, "pooling")?,
        output_dtype: word(&mut parameters, "output_dtype")?,
        tensors,
        outputs,
        takes_all: false,
        is_ragged: is_true(&parameters, RAGGED)?,
        is_binary: true,
        raw_bytes,
        form: Form::Message,
    })
}

/// Cuts a message before the elements of its inputs, where they are of one input and come last.
pub(crate) fn cut(message: &Bytes) -> Option<Cut> {
    let mut rest = &message[..];
    loop {
        let head_bytes = message.len() - rest.len();
        let (field, wire_type) = decode_key(&mut rest).ok()?;
        // All fields of a request are of this type.
        if wire_type != WireType::LengthDelimited {
            return None;
        }
        let bytes = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
        let (_, after) = rest.split_at_checked(bytes)?;
        if field != RAW_INPUT_CONTENTS {
            rest = after;
            continue;
        }
        let binary = message.slice(message.len() - rest.len()..);
        let head = message.slice(..head_bytes);
        return after.is_empty().then_some(Cut { body_type: TYPE, head, binary });
    }
}

fn tensor(input: InferInputTensor, raw: Option<Bytes>) -> Result<Tensor> {
    let InferInputTensor { name, datatype, shape, contents, .. } = input;
    let lengths = lengths(&shape)?;
    let data = match (raw, contents) {
        (Some(raw), None) => Data::from_bytes(&datatype, raw)?,
        (None, Some(contents)) => typed(&datatype, contents)?,
        // Of a tensor without elements nothing needs to be sent.
        (None, None) => typed(&datatype, InferTensorContents::default())?,
        (Some(_), Some(_)) => {
            return Err(Error::invalid("input has both contents and raw_input_contents"))
        }
    };
    Tensor::new(name, lengths, data)
}

fn typed(datatype: &str, contents: InferTensorContents) -> Result<Data> {
    let InferTensorContents { int_contents, int64_contents, fp32_contents } = contents;
    Ok(match datatype {
        "INT64" => Data::Integers(Ids::Copied(int64_contents)),
        "INT32" => Data::Integers(Ids::Copied(int_contents.into_iter().map(i64::from).collect())),
        "FP32" => Data::Floats(fp32_contents),
        _ => return Err(unknown(datatype)),
    })
}

fn named(output: InferRequestedOutputTensor) -> Result<Named> {
    let InferRequestedOutputTensor { name, parameters } = output;
    let has = |parameter: &str| parameters.contains_key(parameter);
    if has("classification") || has("shared_memory_region") {
        return Err(unsupported(&name));
    }
    Ok(Named { name, is_binary: true })
}

/// Tells whether a parameter is there and true.
fn is_true(parameters: &Parameters, name: &'static str) -> Result<bool> {
    match parameters.get(name).map(|parameter| &parameter.parameter_choice) {
        None => Ok(false),
        Some(Some(ParameterChoice::BoolParam(is_true))) => Ok(*is_true),
        Some(_) => Err(Error::invalid("parameter must be true or false").with("parameter", name)),
    }
}

/// Takes a parameter that is a word.
fn word(parameters: &mut Parameters, name: &'static str) -> Result<Option<String>> {
    match parameters.remove(name).map(|parameter| parameter.parameter_choice) {
        None => Ok(None),
        Some(Some(ParameterChoice::StringParam(word))) => Ok(Some(word)),
        Some(_) => Err(Error::invalid("parameter must be a string").with("parameter", name)),
    }
}

/// Makes what comes before the elements of an answer: its length, and all fields but the elements.
pub(crate) fn head(outputs: &Outputs) -> Vec<u8> {
    let Outputs { id, model, generation, dtype, outputs, .. } = outputs;
    let told = outputs.iter().map(|output| InferOutputTensor {
        name: output.name.clone(),
        datatype: dtype.name().to_owned(),
        shape: output.shape.iter().map(|length| *length as i64).collect(),
        ..InferOutputTensor::default()
    });
    let generation = ParameterChoice::StringParam(generation.clone());
    let generation = InferParameter { parameter_choice: Some(generation) };
    let answer = ModelInferResponse {
        model_name: model.clone(),
        model_version: VERSION.to_owned(),
        id: id.clone().unwrap_or_default(),
        parameters: Parameters::from([("generation".to_owned(), generation)]),
        outputs: told.collect(),
        raw_output_contents: Vec::new(),
    };
    let elements = outputs.iter().map(|output| {
        let bytes = output.len() * dtype.size();
        key_len(RAW_OUTPUT_CONTENTS) + encoded_len_varint(bytes as u64) + bytes
    });
    let message_bytes = answer.encoded_len() + elements.sum::<usize>();
    let mut head = Vec::new();
    reply::begin(message_bytes, &mut head);
    head.extend_from_slice(&answer.encode_to_vec());
    head
}

/// Appends what comes before the `bytes` of an output's elements.
pub(crate) fn begin(bytes: usize, out: &mut Vec<u8>) {
    encode_key(RAW_OUTPUT_CONTENTS, WireType::LengthDelimited, out);
    encode_varint(bytes as u64, out);
}

#[cfg(test)]
mod tests;
