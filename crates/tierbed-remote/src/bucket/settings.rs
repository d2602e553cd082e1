//! Settings of buckets, by the names that every tool for S3 knows: `AWS_REGION` and the like.
//!
//! Normative text: docs/reference/buckets.md.

use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::ClientConfigKey;
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use tierbed_core::{Error, Result};

const PREFIX: &str = "AWS_";
/// A request that fails is made again for about three seconds; then its caller decides.
const RETRIES: usize = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
const RETRY_TIME_MAX: Duration = Duration::from_secs(30);
/// Four chunks of 16 MiB arrive in it over 10 Mbit/s.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);

/// How to reach a bucket: endpoint, region, credentials, time limits.
#[derive(Clone, Default)]
pub struct BucketSettings {
    /// Later ones win. Not shown: some are secrets.
    pairs: Vec<(String, String)>,
}

impl std::fmt::Debug for BucketSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.pairs.iter().map(|(name, _)| name)).finish()
    }
}

impl BucketSettings {
    /// Returns the settings of this process's environment.
    #[must_use]
    pub fn from_env() -> Self {
        let all = std::env::vars_os();
        let texts = all.filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::default().with(texts.filter(|(name, _)| name.starts_with(PREFIX)))
    }

    /// Adds settings by their names in the environment; those without a value count for nothing.
    #[must_use]
    pub fn with(
        mut self,
        pairs: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
    ) -> Self {
        let pairs = pairs.into_iter().map(|(name, value)| (name.into(), value.into()));
        self.pairs.extend(pairs.filter(|(_, value): &(String, String)| !value.is_empty()));
        self
    }

    fn get(&self, name: &str) -> Option<&str> {
        let found = self.pairs.iter().rev().find(|(found, _)| found == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Returns where the store is said to be, for messages.
    pub(super) fn endpoint(&self) -> Option<&str> {
        ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
            .into_iter()
            .find_map(|name| self.get(name))
    }

    /// Makes a client for `bucket`; nothing is asked yet.
    pub(super) fn connect(&self, bucket: &str) -> Result<AmazonS3> {
        self.check_endpoint()?;
        // It is there already when a server of this process has made one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: FIRST_PAUSE, max_backoff: PAUSE_MAX, base: 2.0 },
            max_retries: RETRIES,
            retry_timeout: RETRY_TIME_MAX,
        };
        let limits = ClientOptions::new().with_timeout(REQUEST_TIME_MAX);
        let mut builder = AmazonS3Builder::new().with_retry(retry).with_client_options(limits);
        for (name, value) in &self.pairs {
            // The environment has names of other tools too, `AWS_PROFILE` among them.
            let Ok(key) = name.to_ascii_lowercase().parse() else { continue };
            builder = builder.with_config(key, value);
        }
        // Objects are removed one after the other, and not every store knows how to take many.
        let one_by_one = AmazonS3ConfigKey::DisableBulkDelete;
        builder = builder.with_config(one_by_one, "true").with_bucket_name(bucket);
        builder.build().map_err(|cause| {
            Error::invalid("settings of the bucket do not go together")
                .with("bucket", bucket)
                .with("cause", cause)
                .with("remedy", "see the settings of buckets in the reference")
        })
    }

    fn check_endpoint(&self) -> Result<()> {
        let Some(endpoint) = self.endpoint() else { return Ok(()) };
        let is_plain = endpoint.starts_with("http://");
        if !is_plain && !endpoint.starts_with("https://") {
            return Err(Error::invalid("endpoint of the bucket is no address")
                .with("AWS_ENDPOINT_URL", endpoint)
                .with("remedy", "begin it with https:// or http://"));
        }
        let allow = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        let is_allowed = self.pairs.iter().rev().find_map(|(name, value)| {
            let key = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>().ok()?;
            (key == allow).then_some(matches!(value.as_str(), "1" | "true" | "on" | "yes" | "y"))
        });
        if is_plain && is_allowed != Some(true) {
            return Err(Error::invalid("endpoint of the bucket is not encrypted")
                .with("AWS_ENDPOINT_URL", endpoint)
                .with("remedy", "set AWS_ALLOW_HTTP=true where the network is trusted"));
        }
        Ok(())
    }
}
