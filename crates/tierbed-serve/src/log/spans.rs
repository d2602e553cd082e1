//! Lines about spans that no collector gets.

use super::Log;

impl Log {
    /// Tells that spans were dropped: so many since the last such line.
    #[cfg(feature = "otel")]
    pub(crate) fn spans_not_sent(&self, dropped: u64, message: &str) {
        self.write(|| tracing::warn!(event = "spans_not_sent", dropped, message));
    }

    /// Tells that the environment names a collector, which this program cannot send spans to.
    #[cfg(not(feature = "otel"))]
    pub(crate) fn spans_not_built(&self, variable: &str) {
        self.write(|| {
            tracing::warn!(
                event = "spans_not_built",
                variable,
                message = "this program was built without spans; build it with --features otel"
            );
        });
    }
}
