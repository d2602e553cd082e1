//! Lookups as safetensors. See docs/reference/http.md.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::body::Bytes;
use safetensors::tensor::{serialize, TensorView};
use safetensors::{Dtype, SafeTensors, View};
use tierbed_core::{Error, Result};

use crate::known::{Cut, Tensors};
use crate::lookup::{Named, Told};
use crate::query::Query;

/// The content type of safetensors bodies.
pub(crate) const SAFETENSORS: &str = "application/x-safetensors";

/// Cuts a request behind its header; `None` where it is none.
pub(crate) fn cut(body: &Bytes) -> Option<Cut> {
    let (length, _) = body.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let end = size_of::<u64>().checked_add(length).filter(|end| *end <= body.len())?;
    Some(Cut { body_type: SAFETENSORS, head: body.slice(..end), binary: body.slice(end..) })
}

/// Returns where the bags lie, if they are all that a decoded request has.
///
/// # Errors
/// `Invalid` for a header that is none.
pub(crate) fn bags(body: &[u8]) -> Result<Option<Tensors>> {
    let (_, metadata) = SafeTensors::read_metadata(body)
        .map_err(|cause| Error::invalid("body is not safetensors").with("cause", cause))?;
    let (mut values, mut offsets) = (None, None);
    for (name, tensor) in metadata.tensors() {
        let (first, end) = tensor.data_offsets;
        match name.rsplit_once('.') {
            Some((_, "values")) => values = Some(first..end),
            Some((_, "offsets")) => offsets = Some(first..end),
            _ => return Ok(None),
        }
    }
    let bags = values.zip(offsets);
    Ok(bags.map(|(values, offsets)| Tensors::Bags { values, offsets }))
}

/// Decodes a request: `<feature>.values`, `<feature>.offsets`, optionally `<feature>.weights`.
///
/// # Errors
/// `Invalid` for anything else.
pub(crate) fn decode(body: &[u8]) -> Result<Vec<Named>> {
    let tensors = SafeTensors::deserialize(body)
        .map_err(|cause| Error::invalid("body is not safetensors").with("cause", cause))?;
    let mut columns: BTreeMap<&str, Parts> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        // Feature names may contain dots; the last one separates.
        let (feature, part) = name.rsplit_once('.').unwrap_or((name, ""));
        let parts = columns.entry(feature).or_default();
        match part {
            "values" => parts.values = Some(integers(name, &tensor)?),
            "offsets" => parts.offsets = Some(integers(name, &tensor)?),
            "weights" => parts.weights = Some(floats(name, &tensor)?),
            _ => {
                return Err(Error::invalid("unknown tensor")
                    .with("tensor", name)
                    .with("expected", "<feature>.values, <feature>.offsets, <feature>.weights"))
            }
        }
    }
    columns.into_iter().map(|(name, parts)| parts.named(name)).collect()
}

#[derive(Default)]
struct Parts {
    values: Option<Vec<i64>>,
    offsets: Option<Vec<i64>>,
    weights: Option<Vec<f32>>,
}

impl Parts {
    fn named(self, name: &str) -> Result<Named> {
        let (Some(values), Some(offsets)) = (self.values, self.offsets) else {
            return Err(Error::invalid("feature lacks values or offsets").with("feature", name));
        };
        Ok(Named { name: name.to_owned(), values, offsets, weights: self.weights })
    }
}

fn integers(name: &str, tensor: &TensorView<'_>) -> Result<Vec<i64>> {
    check(name, tensor, Dtype::I64)?;
    // Tensors in a body lie at any address: copied, not cast.
    let (words, _) = tensor.data().as_chunks();
    Ok(words.iter().map(|word| i64::from_le_bytes(*word)).collect())
}

fn floats(name: &str, tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    check(name, tensor, Dtype::F32)?;
    let (words, _) = tensor.data().as_chunks();
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

fn check(name: &str, tensor: &TensorView<'_>, dtype: Dtype) -> Result<()> {
    if tensor.dtype() == dtype && tensor.shape().len() == 1 {
        return Ok(());
    }
    Err(Error::invalid("tensor has another type or shape")
        .with("tensor", name)
        .with("expected", format_args!("{dtype:?} of one dimension"))
        .with("found", format_args!("{:?} of {:?}", tensor.dtype(), tensor.shape())))
}

/// One feature's answer.
struct Tensor<'a> {
    shape: [usize; 2],
    told: &'a Told,
    queries: &'a [Query],
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = Vec::with_capacity(self.data_len());
        for vector in self.told.vectors(self.queries) {
            bytes.extend_from_slice(bytemuck::cast_slice(vector));
        }
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

/// Encodes an answer: `<feature>` `[B, D]` f32 per feature.
///
/// # Errors
/// `Invalid` when the encoder refuses, which checked shapes never make it do.
pub(crate) fn encode(told: &[Told], queries: &[Query]) -> Result<Vec<u8>> {
    let tensors = told.iter().map(|told| {
        (told.name.as_str(), Tensor { shape: told.place.shape(queries), told, queries })
    });
    serialize(tensors, None)
        .map_err(|cause| Error::invalid("cannot encode the answer").with("cause", cause))
}
