//! Certificates of the server, and the authorities of its clients.
//!
//! All files are PEM, and are read again when one of them changes. Files that do not fit each other
//! are told by the log, and those before go on: a certificate and its key are replaced one after
//! the other. Connections that are open keep what they began with.

mod names;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};
use tokio::sync::Semaphore;
use tokio_rustls::rustls::crypto::{ring, CryptoProvider};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use self::names::Named;
use crate::connection::Protocol;
use crate::stamp::{read_small, Stamp};

/// Where the files lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, then those up to its authority.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// Authorities of clients; with them, a client needs a certificate of one of them.
    pub client_ca: Option<PathBuf>,
    /// DNS names, one of which a client's certificate must have; any will do without.
    pub client_names: Vec<String>,
}

impl TlsFiles {
    /// Takes what was given; `None`: connections are not encrypted.
    ///
    /// # Errors
    /// `Invalid` for one of certificate and key without the other, authorities without both, or
    /// names of clients without authorities.
    pub fn given(
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        client_ca: Option<PathBuf>,
        client_names: Vec<String>,
    ) -> Result<Option<Self>> {
        if client_ca.is_none() && !client_names.is_empty() {
            return Err(Error::invalid("names of clients are those of certificates")
                .with("remedy", "give tls_client_ca with tls_client_names"));
        }
        match (certificate, key, client_ca) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), client_ca) => {
                Ok(Some(Self { certificate, key, client_ca, client_names }))
            }
            _ => Err(Error::invalid("TLS needs a certificate and its key")
                .with("remedy", "give tls_cert and tls_key together, with tls_client_ca too")),
        }
    }

    fn stamps(&self) -> Stamps {
        let client_ca = self.client_ca.as_deref().map(Stamp::of);
        Stamps { certificate: Stamp::of(&self.certificate), key: Stamp::of(&self.key), client_ca }
    }
}

/// Of the files that were read last, whole or damaged.
#[derive(Debug, PartialEq, Eq)]
struct Stamps {
    certificate: Option<Stamp>,
    key: Option<Stamp>,
    client_ca: Option<Option<Stamp>>,
}

/// How new connections are encrypted.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    /// One is taken by every handshake.
    pub(crate) handshakes: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    configs: Configs,
    stamps: Stamps,
}

/// What the doors offer: the same but for the protocol above.
#[derive(Debug)]
struct Configs {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be read, are of another form, or do not fit each other.
    pub(crate) fn open(files: &TlsFiles, handshakes_max: usize) -> Result<Self> {
        // Before the files are read: what changes meanwhile is read again.
        let stamps = files.stamps();
        let configs = read(files)?;
        let handshakes = Semaphore::new(handshakes_max.min(Semaphore::MAX_PERMITS));
        Ok(Self { files: files.clone(), handshakes, state: Mutex::new(State { configs, stamps }) })
    }

    /// Reads the files again if one has changed; returns whether they were.
    ///
    /// # Errors
    /// As [`Tls::open`], once for each change; connections are encrypted as before.
    pub(crate) fn follow(&self) -> Result<bool> {
        if self.lock().stamps == self.files.stamps() {
            return Ok(false);
        }
        self.reload().map(|()| true)
    }

    /// Reads the files again.
    ///
    /// # Errors
    /// As [`Tls::open`]; connections are encrypted as before.
    pub(crate) fn reload(&self) -> Result<()> {
        // Before the files are read: what changes meanwhile is read again.
        self.lock().stamps = self.files.stamps();
        let configs = read(&self.files)?;
        self.lock().configs = configs;
        Ok(())
    }

    /// Returns how a connection that begins now is encrypted.
    pub(crate) fn config(&self, protocol: Protocol) -> Arc<ServerConfig> {
        let state = self.lock();
        Arc::clone(match protocol {
            Protocol::Http | Protocol::Admin => &state.configs.http,
            Protocol::Grpc => &state.configs.grpc,
        })
    }

    /// Tells whether clients need a certificate.
    pub(crate) fn knows_clients(&self) -> bool {
        self.files.client_ca.is_some()
    }

    // The state is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads all files. Sessions are kept with the configurations, so none outlives its authorities.
fn read(files: &TlsFiles) -> Result<Configs> {
    let chain = certificates(&files.certificate)?;
    let key = key(&files.key)?;
    let provider = Arc::new(ring::default_provider());
    let verifier = match &files.client_ca {
        Some(path) => Named::over(verifier(path, &provider)?, &files.client_names)?,
        None => WebPkiClientVerifier::no_client_auth(),
    };
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map(|builder| builder.with_client_cert_verifier(verifier))
        .and_then(|builder| builder.with_single_cert(chain, key))
        .map_err(|cause| {
            Error::invalid("the server's certificate cannot be used")
                .with("path", files.certificate.display())
                .with("key", files.key.display())
                .with("cause", cause)
                .with("remedy", "give a certificate, first of its file, and the key made for it")
        })?;
    let offering = |protocol: &[u8]| {
        let mut offering = config.clone();
        offering.alpn_protocols = vec![protocol.to_vec()];
        Arc::new(offering)
    };
    Ok(Configs { http: offering(b"http/1.1"), grpc: offering(b"h2") })
}

fn wrong(message: &str, path: &Path) -> Error {
    let error = Error::invalid(message).with("path", path.display());
    error.with("remedy", "write the certificates in PEM")
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read_small(path, "certificates")?;
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<std::result::Result<Vec<_>, _>>();
    let found =
        found.map_err(|cause| wrong("a certificate is damaged", path).with("cause", cause))?;
    match found.is_empty() {
        true => Err(wrong("the file has no certificate", path)),
        false => Ok(found),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&read_small(path, "key")?).map_err(|cause| {
        Error::invalid("the file has no key that can be read")
            .with("path", path.display())
            .with("cause", cause)
            .with("remedy", "write the key in PEM, without a passphrase")
    })
}

fn verifier(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>> {
    let refused = |cause: &dyn std::fmt::Display| {
        wrong("an authority of clients cannot be used", path).with("cause", cause)
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|cause| refused(&cause))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|cause| refused(&cause))
}

#[cfg(test)]
pub(crate) mod tests;
