//! Features of a request: the table of each, and how it is pooled.
//!
//! From the options, else from the snapshot's attachment `serving.json`
//! (`{"features": [{"name", "table", "pooling"}, ...]}`), else a feature per table, of its name,
//! summed.

use serde::Deserialize;
use tierbed_core::{Error, Result, TableId};
use tierbed_snapshot::{Pooling, View};

/// The attachment that names the features.
pub(crate) const SERVING_NAME: &str = "serving.json";

/// One feature a server answers for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServedFeature {
    /// Its name in requests and answers.
    pub name: String,
    /// The table it reads.
    pub table: String,
    /// `sum`, `mean` or `none`.
    #[serde(default = "sum")]
    pub pooling: String,
}

fn sum() -> String {
    "sum".to_owned()
}

#[derive(Deserialize)]
struct Serving {
    features: Vec<ServedFeature>,
}

/// A feature resolved against the snapshot's schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Feature {
    pub(crate) name: String,
    pub(crate) table: TableId,
    pub(crate) table_name: String,
    pub(crate) pooling: Pooling,
    pub(crate) dim: u32,
}

/// Resolves the features of a server; by default each table is one.
///
/// # Errors
/// `Invalid` for an unknown table or pooling, or a name that occurs twice.
pub(crate) fn resolve(snapshot: &View<'_>, told: Option<&[ServedFeature]>) -> Result<Vec<Feature>> {
    let served = told.map_or_else(|| one_per_table(snapshot), <[ServedFeature]>::to_vec);
    let mut features: Vec<Feature> = Vec::new();
    for ServedFeature { name, table, pooling } in served {
        let id = snapshot.schema().id_of(&table).ok_or_else(|| {
            Error::invalid("served feature names an unknown table")
                .with("feature", &name)
                .with("table", &table)
        })?;
        if features.iter().any(|known| known.name == name) {
            return Err(Error::invalid("served feature occurs twice").with("feature", &name));
        }
        let pooling = parse_pooling(&pooling)?;
        let dim = snapshot.schema().table(id)?.dim;
        features.push(Feature { name, table: id, table_name: table, pooling, dim });
    }
    Ok(features)
}

/// Reads the features that were published.
///
/// # Errors
/// `Invalid` or `Corruption` when the attachment cannot be read.
pub(crate) fn attached(snapshot: &View<'_>) -> Result<Option<Vec<ServedFeature>>> {
    let Some(bytes) = snapshot.attachment(SERVING_NAME)? else { return Ok(None) };
    let serving: Serving = serde_json::from_slice(&bytes).map_err(|cause| {
        Error::invalid("attachment serving.json is not the expected JSON")
            .with("expected", r#"{"features": [{"name", "table", "pooling"}]}"#)
            .with("cause", cause)
    })?;
    Ok(Some(serving.features))
}

fn one_per_table(snapshot: &View<'_>) -> Vec<ServedFeature> {
    let feature =
        |name: &String| ServedFeature { name: name.clone(), table: name.clone(), pooling: sum() };
    let tables = snapshot.schema().tables().iter().filter(|table| !table.is_own());
    tables.map(|table| feature(&table.name)).collect()
}

/// Parses a pooling's name.
///
/// # Errors
/// `Invalid` for other names.
pub(crate) fn parse_pooling(name: &str) -> Result<Pooling> {
    match name {
        "sum" => Ok(Pooling::Sum),
        "mean" => Ok(Pooling::Mean),
        "none" => Ok(Pooling::None),
        _ => Err(Error::invalid("unknown pooling")
            .with("expected", "sum, mean or none")
            .with("found", format_args!("{name:?}"))),
    }
}

pub(crate) fn pooling_name(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Sum => "sum",
        Pooling::Mean => "mean",
        Pooling::None => "none",
    }
}
