//! Lookups as JSON. See docs/reference/http.md.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};
use tierbed_snapshot::Pooling;

use crate::features::parse_pooling;
use crate::lookup::{Named, Told};
use crate::query::Query;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    features: BTreeMap<String, Indices>,
    pooling: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Indices {
    values: Vec<i64>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
}

#[derive(Serialize)]
struct Answer<'a> {
    features: BTreeMap<&'a str, Vec<&'a [f32]>>,
}

/// Decodes a request: its columns, and the pooling that replaces the features' own.
///
/// # Errors
/// `Invalid` for anything but the documented form.
pub(crate) fn decode(body: &[u8]) -> Result<(Vec<Named>, Option<Pooling>)> {
    let request: Request = serde_json::from_slice(body).map_err(|cause| {
        Error::invalid("body is not the expected JSON")
            .with("expected", r#"{"features": {name: {"values", "offsets"}}}"#)
            .with("cause", cause)
    })?;
    let pooling = request.pooling.as_deref().map(parse_pooling).transpose()?;
    let columns = request.features.into_iter().map(|(name, indices)| Named {
        name,
        values: indices.values,
        offsets: indices.offsets,
        weights: indices.weights,
    });
    Ok((columns.collect(), pooling))
}

/// Encodes an answer. Elements that are not finite become null, as JSON has no word for them.
///
/// # Errors
/// `Invalid` when the encoder refuses, which numbers and strings never make it do.
pub(crate) fn encode(told: &[Told], queries: &[Query]) -> Result<Vec<u8>> {
    let features = told.iter().map(|told| (told.name.as_str(), told.vectors(queries).collect()));
    serde_json::to_vec(&Answer { features: features.collect() })
        .map_err(|cause| Error::invalid("cannot encode the answer").with("cause", cause))
}
