//! Requests that come while others wait: refused, late, left, and answered while draining.

use super::*;

/// A server of one thread whose model thinks until it is told to answer. Lookups wait for that
/// thread, too, wherever their rows are.
pub(super) struct Held {
    pub(super) server: Server,
    scoring: Arc<Scoring>,
    pub(super) clock: Arc<ManualClock>,
}

impl Held {
    pub(super) fn start(limit: impl FnOnce(&mut Limits)) -> Self {
        let (scoring, clock) = (Arc::new(Scoring::default()), Arc::new(ManualClock::default()));
        let options = ServeOptions {
            lookup_threads: 1,
            grpc_address: Some("127.0.0.1:0".into()),
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..limited(|limits| {
                limits.inline_indices_max = 0;
                limit(limits);
            })
        };
        let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
        let server = Server::start(&options, snapshot(), Some(predictor)).unwrap();
        Self { server, scoring, clock }
    }

    pub(super) fn open(&self) {
        self.scoring.open();
    }

    /// Sends a prediction that holds the thread, and waits until it does.
    pub(super) fn hold(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address()).unwrap();
        stream.write_all(models::slow_request().as_bytes()).unwrap();
        self.until("tierbed_queue_seconds_count{route=\"/v1/predict\"} 1");
        stream
    }

    pub(super) fn has(&self, line: &str) -> bool {
        get(&self.server, "/metrics").text().lines().any(|found| found == line)
    }

    pub(super) fn until(&self, line: &str) {
        let is_there = (0..2_000).any(|_| {
            let is_there = self.has(line);
            if !is_there {
                std::thread::sleep(Duration::from_millis(5));
            }
            is_there
        });
        assert!(is_there, "no {line} in\n{}", get(&self.server, "/metrics").text());
    }

    /// Asks for a row, with header lines of the caller's own.
    fn ask(&self, lines: &str) -> Answer {
        ask_with(&self.server, "POST /v1/lookup", lines, LOOKUP.as_bytes())
    }
}

const LOOKUP: &str = r#"{"features":{"user":{"values":[1],"offsets":[0,1]}}}"#;
const EXPECTED: &str = "x-envoy-expected-rq-timeout-ms";

#[test]
fn a_request_that_would_wait_too_long_is_refused_at_once() {
    let held = Held::start(|_| {});
    let first = held.hold();
    // What has taken a second is taken to need another one.
    held.clock.advance_us(1_000_000);
    let refused = held.ask("X-a: b");
    assert_eq!((refused.status, &refused.json()["kind"]), (503, &json!("busy")));
    assert!(refused.text().contains("wait too long"), "{}", refused.text());
    for line in [
        r#"tierbed_requests_refused_total{reason="predicted_wait"} 1"#,
        "tierbed_queue_wait_seconds 1.0",
        "tierbed_queue_requests 0",
        "tierbed_requests_in_flight 1",
    ] {
        assert!(held.has(line), "no {line} in\n{}", get(&held.server, "/metrics").text());
    }
    held.open();
    held.until("tierbed_requests_in_flight 0");
    held.until("tierbed_queue_wait_seconds 0.0");
    assert_eq!(held.ask("X-a: b").status, 200);
    drop(first);
}

#[test]
fn a_request_whose_time_is_over_is_answered_and_does_no_work() {
    let held = Held::start(|limits| limits.request_ms_max = 5_000);
    let first = held.hold();
    let late = held.ask(&format!("{EXPECTED}: 500"));
    assert_eq!((late.status, &late.json()["kind"]), (504, &json!("io")));
    assert!(late.text().contains("longer than 500ms"), "{}", late.text());
    for line in [
        r#"tierbed_requests_refused_total{reason="deadline"} 1"#,
        "tierbed_requests_dropped_total 1",
        "tierbed_queue_requests 0",
    ] {
        assert!(held.has(line), "no {line} in\n{}", get(&held.server, "/metrics").text());
    }
    held.open();
    held.until("tierbed_requests_in_flight 0");
    assert!(!held.has(r#"tierbed_queue_seconds_count{route="/v1/lookup"} 1"#), "it was worked on");
    for (time, status) in [("5000", 200), ("0", 200), ("soon", 400)] {
        assert_eq!(held.ask(&format!("{EXPECTED}: {time}")).status, status, "{time}");
    }
    drop(first);
}

/// Asks for rows by the Open Inference Protocol.
fn infer(held: &Held, parameters: &Value) -> Answer {
    let inputs = json!([{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 1]}]);
    let body = json!({"parameters": parameters, "inputs": inputs}).to_string();
    let what = "POST /v2/models/tierbed.rows/infer";
    ask_with(&held.server, what, "Content-Type: application/json", body.as_bytes())
}

#[test]
fn low_requests_are_refused_first() {
    let held = Held::start(|limits| limits.requests_max = 2);
    let first = held.hold();
    let of = |priority: u64| infer(&held, &json!({"priority": priority, "timeout": 400_000}));
    assert_eq!([2, 3, 0, 1].map(|priority| of(priority).status), [503, 503, 504, 504]);
    held.open();
    drop(first);
}

#[test]
fn a_time_that_is_none_is_refused() {
    let held = Held::start(|_| {});
    for bad in [json!(-5), json!(1.5), json!("5"), json!(true)] {
        for name in ["timeout", "priority"] {
            let answer = infer(&held, &json!({ name: bad }));
            assert_eq!(answer.status, 400, "{name} {bad}: {}", answer.text());
        }
    }
    assert_eq!(infer(&held, &json!({"timeout": 0, "priority": 0})).status, 200);
}

#[test]
fn a_client_that_leaves_is_not_worked_for() {
    let held = Held::start(|_| {});
    let first = held.hold();
    let mut leaving = TcpStream::connect(held.server.address()).unwrap();
    let length = LOOKUP.len();
    let head = format!("POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: {length}\r\n\r\n");
    leaving.write_all((head + LOOKUP).as_bytes()).unwrap();
    held.until("tierbed_queue_requests 1");
    drop(leaving);
    held.until("tierbed_requests_dropped_total 1");
    held.until(r#"tierbed_requests_total{route="/v1/lookup",status="499"} 1"#);
    held.until("tierbed_requests_in_flight 1");
    held.open();
    drop(first);
}

#[test]
fn a_server_that_drains_is_alive_not_ready_and_answers() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let routes = ["/livez", "/readyz", "/v2/health/live", "/v2/health/ready"];
    let statuses = || routes.map(|route| get(&server, route).status);
    assert_eq!(statuses(), [200; 4]);
    server.drain();
    server.drain();
    assert_eq!(statuses(), [200, 503, 200, 503]);
    assert_eq!(
        ask(&server, "POST", "/v1/lookup", "application/json", LOOKUP.as_bytes()).status,
        200
    );
    assert!(get(&server, "/metrics").text().contains("tierbed_ready 0"));
    assert!(server.stop());
    server.drain();
}
