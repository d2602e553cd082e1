//! Requests are found in the log by the id and the trace that their clients gave.

use super::telling::{lines, logged, of};
use super::*;

pub(super) const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Tells whether a header is of the same trace, and of another span.
pub(super) fn goes_on(told: &str) -> bool {
    told.len() == TRACEPARENT.len()
        && told[..36] == TRACEPARENT[..36]
        && told[36..52] != TRACEPARENT[36..52]
        && told.ends_with("-01")
}

fn of_id(id: &str) -> Vec<u8> {
    let ids = json!({"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 1]});
    json!({ "id": id, "inputs": [ids] }).to_string().into_bytes()
}

#[test]
fn answers_carry_the_id_of_the_header_or_of_the_body() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let post = "POST /v2/models/tierbed.rows/infer";
    let told = |lines: &str, body: &[u8]| {
        let answer = ask_with(&server, post, lines, body);
        (answer.status, answer.field("x-request-id").to_owned())
    };
    assert_eq!(told("X-a: b", &of_id("seven")), (200, "seven".into()));
    assert_eq!(told("X-Request-Id: of-proxy", &of_id("seven")), (200, "of-proxy".into()));
    assert_eq!(told("X-a: b", &of_id("new\nline")), (200, String::new()));
    assert_eq!(told("X-a: b", br#"{"id": "seven", "inputs": []}"#), (400, "seven".into()));
    assert_eq!(told("X-Request-Id: of-proxy", b"no JSON"), (400, "of-proxy".into()));
    for path in ["GET /health", "GET /nowhere"] {
        let answer = ask_with(&server, path, "X-Request-Id: 5", b"");
        assert_eq!(answer.field("x-request-id"), "5");
        assert_eq!(answer.field("traceparent"), "");
    }
}

#[test]
fn a_line_of_the_log_is_found_by_what_the_client_was_told() {
    let log = LogOptions { slow_ms: 0, ..LogOptions::default() };
    let (mut options, found) = logged(log);
    options.limits.request_ms_max = 50;
    let (asked, is_asked) = mpsc::sync_channel(1);
    let (answer, told) = mpsc::sync_channel(1);
    let thinking = Arc::new(Thinking::new(asked, told));
    let server = Server::start(&options, snapshot(), Some(thinking)).unwrap();
    let lines_of = format!("X-Request-Id: r1\r\nTraceparent: {TRACEPARENT}");
    let late = ask_with(&server, "POST /v1/predict", &lines_of, SLOW.as_bytes());
    assert_eq!((late.status, late.field("x-request-id")), (504, "r1"));
    assert!(goes_on(late.field("traceparent")), "{}", late.head);
    let lines = lines(&found);
    let span = &late.field("traceparent")[36..52];
    for event in ["refused", "slow_request"] {
        let line = of(&lines, event)[0];
        assert_eq!((&line["request_id"], &line["span_id"]), (&json!("r1"), &json!(span)), "{line}");
        assert_eq!(line["trace_id"], TRACEPARENT[3..35]);
    }
    is_asked.recv().unwrap();
    answer.send(()).unwrap();
}
