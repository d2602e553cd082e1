//! Requests of `/v1/lookup`: columns by name in, one matrix per feature out.

use std::sync::Arc;

use axum::body::Bytes;
use tierbed_core::Result;
use tierbed_snapshot::Pooling;

use crate::answer::{Refusal, JSON};
use crate::body::Held;
use crate::columns::{
    check_answer, check_columns, check_counts, find, join, Column, Joined, Place,
};
use crate::job::{Body, Prepared, JSON_COST};
use crate::known::{Cut, Head};
use crate::options::Limits;
use crate::plans::Asked;
use crate::query::{Ids, Query, Source};
use crate::tensors::SAFETENSORS;
use crate::{json, tensors};

/// The indices of one feature, as they came in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) values: Vec<i64>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) weights: Option<Vec<f32>>,
}

/// A feature of an answer, and where its vectors are.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) name: String,
    pub(crate) place: Place,
}

impl Told {
    /// Returns the feature's vectors.
    pub(crate) fn vectors<'a>(
        &self,
        queries: &'a [Query],
    ) -> impl ExactSizeIterator<Item = &'a [f32]> {
        self.place.query_of(queries).vectors(self.place.at)
    }
}

/// Bytes of one element in JSON at most: `-1.1754944e-38` and a comma or bracket.
pub(crate) const JSON_BYTES: usize = 15;

/// Decodes a request, checks it, and finds the memory for its answer.
///
/// # Errors
/// 400 for what is not served or too much, 503 when there is no memory.
pub(crate) fn prepare(
    source: Source<'_>,
    limits: &Limits,
    body: &Bytes,
    mut held: Held,
    is_binary: bool,
) -> std::result::Result<Prepared, Refusal> {
    let cut = if is_binary { tensors::cut(body) } else { None };
    if let Some(cut) = &cut {
        if let Some(head) = source.heads.get(cut) {
            return head.prepare(source, &cut.binary, held);
        }
    }
    let (named, pooling) =
        if is_binary { (tensors::decode(body)?, None) } else { json::decode(body)? };
    let (columns, names) = columns(source, named, pooling, limits)?;
    let Joined { mut queries, places } = join(source, columns)?;
    let answer_bytes = answer_bytes(&queries, is_binary);
    check_answer(answer_bytes, limits)?;
    held.resize(answer_bytes)?;
    for query in &mut queries {
        query.check_ids(source)?;
        query.make_room(&[]);
    }
    let told: Vec<_> =
        names.into_iter().zip(places).map(|(name, place)| Told { name, place }).collect();
    if let Some(cut) = cut.filter(|cut| source.heads.has_room(cut)) {
        keep(source, &cut, body, &told, &queries)?;
    }
    let sample_count = queries.first().map_or(0, |query| query.bags().batch_size() as u64);
    let elements: usize = queries.iter().map(|query| query.matrix.get().len()).sum();
    let encode_cost = if is_binary { elements } else { elements.saturating_mul(JSON_COST) };
    let encode = move |queries: Vec<Query>| {
        let encoded = if is_binary { tensors::encode } else { json::encode };
        let bytes = encoded(&told, &queries)?.into();
        let body_type = if is_binary { SAFETENSORS } else { JSON };
        Ok(Body { bytes, body_type, header_bytes: None, coding: None })
    };
    Ok(Prepared { queries, held, sample_count, encode_cost, encode: Box::new(encode) })
}

/// Keeps the head of a request, where it is for one feature without weights.
fn keep(
    source: Source<'_>,
    cut: &Cut,
    body: &[u8],
    told: &[Told],
    queries: &[Query],
) -> Result<()> {
    let ([query], [_], Some(tensors)) = (queries, told, tensors::bags(body)?) else {
        return Ok(());
    };
    let (plan, binary_bytes) = (Arc::clone(&query.plan), cut.binary.len());
    // What comes before the numbers depends on their shape alone.
    let mut told = tensors::encode(told, queries)?;
    told.truncate(told.len() - size_of_val(query.matrix.get()));
    let body_type = cut.body_type;
    source.heads.keep(cut, Head { plan, tensors, binary_bytes, told, body_type });
    Ok(())
}

/// Checks the columns of a request; `pooling` replaces that of every feature.
fn columns(
    source: Source<'_>,
    named: Vec<Named>,
    pooling: Option<Pooling>,
    limits: &Limits,
) -> Result<(Vec<Column>, Vec<String>)> {
    let index_count = named.iter().map(|named| named.values.len()).sum();
    let bag_count = named.iter().map(|named| named.offsets.len().max(1) - 1).sum();
    check_counts(index_count, bag_count, limits)?;
    let (mut columns, mut names) = (Vec::new(), Vec::new());
    for Named { name, values, offsets, weights } in named {
        let feature = find(source.features, &name)?;
        let pooling = pooling.unwrap_or(source.feature(feature).pooling);
        let asked = Asked { feature, pooling };
        columns.push(Column { asked, values: Ids::Copied(values), offsets, weights });
        names.push(name);
    }
    check_columns(source, &columns, false)?;
    Ok((columns, names))
}

/// Returns how many bytes the answer's elements take at most.
fn answer_bytes(queries: &[Query], is_binary: bool) -> usize {
    let bytes = queries.iter().map(|query| {
        let dims = query.plan.layout.features().iter().map(|feature| feature.columns.dim);
        let row_bytes: usize = match is_binary {
            true => dims.map(|dim| dim * size_of::<f32>()).sum(),
            // Two brackets and a comma around each row.
            false => dims.map(|dim| dim * JSON_BYTES + 3).sum(),
        };
        query.row_count() * row_bytes
    });
    bytes.sum()
}
