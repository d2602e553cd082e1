//! Predictions: the protocol's tensors as samples, and scores as its outputs.

use tierbed_core::{Error, Result};

use super::inputs::Tensor;
use super::model::Kind;
use super::outputs::{Dtype, Origin, Output, Outputs};
use super::request::{Named, Request};
use crate::answer::Refusal;
use crate::body::Held;
use crate::columns::check_answer;
use crate::generation::Serving;
use crate::predict::given::{Dense, Given, GivenIds};
use crate::predict::{Prepared, Scores};
use crate::predictor::Model;

const EXPECTED: &str = "dense, and ids or values and lengths";

/// Decodes a request, checks it, and finds the memory for its rows and its answer.
///
/// # Errors
/// 400 for what the model does not take or too much, 503 when there is no memory.
pub(crate) fn prepare(
    serving: &Serving<'_>,
    request: Request,
    mut held: Held,
) -> std::result::Result<Prepared, Refusal> {
    let Request { id, output_dtype, tensors, outputs, is_binary, raw_bytes, form, .. } = request;
    let dtype = Dtype::parse(output_dtype.as_deref())?;
    let model = serving.model()?;
    let samples = given(tensors)?.check(serving, model)?;
    let wanted = wanted(model, outputs, is_binary)?;
    let outputs = wanted.iter().map(|Wanted { name, width, is_binary, .. }| {
        let shape = [samples.count].into_iter().chain(*width).collect();
        let (name, is_binary) = (name.clone(), *is_binary);
        Output { name, shape, is_binary, from: Origin::Values(Vec::new()) }
    });
    let mut outputs = Outputs {
        id,
        model: serving.models.name(Kind::Predictions).to_owned(),
        generation: serving.parts.identity.to_string(),
        dtype,
        form,
        outputs: outputs.collect(),
    };
    outputs.check()?;
    let answer_bytes = outputs.byte_count();
    check_answer(answer_bytes, &serving.limits)?;
    // Ids may be looked up where they came in.
    held.resize(answer_bytes + raw_bytes + samples.bytes())?;
    let encode = move |mut scores: Scores| {
        for (output, Wanted { at, .. }) in outputs.outputs.iter_mut().zip(&wanted) {
            let count = scores.len();
            let Some(values) = scores.get_mut(*at) else { panic!("output {at} of {count}") };
            output.from = Origin::Values(std::mem::take(values));
        }
        Ok(outputs.encode(&[])?)
    };
    Ok(Prepared { samples, held, answer_bytes, encode: Box::new(encode) })
}

/// Takes the samples of a request.
fn given(tensors: Vec<Tensor>) -> Result<Given> {
    let (mut dense, mut ids, mut values, mut lengths) = (None, None, None, None);
    for tensor in tensors {
        match tensor.name.as_str() {
            "dense" => {
                let shape = tensor.matrix()?;
                dense = Some(Dense { shape, values: tensor.floats()? });
            }
            "ids" => ids = Some((tensor.matrix()?, tensor.integers()?)),
            "values" => {
                tensor.check_flat()?;
                values = Some(tensor.integers()?);
            }
            "lengths" => {
                tensor.check_flat()?;
                lengths = Some(tensor.integers()?);
            }
            name => {
                return Err(Error::invalid("unknown input")
                    .with("tensor", name)
                    .with("expected", EXPECTED))
            }
        }
    }
    let ids = match (ids, values, lengths) {
        (Some((shape, ids)), None, None) => GivenIds::Matrix { ids, shape },
        (None, Some(values), lengths) => GivenIds::Bags { values, lengths },
        _ => {
            let error = Error::invalid("inputs must be of one form");
            return Err(error.with("expected", EXPECTED));
        }
    };
    Ok(Given { dense, ids })
}

/// An output that a request wants.
struct Wanted {
    name: String,
    width: Option<usize>,
    is_binary: bool,
    /// Its position among those of the model.
    at: usize,
}

/// Resolves the outputs of a request; when it names none, all of the model.
fn wanted(model: &Model, named: Vec<Named>, default: bool) -> Result<Vec<Wanted>> {
    let known = model.predictor.outputs();
    if named.is_empty() {
        let every = known.iter().enumerate().map(|(at, output)| Wanted {
            name: output.name.clone(),
            width: output.width,
            is_binary: default,
            at,
        });
        return Ok(every.collect());
    }
    let wanted = named.into_iter().map(|Named { name, is_binary }| {
        let mut numbered = known.iter().enumerate();
        let Some((at, output)) = numbered.find(|(_, output)| output.name == name) else {
            let names: Vec<_> = known.iter().map(|output| output.name.as_str()).collect();
            return Err(Error::invalid("unknown output")
                .with("output", name)
                .with("expected", names.join(", ")));
        };
        Ok(Wanted { name, width: output.width, is_binary, at })
    });
    wanted.collect()
}
