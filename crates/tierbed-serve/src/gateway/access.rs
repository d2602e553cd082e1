//! How shards are reached: certificates and the token that they want.

use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::stamp::read_small;

/// What servers of shards want of a gateway.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardAccess {
    /// Authorities of their certificates, in PEM; without, connections are not encrypted.
    pub ca: Option<PathBuf>,
    /// The gateway's certificate, in PEM, where they want one.
    pub certificate: Option<PathBuf>,
    /// The key of the certificate.
    pub key: Option<PathBuf>,
    /// The name in their certificates, where it is not that of their address.
    pub server_name: Option<String>,
    /// A file with the token that they want.
    pub token: Option<PathBuf>,
}

/// What was read of [`ShardAccess`].
#[derive(Debug)]
pub(super) struct Access {
    tls: Option<ClientTlsConfig>,
    token: Option<String>,
}

impl Access {
    /// Reads the files.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be read or do not belong together.
    pub(super) fn open(options: &ShardAccess) -> Result<Self> {
        let ShardAccess { ca, certificate, key, server_name, token } = options;
        let tls = match (ca, certificate, key) {
            (None, None, None) if server_name.is_none() => None,
            (Some(ca), None, None) => Some(ClientTlsConfig::new().ca_certificate(pem(ca)?)),
            (Some(ca), Some(certificate), Some(key)) => {
                let identity = Identity::from_pem(text(certificate)?, text(key)?);
                Some(ClientTlsConfig::new().ca_certificate(pem(ca)?).identity(identity))
            }
            _ => {
                return Err(Error::invalid("files of TLS towards shards do not belong together")
                    .with("remedy", "give shard-ca, and shard-cert and shard-key together"));
            }
        };
        let tls = tls.map(|tls| match server_name {
            Some(name) => tls.domain_name(name),
            None => tls,
        });
        let token = token.as_deref().map(text).transpose()?;
        let token = token.map(|token| String::from_utf8_lossy(&token).trim().to_owned());
        Ok(Self { tls, token })
    }

    pub(super) fn tls(&self) -> Option<&ClientTlsConfig> {
        self.tls.as_ref()
    }

    pub(super) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }
}

fn text(path: &Path) -> Result<Vec<u8>> {
    read_small(path, "access to shards")
}

fn pem(path: &Path) -> Result<Certificate> {
    text(path).map(Certificate::from_pem)
}
