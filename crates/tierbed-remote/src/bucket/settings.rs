//! Settings of buckets, by the names that tools for each kind know: `AWS_REGION`,
//! `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME` and the like.
//!
//! Normative text: docs/reference/buckets.md.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::ClientConfigKey;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use tierbed_core::{Error, Result};

use super::BucketKind;

const PREFIXES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];
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
        Self::default()
            .with(texts.filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix))))
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
    pub(super) fn endpoint(&self, kind: BucketKind) -> Option<&str> {
        let names: &[&str] = match kind {
            BucketKind::S3 => &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
            BucketKind::Gs => &["GOOGLE_BASE_URL"],
            BucketKind::Az => &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"],
        };
        names.iter().find_map(|name| self.get(name))
    }

    /// Returns the settings whose names are keys of a kind of store. The environment has names of
    /// other tools too, `AWS_PROFILE` among them.
    fn keys<K: FromStr>(&self) -> impl Iterator<Item = (K, &String)> {
        self.pairs
            .iter()
            .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)))
    }

    /// Makes a client for `bucket`; nothing is asked yet.
    pub(super) fn connect(&self, kind: BucketKind, bucket: &str) -> Result<Arc<dyn ObjectStore>> {
        // It is there already when a server of this process has made one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: FIRST_PAUSE, max_backoff: PAUSE_MAX, base: 2.0 },
            max_retries: RETRIES,
            retry_timeout: RETRY_TIME_MAX,
        };
        let limits = ClientOptions::new().with_timeout(REQUEST_TIME_MAX);
        let made: object_store::Result<Arc<dyn ObjectStore>> = match kind {
            BucketKind::S3 => {
                self.check_endpoint()?;
                let new = AmazonS3Builder::new().with_retry(retry).with_client_options(limits);
                let set = self.set_up(new).with_bucket_name(bucket);
                set.build().map(|store| Arc::new(store) as _)
            }
            BucketKind::Gs => {
                let new = GoogleCloudStorageBuilder::new();
                let new = new.with_retry(retry).with_client_options(limits);
                self.keys()
                    .fold(new, |builder, (key, value)| builder.with_config(key, value))
                    .with_bucket_name(bucket)
                    .build()
                    .map(|store| Arc::new(store) as _)
            }
            BucketKind::Az => {
                let new = MicrosoftAzureBuilder::new();
                let new = new.with_retry(retry).with_client_options(limits);
                self.keys()
                    .fold(new, |builder, (key, value)| builder.with_config(key, value))
                    .with_container_name(bucket)
                    .build()
                    .map(|store| Arc::new(store) as _)
            }
        };
        made.map_err(|cause| {
            Error::invalid("settings of the bucket do not go together")
                .with("bucket", bucket)
                .with("cause", cause)
                .with("remedy", "see the settings of buckets in the reference")
        })
    }

    fn set_up(&self, builder: AmazonS3Builder) -> AmazonS3Builder {
        // The digest of what is sent is part of its signature, and takes a pass over all of it.
        // It proves nothing more where TLS keeps everybody else from changing what is sent.
        let is_encrypted = !self.is_on(ClientConfigKey::AllowHttp)
            && !self.is_on(ClientConfigKey::AllowInvalidCertificates);
        let builder = builder.with_unsigned_payload(is_encrypted);
        // Objects are removed one after the other: not every store knows how to take many.
        self.keys()
            .fold(builder, |builder, (key, value)| builder.with_config(key, value))
            .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true")
    }

    /// Returns whether a setting of connections to S3 is on; by default none is.
    fn is_on(&self, wanted: ClientConfigKey) -> bool {
        let wanted = AmazonS3ConfigKey::Client(wanted);
        let last = self.pairs.iter().rev().find(|(name, _)| {
            name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>().is_ok_and(|key| key == wanted)
        });
        let is_on = |value: String| matches!(&*value, "1" | "true" | "on" | "yes" | "y");
        last.is_some_and(|(_, value)| is_on(value.to_ascii_lowercase()))
    }

    fn check_endpoint(&self) -> Result<()> {
        let Some(endpoint) = self.endpoint(BucketKind::S3) else { return Ok(()) };
        let is_plain = endpoint.starts_with("http://");
        if !is_plain && !endpoint.starts_with("https://") {
            return Err(Error::invalid("endpoint of the bucket is no address")
                .with("AWS_ENDPOINT_URL", endpoint)
                .with("remedy", "begin it with https:// or http://"));
        }
        if is_plain && !self.is_on(ClientConfigKey::AllowHttp) {
            return Err(Error::invalid("endpoint of the bucket is not encrypted")
                .with("AWS_ENDPOINT_URL", endpoint)
                .with("remedy", "set AWS_ALLOW_HTTP=true where the network is trusted"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_signed_unless_it_is_encrypted_or_the_user_says_otherwise() {
        let is_unsigned = |pairs: &[(&str, &str)]| {
            let settings = BucketSettings::default().with(pairs.iter().copied());
            let builder = settings.set_up(AmazonS3Builder::new());
            builder.get_config_value(&AmazonS3ConfigKey::UnsignedPayload).unwrap() == "true"
        };
        assert!(is_unsigned(&[]));
        assert!(is_unsigned(&[("AWS_ENDPOINT_URL", "https://localhost:8333")]));
        assert!(is_unsigned(&[("AWS_ALLOW_HTTP", "true"), ("AWS_ALLOW_HTTP", "false")]));
        for (name, value) in
            [("AWS_ALLOW_HTTP", "true"), ("aws_allow_http", "1"), ("ALLOW_HTTP", "Yes")]
        {
            assert!(!is_unsigned(&[(name, value)]), "a redirect may lead anywhere: {name}");
        }
        assert!(!is_unsigned(&[("AWS_ALLOW_INVALID_CERTIFICATES", "true")]));
        assert!(!is_unsigned(&[("AWS_UNSIGNED_PAYLOAD", "false")]));
        let plain = [("AWS_ALLOW_HTTP", "true"), ("AWS_UNSIGNED_PAYLOAD", "true")];
        assert!(is_unsigned(&plain), "who asks for it gets it");
    }
}
