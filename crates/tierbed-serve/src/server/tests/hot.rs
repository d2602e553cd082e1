//! Requests of the two hot routes are answered, counted and logged as the router does it.
//!
//! A body that names its coding is the router's, and `identity` changes nothing else.

use axum::body::Body;
use axum::http::Request;
use axum::Router;

use super::inline::{requests, INFER};
use super::origin::TRACEPARENT;
use super::telling::{lines, logged};
use super::*;
use crate::connection::{Callee, Protocol};
use crate::oip::model::Kind;
use crate::routes::hot::Hot;

const BY_ROUTER: &str = "Content-Encoding: identity";

/// A request: method and path, header lines, body.
struct Asked {
    what: String,
    lines: String,
    body: Vec<u8>,
}

impl Asked {
    fn new(what: &str, lines: &str, body: impl Into<Vec<u8>>) -> Self {
        Self { what: what.into(), lines: lines.into(), body: body.into() }
    }
}

/// Requests of all forms.
fn right() -> impl Iterator<Item = Asked> {
    requests().into_iter().map(|(path, content_type, lines, body)| {
        let lines = format!("Content-Type: {content_type}\r\n{lines}");
        Asked::new(&format!("POST {path}"), &lines, body)
    })
}

/// Requests, right and wrong.
fn table() -> Vec<Asked> {
    let (lookup, infer) = ("POST /v1/lookup", format!("POST {INFER}"));
    let row = |id: i64| {
        let body = json!({"features": {"user": {"values": [id], "offsets": [0, 1]}}});
        body.to_string().into_bytes()
    };
    let ids = |extra: Value| {
        let input = json!({"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 1]});
        let mut request = json!({ "inputs": [input] });
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        request.to_string().into_bytes()
    };
    let trace = format!("Traceparent: {TRACEPARENT}\r\nX-Request-Id: mine");
    let mut table: Vec<_> = right().collect();
    for (lines, body) in [
        ("X: y", row(1)),
        (&trace, row(1)),
        ("Accept-Encoding: gzip", row(1)),
        ("Accept-Encoding: gzip, deflate", row(1)),
        ("X-Envoy-Expected-Rq-Timeout-Ms: 60000", row(1)),
        ("X-Envoy-Expected-Rq-Timeout-Ms: soon", row(1)),
        ("Content-Type: text/csv", row(1)),
        ("Content-Type: application/x-safetensors", row(1)),
        ("X: y", row(500)),
        (&trace, row(-1)),
        ("X: y", b"{}".to_vec()),
        ("X: y", Vec::new()),
        ("X: y", vec![b' '; 5000]),
    ] {
        table.push(Asked::new(lookup, lines, body));
    }
    for (lines, body) in [
        ("X: y", ids(json!({}))),
        (&trace, ids(json!({"id": "of-body"}))),
        ("Accept-Encoding: deflate", ids(json!({}))),
        ("X: y", ids(json!({"parameters": {"timeout": 60_000_000, "priority": 1}}))),
        ("X: y", ids(json!({"parameters": {"timeout": -1}}))),
        ("X: y", ids(json!({"outputs": [{"name": "nothing"}]}))),
        ("X: y", ids(json!({"id": "of-body", "inputs": []}))),
        ("Inference-Header-Content-Length: none", ids(json!({}))),
        ("Inference-Header-Content-Length: 999", ids(json!({}))),
        ("Inference-Header-Content-Length: 10", ids(json!({}))),
        ("X-Envoy-Expected-Rq-Timeout-Ms: soon", ids(json!({}))),
        ("X: y", b"no JSON".to_vec()),
        ("X: y", vec![b' '; 5000]),
    ] {
        table.push(Asked::new(&infer, lines, body));
    }
    for what in [
        "GET /v1/lookup",
        "PUT /v2/models/tierbed.rows/infer",
        "POST /v2/models/tierbed/infer",
        "POST /v2/models/none/infer",
        "POST /v2/models//infer",
        "POST /v2/models/tierbed.rows/infer/",
        "POST /v2/models/tierbed.rows/infer?as=ever",
        "POST /v2/models/tierbed%2Erows/infer",
        "POST /v2/models/tierbed.rows/versions/1/infer",
        "POST /v2/models/tierbed.rows/versions/2/infer",
    ] {
        table.push(Asked::new(what, "X: y", ids(json!({}))));
    }
    table
}

/// The answer to a request; `line` is one more line of its head.
fn told(server: &Server, asked: &Asked, line: &str) -> (u16, Vec<String>, Vec<u8>) {
    let Answer { status, head, body, .. } =
        ask_with(server, &asked.what, &format!("{}\r\n{line}", asked.lines), &asked.body);
    let kept = head.lines().filter(|line| !line.starts_with("date:"));
    // Every server has its own span.
    let kept = kept.map(|line| match line.starts_with("traceparent:") {
        true => line.split_at(line.len() - 20).0.to_owned(),
        false => line.to_owned(),
    });
    let mut head: Vec<_> = kept.collect();
    head.sort();
    (status, head, body)
}

/// What was counted of requests, in no order.
fn counts(server: &Server) -> Vec<String> {
    let metrics = get(server, "/metrics").text();
    let named = [
        "tierbed_requests",
        "tierbed_request_",
        "tierbed_queue_seconds",
        "tierbed_inline",
        "tierbed_body_bytes",
        "tierbed_answer_bytes",
        "tierbed_answers_unfinished",
        "tierbed_buffered",
    ];
    let is_of_requests = |line: &&str| named.iter().any(|name| line.starts_with(name));
    let mut counts: Vec<_> = metrics.lines().filter(is_of_requests).map(str::to_owned).collect();
    counts.push(get(server, "/v2/models/tierbed.rows/stats").text());
    counts.sort();
    counts
}

/// Asks two servers the same, and compares all that they say; returns the statuses.
fn compare(options: impl Fn() -> ServeOptions, table: &[Asked]) -> Vec<u16> {
    let log = || LogOptions { level: LogLevel::Info, has_access: true, ..LogOptions::default() };
    let [hot, router] = [(), ()].map(|()| {
        let (of_log, found) = logged(log());
        // Of a time that stands still.
        let clock = Arc::new(ManualClock::default());
        let options = ServeOptions { log: of_log.log, clock, ..options() };
        (Server::start(&options, snapshot(), None).unwrap(), found)
    });
    let statuses = table.iter().map(|asked| {
        let found = told(&hot.0, asked, "X-Plain: yes");
        let expected = told(&router.0, asked, BY_ROUTER);
        assert_eq!(found, expected, "{} {}", asked.what, asked.lines);
        found.0
    });
    let statuses = statuses.collect();
    let logged = |found| {
        let mut lines: Vec<Value> = lines(found);
        lines.retain(|line| line["event"] != "serving");
        for line in &mut lines {
            for field in ["timestamp", "span_id"] {
                line.as_object_mut().unwrap().remove(field);
            }
        }
        lines
    };
    let (found, expected) = (logged(&hot.1), logged(&router.1));
    assert!(found.len() >= table.len(), "{} lines", found.len());
    assert_eq!(found, expected);
    assert_eq!(counts(&hot.0), counts(&router.0));
    statuses
}

#[test]
fn the_hot_routes_answer_as_the_router_does() {
    let statuses = compare(|| limited(|limits| limits.body_bytes_max = 4096), &table());
    for status in [200, 400, 404, 405, 413, 415] {
        assert!(statuses.contains(&status), "no {status} among {statuses:?}");
    }
}

#[test]
fn the_hot_routes_ask_for_the_same_tokens() {
    let (_folder, guarded) = tokens::guarded();
    let plain = |line: &str| {
        let is_plain = |asked: &Asked| asked.lines == "X: y";
        let plain = table().into_iter().filter(is_plain);
        plain.map(|asked| Asked { lines: line.to_owned(), ..asked }).collect::<Vec<_>>()
    };
    for (line, status) in [
        ("X: y", 401),
        ("Authorization: Bearer abd", 401),
        ("Authorization: abc", 401),
        ("Authorization: Bearer abc", 200),
    ] {
        let statuses = compare(|| guarded.clone(), &plain(line));
        assert_eq!(statuses[0], status, "{line}");
    }
}

#[test]
fn the_hot_routes_are_full_when_the_router_is() {
    let servers = [(); 2].map(|()| {
        let options = limited(|limits| limits.requests_max = 1);
        Server::start(&options, snapshot(), None).unwrap()
    });
    for drains in [false, true] {
        let places = servers.each_ref().map(|server| {
            if drains {
                server.drain();
            }
            Arc::clone(&server.places).try_acquire_owned().unwrap()
        });
        for asked in table().iter().filter(|asked| asked.lines == "X: y") {
            let [hot, router] = [(0, "X-Plain: yes"), (1, BY_ROUTER)]
                .map(|(at, line): (usize, _)| told(&servers[at], asked, line));
            assert_eq!(hot, router, "{}", asked.what);
            assert_ne!(hot.0, 200, "{}", asked.what);
        }
        drop(places);
    }
    for line in ["X-Plain: yes", BY_ROUTER] {
        assert_eq!(told(&servers[0], &table()[0], line).0, 200, "who drains still answers");
    }
}

#[test]
fn only_plain_posts_to_the_two_routes_are_hot() {
    let service = super::service(&options(), snapshot(), None, watch::channel(false).1).unwrap();
    let service = Arc::new(service);
    let of = |protocol, what: &str, coding: Option<&str>| {
        let callee = Callee { router: Router::new(), service: Arc::clone(&service), protocol };
        let (method, path) = what.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(path);
        if let Some(coding) = coding {
            request = request.header("content-encoding", coding);
        }
        Hot::of(&callee, &request.body(Body::empty()).unwrap())
    };
    let http = |what: &str| of(Protocol::Http, what, None);
    let infer = format!("POST {INFER}");
    assert_eq!(http("POST /v1/lookup"), Some(Hot::Lookup));
    assert_eq!(http("POST /v1/lookup?x=y"), Some(Hot::Lookup));
    assert_eq!(http(&infer), Some(Hot::Infer(Kind::Rows)));
    for other in ["GET /v1/lookup", "POST /v1/predict", "POST /v2/models/tierbed/infer"] {
        assert_eq!(http(other), None, "{other}");
    }
    for coding in ["gzip", "identity", "unknown"] {
        assert_eq!(of(Protocol::Http, "POST /v1/lookup", Some(coding)), None);
        assert_eq!(of(Protocol::Http, &infer, Some(coding)), None);
    }
    for protocol in [Protocol::Admin, Protocol::Grpc] {
        assert_eq!(of(protocol, "POST /v1/lookup", None), None);
        assert_eq!(of(protocol, &infer, None), None);
    }
}
