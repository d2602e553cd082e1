//! Lines about a channel that is followed.

use tierbed_core::Error;

use super::Log;

impl Log {
    /// Tells that another version of the channel answers.
    pub(crate) fn version_served(&self, version: u64, how: &'static str, seconds: f64) {
        self.write(|| tracing::info!(event = "version_served", version, how, seconds));
    }

    /// Tells why the version of the channel does not answer; what answered goes on.
    pub(crate) fn not_in_sync(&self, reason: &'static str, error: &Error) {
        self.write_some(reason, |suppressed| {
            tracing::error!(event = "sync_failed", reason, suppressed, message = %error);
        });
    }

    /// Tells that a gateway answers from another generation of its shards.
    pub(crate) fn generation_served(&self, publish: u64, delta: u64) {
        self.write(|| tracing::info!(event = "generation_served", publish, delta));
    }

    /// Tells why a gateway stays where it is.
    pub(crate) fn shards_not_followed(&self, message: &str) {
        self.write(|| tracing::error!(event = "shards_not_followed", message));
    }

    /// Tells that a new snapshot answers with less in its cache than it might.
    pub(crate) fn not_warmed(&self, error: &Error) {
        self.write(|| tracing::warn!(event = "not_warmed", message = %error));
    }

    pub(crate) fn follows_no_more(&self, what: &str) {
        self.write(|| tracing::error!(event = "sync_ended", message = what));
    }
}
