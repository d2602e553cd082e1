//! A collector that the environment names: of a process of its own, whose variables no other test
//! sees.

use std::process::Command;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::ServerConfig;

use super::*;
use crate::tls::tests::{Authority, Laid};

#[test]
#[ignore = "run by the test below, with variables of its own"]
fn serves_two_lookups() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    for trace in [TRACEPARENT, UNSAMPLED] {
        assert_eq!(look_up(&server, &format!("Traceparent: {trace}"), LOOKUP).status, 200);
    }
    assert!(server.stop());
}

#[test]
fn a_collector_of_the_environment_is_believed_by_its_certificate() {
    let authority = Authority::new("of collectors");
    let issued = authority.issue();
    let laid = Laid::new(&issued, Some(&authority));
    let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let collector = Collector::behind(Some(TlsAcceptor::from(Arc::new(config))));
    let test = concat!(module_path!(), "::serves_two_lookups");
    let (_, test) = test.split_once("::").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .env(
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            format!("https://localhost:{}", collector.address.port()),
        )
        .env("OTEL_TRACES_SAMPLER", "always_on")
        .env("OTEL_SERVICE_NAME", "ads")
        .env("OTEL_RESOURCE_ATTRIBUTES", "service.version=7,region=north")
        .env("SSL_CERT_FILE", laid.files.client_ca.as_ref().unwrap())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
    let spans = collector.spans();
    let is_request = |span: &&Span| span.kind == SpanKind::Server as i32;
    assert_eq!(spans.iter().filter(is_request).count(), 2, "{spans:?}");
    let resource = collector.resource();
    let known = json!(["ads", "7", "north"]);
    assert_eq!(
        json!([resource["service.name"], resource["service.version"], resource["region"]]),
        known
    );
}
