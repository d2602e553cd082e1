//! Lookups: what of the given features an answer needs, and how it is told.

use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_snapshot::Pooling;

use super::config::POOLED;
use super::model::Kind;
use super::outputs::{body, Dtype, Origin, Output, Outputs};
use super::request::{Encoded, Named, Request};
use super::rows::{Given, Joining};
use crate::answer::Refusal;
use crate::body::Held;
use crate::columns::{check_answer, find};
use crate::features::parse_pooling;
use crate::generation::Serving;
use crate::job::Prepared;
use crate::known::{Cut, Head, Tensors};
use crate::plans::Asked;
use crate::query::{Query, Source};

/// An output that a request wants.
struct Wanted {
    name: String,
    /// The feature; `None` for all side by side.
    feature: Option<usize>,
    is_binary: bool,
}

/// What a request asks, before there is room for its answer.
pub(crate) struct Resolved {
    pub(crate) queries: Vec<Query>,
    pub(crate) outputs: Outputs,
    pub(crate) sample_count: u64,
}

/// Decodes a request, checks it, and makes room for its answer.
///
/// # Errors
/// 400 for what is not served or too much, 503 when there is no memory.
pub(crate) fn prepare(
    service: &Serving<'_>,
    encoded: &Encoded,
    held: Held,
) -> std::result::Result<Prepared, Refusal> {
    let (source, cut) = (service.source(), encoded.cut());
    if let Some(cut) = &cut {
        if let Some(head) = source.heads.get(cut) {
            return head.prepare(source, &cut.binary, held);
        }
    }
    decoded(service, encoded.request()?, cut, held)
}

fn decoded(
    service: &Serving<'_>,
    request: Request,
    cut: Option<Cut>,
    mut held: Held,
) -> std::result::Result<Prepared, Refusal> {
    // A request with an id is answered with it, and several tensors are seldom alike.
    let cut = cut.filter(|_| request.id.is_none() && request.tensors.len() == 1);
    let form = request.form;
    let resolved = resolve(service, request, &mut held)?;
    let Resolved { mut queries, outputs, sample_count } = resolved;
    let encode_cost = outputs.encode_cost();
    let head = outputs.head_of_whole(&queries)?;
    make_room(service.source(), &mut queries, head.as_deref().unwrap_or_default())?;
    if let (Some(cut), Some(told), [query]) = (&cut, &head, queries.as_slice()) {
        keep(service.source(), cut, query, told);
    }
    let head_bytes = head.map(|head| head.len());
    let encode = move |mut queries: Vec<Query>| match (queries.pop(), head_bytes) {
        (Some(query), Some(_)) => Ok(body(form, query.matrix.into_bytes(), head_bytes)),
        (last, _) => {
            queries.extend(last);
            Ok(outputs.encode(&queries)?)
        }
    };
    Ok(Prepared { queries, held, sample_count, encode_cost, encode: Box::new(encode) })
}

/// Checks the ids of queries, and makes room for their answers behind `head`.
///
/// # Errors
/// `Invalid` for ids that are no rows.
pub(crate) fn make_room(source: Source<'_>, queries: &mut [Query], head: &[u8]) -> Result<()> {
    for query in queries {
        query.check_ids(source)?;
        query.make_room(head);
    }
    Ok(())
}

/// Decodes a request and checks all but its ids; takes the memory that its answer needs.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn resolve(
    service: &Serving<'_>,
    request: Request,
    held: &mut Held,
) -> std::result::Result<Resolved, Refusal> {
    let (source, limits) = (service.source(), &service.limits);
    let Request { id, pooling, output_dtype, tensors, outputs, takes_all, .. } = request;
    let Request { is_binary, is_ragged, raw_bytes, form, .. } = request;
    let given = Given::read(source, tensors, limits)?;
    let sample_count = given.sample_count() as u64;
    let pooling = pooling.as_deref().map(parse_pooling).transpose()?;
    let given_features: Vec<_> = given.features();
    let pooled_by = |feature: usize| {
        let pooling = pooling.unwrap_or(source.feature(feature).pooling);
        Asked { feature, pooling }
    };
    let all: Vec<_> = given_features.into_iter().map(pooled_by).collect();
    let wanted = match takes_all {
        true => every(source, &all, is_binary),
        false => wanted(source, &all, outputs, is_binary)?,
    };
    if is_ragged && wanted.iter().any(|wanted| wanted.feature.is_none()) {
        return Err(Error::invalid("ragged features do not lie side by side")
            .with("remedy", "name the outputs that you want, feature by feature")
            .into());
    }
    let is_needed = |asked: &&Asked| {
        wanted.iter().any(|wanted| wanted.feature.is_none_or(|feature| feature == asked.feature))
    };
    let needed: Vec<Asked> = all.iter().filter(is_needed).copied().collect();
    let joined = given.join(source, &needed, Joining { limits, is_ragged })?;
    let queries = joined.queries;
    let outputs = wanted.into_iter().map(|Wanted { name, feature, is_binary }| {
        let place = needed.iter().zip(&joined.places);
        let place = place.clone().find(|(asked, _)| Some(asked.feature) == feature);
        let (shape, from) = match place {
            Some((_, place)) => (place.shape(&queries), Origin::Feature(*place)),
            None => (whole_shape(&queries), Origin::Query(0)),
        };
        Output { name, shape: shape.to_vec(), is_binary, from }
    });
    let outputs = Outputs {
        id,
        model: service.models.name(Kind::Rows).to_owned(),
        generation: service.parts.identity.to_string(),
        dtype: Dtype::parse(output_dtype.as_deref())?,
        form,
        outputs: outputs.collect(),
    };
    outputs.check()?;
    let answer_bytes = outputs.byte_count();
    check_answer(answer_bytes, limits)?;
    // Ids may be looked up where they came in.
    held.resize(answer_bytes + raw_bytes)?;
    Ok(Resolved { queries, outputs, sample_count })
}

/// Keeps the head of a request, whose only tensor became `query`: where the ids are those of all
/// features, as they came.
fn keep(source: Source<'_>, cut: &Cut, query: &Query, told: &[u8]) {
    let (plan, binary_bytes) = (Arc::clone(&query.plan), cut.binary.len());
    let is_of_all = plan.asked.len() == source.features.len();
    let is_usual = is_of_all && source.heads.has_room(cut);
    if is_usual && binary_bytes == size_of_val(query.bags().indices) {
        let (tensors, told, body_type) = (Tensors::Ids, told.to_vec(), cut.body_type);
        source.heads.keep(cut, Head { plan, tensors, binary_bytes, told, body_type });
    }
}

fn whole_shape(queries: &[Query]) -> [usize; 2] {
    let Some(query) = queries.first() else { panic!("a lookup of no feature was not refused") };
    [query.row_count(), query.plan.layout.output_dim()]
}

/// Returns every output that the given features have.
fn every(source: Source<'_>, given: &[Asked], is_binary: bool) -> Vec<Wanted> {
    let is_pooled = given.iter().all(|asked| asked.pooling != Pooling::None);
    let pooled = Wanted { name: POOLED.to_owned(), feature: None, is_binary };
    let own = given.iter().map(|asked| {
        let name = source.feature(asked.feature).name.clone();
        Wanted { name, feature: Some(asked.feature), is_binary }
    });
    // Of a feature of that name the output cannot be asked for.
    let own = own.filter(|wanted| !is_pooled || wanted.name != POOLED);
    is_pooled.then_some(pooled).into_iter().chain(own).collect()
}

/// Resolves the outputs of a request; when it names none, all pooled features side by side, or
/// every feature where one is not pooled.
fn wanted(
    source: Source<'_>,
    given: &[Asked],
    outputs: Vec<Named>,
    default: bool,
) -> Result<Vec<Wanted>> {
    let is_pooled = given.iter().all(|asked| asked.pooling != Pooling::None);
    let pooled = |is_binary| Wanted { name: POOLED.to_owned(), feature: None, is_binary };
    if outputs.is_empty() && is_pooled {
        return Ok(vec![pooled(default)]);
    }
    if outputs.is_empty() {
        return Ok(every(source, given, default));
    }
    let mut wanted: Vec<Wanted> = Vec::with_capacity(outputs.len());
    for Named { name, is_binary } in outputs {
        if name == POOLED {
            if !is_pooled {
                return Err(Error::invalid("output pooled needs features that are pooled")
                    .with("remedy", "ask for features by name, or for pooling sum or mean"));
            }
            wanted.push(pooled(is_binary));
            continue;
        }
        let feature = find(source.features, &name)?;
        if !given.iter().any(|asked| asked.feature == feature) {
            return Err(Error::invalid("output has no input").with("output", name));
        }
        wanted.push(Wanted { name, feature: Some(feature), is_binary });
    }
    Ok(wanted)
}
