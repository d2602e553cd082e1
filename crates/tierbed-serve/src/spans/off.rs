//! A server without spans: what would note them does nothing, and takes no room.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, Request};
use prometheus_client::registry::Registry;
use tierbed_core::env::Clock;
use tierbed_core::{Error, Result};
use tierbed_snapshot::LookupStats;

use super::{Call, Ending};
use crate::log::Log;
use crate::options::ServeOptions;
use crate::origin::Origin;

/// Where a collector is named for all programs of a machine.
const ENDPOINT_VARIABLES: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Spans {}

impl Spans {
    /// Tells of a collector that the environment names: it is not for this program alone.
    ///
    /// # Errors
    /// `Unsupported` where the options name a collector.
    pub(crate) fn start(&self, options: &ServeOptions, log: &Arc<Log>) -> Result<()> {
        if let Some(endpoint) = &options.otlp_endpoint {
            return Err(Error::unsupported("this program was built without spans")
                .with("otlp_endpoint", endpoint)
                .with("remedy", "build it with --features otel, or leave out otlp_endpoint"));
        }
        let is_set = |name: &&&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if let Some(variable) = ENDPOINT_VARIABLES.iter().find(is_set) {
            log.spans_not_built(variable);
        }
        Ok(())
    }

    pub(crate) fn register(&self, _: &mut Registry) {}

    pub(crate) fn origin(&self, headers: &HeaderMap, _: Call<'_>) -> Origin {
        Origin::new(headers)
    }

    pub(crate) fn ended(&self, _: &Origin, _: Ending<'_>) {}

    pub(crate) fn flush(&self) {}

    pub(crate) fn close(&self, _: Duration) {}
}

/// Returns the route that answers a request: nobody asks for it.
pub(crate) fn route_of<B>(_: &Request<B>) -> Option<&str> {
    None
}

/// See the module documentation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps {}

impl Steps {
    pub(crate) fn of_model(&self, _: &str) {}

    pub(crate) fn waits(&self, _: u64) {}

    pub(crate) fn looks_up(&self, _: u64, _: usize) {}

    pub(crate) fn found(&self, _: &LookupStats) {}

    pub(crate) fn scores(&self, _: &dyn Clock) {}

    pub(crate) fn close(&self, _: u64) {}
}
