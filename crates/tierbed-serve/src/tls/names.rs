//! Names that certificates of clients must have.

use std::sync::Arc;

use tierbed_core::{Error, Result};
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::pki_types::{CertificateDer, DnsName, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{self, DigitallySignedStruct, DistinguishedName, SignatureScheme};

/// Lets in those of an authority's clients whose certificate has one of some DNS names.
#[derive(Debug)]
pub(super) struct Named {
    authority: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl Named {
    /// Asks for names beyond what `authority` asks for; without names it is enough.
    ///
    /// # Errors
    /// `Invalid` for what is no DNS name.
    pub(super) fn over(
        authority: Arc<dyn ClientCertVerifier>,
        names: &[String],
    ) -> Result<Arc<dyn ClientCertVerifier>> {
        if names.is_empty() {
            return Ok(authority);
        }
        let parsed = names.iter().map(|name| {
            DnsName::try_from(name.clone()).map(ServerName::DnsName).map_err(|cause| {
                Error::invalid("a name of clients is no DNS name")
                    .with("found", format_args!("{name:?}"))
                    .with("cause", cause)
                    .with("remedy", "give names as they stand in the clients' certificates")
            })
        });
        Ok(Arc::new(Self { authority, names: parsed.collect::<Result<_>>()? }))
    }
}

impl ClientCertVerifier for Named {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        let verified = self.authority.verify_client_cert(end_entity, intermediates, now)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        match self.names.iter().any(|name| verify_server_name(&certificate, name).is_ok()) {
            true => Ok(verified),
            false => Err(rustls::CertificateError::NotValidForName.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}
