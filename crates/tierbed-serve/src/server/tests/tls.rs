//! Encrypted connections: whom the server answers, and what it tells the others.

use std::io;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tokio_rustls::TlsConnector;

use super::grpc::{asked_for_rows, Client};
use super::telling::{lines, logged, of};
use super::*;
use crate::tls::tests::{Authority, Issued, Laid};

type Stream = StreamOwned<ClientConnection, TcpStream>;

/// Trusts an authority, and shows a certificate of its own where it has one.
fn trusting(authority: &Authority, own: Option<&Issued>, alpn: &[u8]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

fn connect(server: &Server, config: &Arc<ClientConfig>) -> Stream {
    connect_to(server.address(), config)
}

fn connect_to(address: SocketAddr, config: &Arc<ClientConfig>) -> Stream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let name = "localhost".try_into().unwrap();
    StreamOwned::new(ClientConnection::new(Arc::clone(config), name).unwrap(), socket)
}

/// Asks over a connection that stays open.
fn told(stream: &mut Stream, path: &str) -> io::Result<String> {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: t\r\n\r\n").as_bytes())?;
    let (mut answer, mut bytes) = (String::new(), [0; 4096]);
    loop {
        let count = stream.read(&mut bytes)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        answer.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        let Some((head, body)) = answer.split_once("\r\n\r\n") else { continue };
        let head = head.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        if body.len() == length.parse::<usize>().unwrap() {
            return Ok(answer);
        }
    }
}

fn live(server: &Server, config: &Arc<ClientConfig>) -> io::Result<String> {
    told(&mut connect(server, config), "/livez")
}

/// Waits for handshakes that failed.
fn until_failed(server: &Server, config: &Arc<ClientConfig>, reason: &str, count: usize) {
    let line = format!("tierbed_handshakes_failed_total{{reason=\"{reason}\"}} {count}");
    let mut text = String::new();
    for _ in 0..400 {
        text = told(&mut connect(server, config), "/metrics").unwrap();
        if text.lines().any(|found| found == line) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("no {line} in\n{text}");
}

fn encrypted(laid: &Laid, options: ServeOptions) -> ServeOptions {
    let grpc_address = Some("127.0.0.1:0".into());
    ServeOptions { tls: Some(laid.files.clone()), grpc_address, ..options }
}

#[test]
fn a_client_of_the_authority_is_answered_over_both_protocols() {
    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue(), Some(&authority));
    let admin_address = Some("127.0.0.1:0".into());
    let options = ServeOptions { admin_address, ..options() };
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let own = authority.issue();
    let mut stream = connect(&server, &trusting(&authority, Some(&own), b"http/1.1"));
    assert!(told(&mut stream, "/livez").unwrap().starts_with("HTTP/1.1 200"));
    assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
    assert!(told(&mut stream, "/v2").unwrap().contains("tierbed"), "again, on the same one");

    let operators = server.admin_address().unwrap();
    let mut stream = connect_to(operators, &trusting(&authority, Some(&own), b"http/1.1"));
    assert!(told(&mut stream, "/stats").unwrap().contains("\"state\":\"ready\""));
    let mut stranger = connect_to(operators, &trusting(&authority, None, b"http/1.1"));
    assert!(told(&mut stranger, "/stats").is_err(), "operators need a certificate, too");

    let connector = TlsConnector::from(trusting(&authority, Some(&own), b"h2"));
    let client = Client::through(&server, async |stream| {
        connector.connect("localhost".try_into().unwrap(), stream).await.unwrap()
    });
    let path = "/inference.GRPCInferenceService/ModelInfer";
    assert_eq!(client.call_with(path, None, asked_for_rows()).code, tonic::Code::Ok);
    let other = trusting(&authority, Some(&own), b"h2");
    assert!(live(&server, &other).is_err(), "the port of HTTP does not offer h2");
}

#[test]
fn clients_without_a_valid_certificate_are_refused_counted_and_told() {
    let (authority, other) = (Authority::new("ours"), Authority::new("other"));
    let laid = Laid::new(&authority.issue(), Some(&authority));
    let (options, found) = logged(LogOptions::default());
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let own = authority.issue();
    let trusted = trusting(&authority, Some(&own), b"http/1.1");
    let (expired, foreign) = (authority.issue_until(2001), other.issue());
    for own in [None, Some(&expired), Some(&foreign)] {
        assert!(live(&server, &trusting(&authority, own, b"http/1.1")).is_err());
    }
    until_failed(&server, &trusted, "certificate", 3);
    assert!(live(&server, &trusting(&other, Some(&own), b"http/1.1")).is_err());
    until_failed(&server, &trusted, "client", 1);
    let lines = lines(&found);
    let reasons: Vec<_> =
        of(&lines, "handshake_failed").iter().map(|line| line["reason"].clone()).collect();
    assert_eq!(reasons, ["certificate", "certificate", "certificate", "client"], "{lines:?}");
}

#[test]
fn clients_without_a_name_of_the_list_are_refused() {
    let authority = Authority::new("ours");
    let mut laid = Laid::new(&authority.issue(), Some(&authority));
    laid.files.client_names = vec!["ranker".into(), "probe.ours".into()];
    let server = Server::start(&encrypted(&laid, options()), snapshot(), None).unwrap();
    let of_name = |name| trusting(&authority, Some(&authority.issue_named(name)), b"http/1.1");
    for name in ["ranker", "probe.ours"] {
        assert!(live(&server, &of_name(name)).unwrap().starts_with("HTTP/1.1 200"), "{name}");
    }
    for name in ["other", "ranker.ours", "ours"] {
        assert!(live(&server, &of_name(name)).is_err(), "{name}");
    }
    until_failed(&server, &of_name("ranker"), "name", 3);
    let foreign =
        trusting(&authority, Some(&Authority::new("other").issue_named("ranker")), b"http/1.1");
    assert!(live(&server, &foreign).is_err(), "a name alone is nothing");
    until_failed(&server, &of_name("ranker"), "certificate", 1);
}

#[test]
fn a_certificate_of_the_server_that_has_expired_is_no_good_to_clients() {
    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue_until(2001), None);
    let (options, found) = logged(LogOptions::default());
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let error = live(&server, &trusting(&authority, None, b"http/1.1")).unwrap_err();
    assert!(error.to_string().to_lowercase().contains("expired"), "{error}");
    drop(server);
    let lines = lines(&found);
    let [line] = of(&lines, "handshake_failed")[..] else { panic!("{lines:?}") };
    assert_eq!(line["reason"], "client", "{line}");
    assert!(line["message"].as_str().unwrap().contains("Expired"), "{line}");
}

#[test]
fn plain_http_is_told_to_encrypt() {
    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue(), None);
    let server = Server::start(&encrypted(&laid, options()), snapshot(), None).unwrap();
    let answer = get(&server, "/livez");
    assert_eq!((answer.status, &answer.json()["kind"]), (400, &json!("invalid")));
    assert!(answer.text().contains("https://"), "{}", answer.text());
    // Probes of the open port are no failures.
    drop(TcpStream::connect(server.address()).unwrap());
    let trusted = trusting(&authority, None, b"http/1.1");
    until_failed(&server, &trusted, "not_tls", 1);
    let text = told(&mut connect(&server, &trusted), "/metrics").unwrap();
    let failed = text.lines().filter(|line| line.starts_with("tierbed_handshakes_failed_total"));
    assert_eq!(failed.count(), 1, "{text}");
}

#[test]
fn a_handshake_has_its_time_and_its_place() {
    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue(), None);
    let options = limited(|limits| (limits.handshake_ms_max, limits.handshakes_max) = (1_000, 1));
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let trusted = trusting(&authority, None, b"http/1.1");
    let mut slow = TcpStream::connect(server.address()).unwrap();
    // The first bytes of a handshake, and no more.
    slow.write_all(&[0x16, 3, 1]).unwrap();
    assert_eq!(slow.read(&mut [0]).unwrap_or(0), 0);
    until_failed(&server, &trusted, "slow", 1);

    let service = Arc::clone(&lock(&server.running).as_ref().unwrap().service);
    let taken = service.tls.as_ref().unwrap().handshakes.try_acquire().unwrap();
    assert!(live(&server, &trusted).is_err());
    drop(taken);
    until_failed(&server, &trusted, "busy", 1);
}

#[test]
fn new_files_hold_for_new_connections_and_cut_no_old_one() {
    let (authority, next) = (Authority::new("ours"), Authority::new("next"));
    let laid = Laid::new(&authority.issue(), None);
    let (options, found) = logged(LogOptions { level: LogLevel::Info, ..LogOptions::default() });
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let until = |event: &str| {
        let mut seen = Vec::new();
        while of(&seen, event).is_empty() {
            let line = found.recv_timeout(Duration::from_secs(20)).expect(event);
            seen.push(serde_json::from_slice(&line).unwrap());
        }
    };
    let (old, new) = (trusting(&authority, None, b"http/1.1"), trusting(&next, None, b"http/1.1"));
    let mut kept = connect(&server, &old);
    told(&mut kept, "/livez").unwrap();
    let foreign = next.issue();
    laid.replace(&Issued { certificate: foreign.certificate.clone(), key: "none".into() });
    until("tls_not_read");
    let metrics = told(&mut connect(&server, &old), "/metrics").unwrap();
    assert!(metrics.contains("tierbed_tls_changes_refused_total 1"), "{metrics}");
    laid.replace(&foreign);
    until("tls_read");
    live(&server, &new).unwrap();
    // Not resumed: a client of before is shown the new certificate, and does not trust it.
    assert!(live(&server, &old).is_err());
    assert!(told(&mut kept, "/livez").unwrap().starts_with("HTTP/1.1 200"));
}

#[test]
fn a_client_in_the_midst_of_its_handshake_does_not_hold_up_the_stop() {
    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue(), None);
    let options = limited(|limits| limits.handshake_ms_max = 60_000);
    let server = Server::start(&encrypted(&laid, options), snapshot(), None).unwrap();
    let mut half = TcpStream::connect(server.address()).unwrap();
    half.write_all(&[0x16, 3, 1]).unwrap();
    assert!(server.stop());
    assert!(server.wait(Duration::ZERO), "within stop_ms_max, before the handshake's time");
}
