//! Names of a snapshot's models, and the model that a path names.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::StatusCode;
use tierbed_core::{Error, Result};

use super::stats::Counts;
use super::VERSION;
use crate::answer::Refusal;
use crate::routes::Service;

/// Longest name of a model.
const NAME_BYTES_MAX: usize = 128;

/// What a model answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Rows,
    Predictions,
}

/// The models of a server, and what each did.
#[derive(Debug)]
pub(crate) struct Models {
    rows_name: String,
    name: String,
    rows: Counts,
    predictions: Counts,
}

impl Models {
    /// # Errors
    /// `Invalid` for a name that does not fit into a path.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let is_good =
            !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(is_plain);
        // Clients address the statistics of all models by this name.
        if !is_good || name == "stats" || name.starts_with('.') {
            return Err(Error::invalid("model name cannot be part of an address")
                .with("option", "model_name")
                .with("found", format_args!("{name:?}"))
                .with(
                    "remedy",
                    "use letters, digits, points, hyphens and underscores, at most 128",
                ));
        }
        Ok(Self {
            rows_name: format!("{name}.rows"),
            name: name.to_owned(),
            rows: Counts::default(),
            predictions: Counts::default(),
        })
    }

    pub(crate) fn name(&self, kind: Kind) -> &str {
        match kind {
            Kind::Rows => &self.rows_name,
            Kind::Predictions => &self.name,
        }
    }

    pub(crate) fn counts(&self, kind: Kind) -> &Counts {
        match kind {
            Kind::Rows => &self.rows,
            Kind::Predictions => &self.predictions,
        }
    }
}

impl Service {
    /// Returns the models that there are.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        let predicts = self.generations.predicts().then_some(Kind::Predictions);
        [Kind::Rows].into_iter().chain(predicts)
    }

    /// Finds a model.
    ///
    /// # Errors
    /// 404 for another name or version.
    pub(crate) fn kind_of(
        &self,
        name: &str,
        version: Option<&str>,
    ) -> std::result::Result<Kind, Refusal> {
        let unknown = |message| Refusal::new(StatusCode::NOT_FOUND, "invalid", message);
        let found = self.kinds().find(|kind| self.models.name(*kind) == name);
        let kind = found.ok_or_else(|| {
            let known: Vec<_> = self.kinds().map(|kind| self.models.name(kind)).collect();
            unknown(format!(
                "Request for unknown model: '{name}' is not found (there are: {})",
                known.join(", ")
            ))
        })?;
        match version {
            Some(version) if version != VERSION => Err(unknown(format!(
                "Request for unknown model: '{name}' version {version} is not found (there is: \
                 {VERSION})"
            ))),
            _ => Ok(kind),
        }
    }
}

/// The model that a path names.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named(pub(super) Kind);

impl FromRequestParts<Arc<Service>> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(
        parts: &mut Parts,
        service: &Arc<Service>,
    ) -> std::result::Result<Self, Refusal> {
        let path = Path::<HashMap<String, String>>::from_request_parts(parts, service).await;
        let Path(parts) = path.map_err(|cause| {
            Refusal::new(StatusCode::BAD_REQUEST, "invalid", format!("path is malformed: {cause}"))
        })?;
        let Some(name) = parts.get("model") else { panic!("a route of no model: {parts:?}") };
        service.kind_of(name, parts.get("version").map(String::as_str)).map(Self)
    }
}
