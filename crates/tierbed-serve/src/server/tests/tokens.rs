//! Who may ask a server that has tokens.

#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use super::grpc::{asked_for_rows, Client};
use super::telling::{lines, logged, of};
use super::*;

/// SHA-256 of `abc` and of nothing, from FIPS 180-4; nobody has the second token.
const TOKENS: &str = "\
ranker ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad infer
nobody e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 metrics
";

pub(super) fn guarded() -> (tempfile::TempDir, ServeOptions) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens");
    std::fs::write(&path, TOKENS).unwrap();
    (folder, ServeOptions { tokens: Some(path), ..options() })
}

#[test]
fn every_route_but_those_of_probes_needs_a_token_of_its_scope() {
    let (_folder, options) = guarded();
    let server = Server::start(&options, snapshot(), None).unwrap();
    let asked = |what: &str, lines: &str| ask_with(&server, what, lines, b"").status;
    for path in ["/livez", "/readyz", "/v2/health/live", "/v2/health/ready"] {
        assert_eq!(get(&server, path).status, 200, "{path}");
    }
    let (ours, other) = ("Authorization: Bearer abc", "Authorization: Bearer abd");
    let infer = ["GET /", "GET /v2", "GET /v2/models/tierbed.rows", "GET /none", "GET /livez/more"];
    for what in infer {
        assert_eq!((asked(what, "X: y"), asked(what, other)), (401, 401), "{what}");
        assert_eq!(asked(what, ours) == 404, what == "GET /none" || what == "GET /livez/more");
    }
    for what in ["GET /metrics", "GET /health"] {
        assert_eq!((asked(what, "X: y"), asked(what, ours)), (401, 403), "{what}");
    }
    let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}}).to_string();
    let lookup = |lines: &str| ask_with(&server, "POST /v1/lookup", lines, body.as_bytes());
    assert_eq!((lookup("X: y").status, lookup(ours).status), (401, 200));
    let refused = ask_with(&server, "GET /v2/models/tierbed.rows", other, b"").json();
    assert_eq!(refused, json!({"error": "the token is not known"}));
}

#[test]
fn a_client_is_told_how_to_ask_and_the_log_tells_of_it() {
    let (_folder, options) = guarded();
    let (told, found) = logged(LogOptions::default());
    let server = Server::start(&ServeOptions { log: told.log, ..options }, snapshot(), None);
    let server = server.unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.to_lowercase().contains("www-authenticate: bearer\r\n"), "{answer}");
    let lines = lines(&found);
    let [line] = of(&lines, "unauthorized")[..] else { panic!("{lines:?}") };
    assert_eq!((&line["route"], &line["status"]), (&json!("/"), &json!(401)), "{line}");
}

#[test]
fn calls_need_a_token_too_and_health_does_not() {
    let (_folder, options) = guarded();
    let options = ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..options };
    let server = Server::start(&options, snapshot(), None).unwrap();
    let client = Client::new(&server);
    let infer = |token: Option<&str>| {
        let header = token.map(|token| ("authorization", token));
        let path = "/inference.GRPCInferenceService/ModelInfer";
        client.call_with_header(path, header, asked_for_rows())
    };
    assert_eq!(infer(None).code, tonic::Code::Unauthenticated);
    assert_eq!(infer(Some("Bearer abd")).code, tonic::Code::Unauthenticated);
    assert_eq!(infer(Some("Bearer abc")).code, tonic::Code::Ok);
    for open in [
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    ] {
        assert_eq!(client.call_with(open, None, vec![0; 5]).code, tonic::Code::Ok, "{open}");
    }
    let hidden = "/inference.GRPCInferenceService/ServerMetadata";
    assert_eq!(client.call_with(hidden, None, vec![0; 5]).code, tonic::Code::Unauthenticated);
}

#[test]
fn a_changed_file_is_read_while_the_server_runs() {
    let (folder, options) = guarded();
    let (told, found) = logged(LogOptions { level: LogLevel::Info, ..LogOptions::default() });
    let server = Server::start(&ServeOptions { log: told.log, ..options }, snapshot(), None);
    let server = server.unwrap();
    let status = || ask_with(&server, "GET /", "Authorization: Bearer abc", b"").status;
    let until = |event: &str| {
        let mut seen = Vec::new();
        while of(&seen, event).is_empty() {
            let line = found.recv_timeout(Duration::from_secs(20)).expect(event);
            seen.push(serde_json::from_slice(&line).unwrap());
        }
    };
    assert_eq!(status(), 200);
    let path = folder.path().join("tokens");
    std::fs::write(&path, "damaged").unwrap();
    until("tokens_not_read");
    assert_eq!(status(), 200);
    std::fs::write(&path, TOKENS.lines().nth(1).unwrap()).unwrap();
    until("tokens_read");
    assert_eq!(status(), 401);
}

#[test]
fn a_server_for_everybody_says_so_beyond_this_machine() {
    let (told, found) = logged(LogOptions::default());
    for (address, count) in [("127.0.0.1:0", 0), ("0.0.0.0:0", 1)] {
        let options = ServeOptions { address: address.into(), ..told.clone() };
        drop(Server::start(&options, snapshot(), None).unwrap());
        assert_eq!(of(&lines(&found), "open_to_all").len(), count, "{address}");
    }
    let (_folder, guarded) = guarded();
    let mut options = ServeOptions { address: "0.0.0.0:0".into(), requires_auth: true, ..told };
    let error = Server::start(&options, snapshot(), None).unwrap_err().to_string();
    assert!(error.contains("give tokens or tls_client_ca"), "{error}");
    let beside = ServeOptions {
        address: "127.0.0.1:0".into(),
        grpc_address: Some("0.0.0.0:0".into()),
        ..options.clone()
    };
    assert!(Server::start(&beside, snapshot(), None).is_err(), "gRPC is reached too");
    options.tokens = guarded.tokens;
    drop(Server::start(&options, snapshot(), None).unwrap());
    let alone = ServeOptions { address: "127.0.0.1:0".into(), tokens: None, ..options };
    drop(Server::start(&alone, snapshot(), None).unwrap());
    assert_eq!(of(&lines(&found), "open_to_all").len(), 0);
}
