//! What failed is logged, counted and told.

use std::sync::mpsc::{sync_channel, Receiver};

use super::models::PANIC;
use super::*;

/// Options whose log goes into a queue of the test's.
pub(super) fn logged(log: LogOptions) -> (ServeOptions, Receiver<Vec<u8>>) {
    let (queue, lines) = sync_channel(256);
    let log = LogOptions { target: LogTarget::Queue(queue), ..log };
    (ServeOptions { log, ..options() }, lines)
}

pub(super) fn lines(found: &Receiver<Vec<u8>>) -> Vec<Value> {
    found.try_iter().map(|line| serde_json::from_slice(&line).unwrap()).collect()
}

pub(super) fn of<'a>(lines: &'a [Value], event: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["event"] == event).collect()
}

fn has(text: &str, line: &str) -> bool {
    text.lines().any(|found| found == line)
}

pub(super) fn damaged() -> Arc<Snapshot> {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    snapshot
}

#[test]
fn a_bad_page_is_logged_by_number_counted_and_told_by_health() {
    let clock = Arc::new(ManualClock::default());
    let (options, found) = logged(LogOptions::default());
    let options = ServeOptions { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..options };
    let server = Server::start(&options, damaged(), None).unwrap();
    assert_eq!(get(&server, "/health").json()["status"], "ok");
    let body = json!({"features": {"item.v2": {"values": [0, 3], "offsets": [0, 2]}}});
    for _ in 0..20 {
        assert_eq!(post_json(&server, &body).status, 500);
    }
    let told = lines(&found);
    let failed = of(&told, "request_failed");
    assert_eq!(failed.len(), 5, "many equal lines are counted, not written: {told:?}");
    let line = failed[0];
    assert_eq!((&line["level"], &line["status"]), (&json!("ERROR"), &json!(500)), "{line}");
    assert_eq!((&line["kind"], &line["page_id"]), (&json!("corruption"), &json!("0")), "{line}");
    assert!(line["path"].as_str().unwrap().contains("rows.pages"), "{line}");
    assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");

    clock.advance_us(10_000_000);
    let health = get(&server, "/health");
    assert_eq!((health.status, &health.json()["status"]), (200, &json!("degraded")));
    let reason = &health.json()["reasons"][0];
    assert_eq!((&reason["kind"], &reason["count"]), (&json!("corruption"), &json!(20)));
    assert_eq!(reason["seconds_ago"], 10.0);
    assert!(reason["message"].as_str().unwrap().contains("page_id: 0"), "{reason}");
    let text = get(&server, "/metrics").text();
    assert!(has(&text, r#"tierbed_request_failures_total{kind="corruption"} 20"#), "{text}");
    assert_eq!(post_json(&server, &body).status, 500);
    assert_eq!(of(&lines(&found), "request_failed")[0]["suppressed"], 15);
    clock.advance_us(60_000_000);
    assert_eq!(get(&server, "/health").json()["status"], "ok", "it is a while ago");
}

#[test]
fn panics_are_answered_logged_and_told() {
    let (options, found) = logged(LogOptions::default());
    let server = Server::start(&options, snapshot(), Some(Arc::new(Scoring::default()))).unwrap();
    let answer = ask(&server, "POST", "/v1/predict", "application/json", PANIC.as_bytes());
    assert_eq!((answer.status, &answer.json()["kind"]), (500, &json!("panic")));
    assert!(answer.text().contains("a model's bug"), "{}", answer.text());
    let told = lines(&found);
    assert_eq!(of(&told, "panic")[0]["message"], "a model's bug");
    assert_eq!(of(&told, "request_failed")[0]["kind"], "panic");
    assert_eq!(get(&server, "/health").json()["reasons"][0]["kind"], "panic");
    assert!(has(
        &get(&server, "/metrics").text(),
        r#"tierbed_request_failures_total{kind="panic"} 1"#
    ));
}

#[test]
fn refusals_are_counted_apart_and_take_no_time() {
    let scoring = Arc::new(Scoring::default());
    let (mut options, found) = logged(LogOptions::default());
    (options.limits.requests_max, options.lookup_threads) = (1, 1);
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&options, snapshot(), Some(predictor)).unwrap();
    std::thread::scope(|scope| {
        let post = ("POST", "/v1/predict", "application/json");
        let slow = scope.spawn(|| ask(&server, post.0, post.1, post.2, SLOW.as_bytes()));
        while !has(&get(&server, "/metrics").text(), "tierbed_requests_in_flight 1") {
            std::thread::sleep(Duration::from_millis(2));
        }
        for _ in 0..7 {
            assert_eq!(post_json(&server, &json!({})).status, 503);
        }
        scoring.open();
        assert_eq!(slow.join().unwrap().status, 200);
    });
    let text = get(&server, "/metrics").text();
    for line in [
        r#"tierbed_requests_total{route="/v1/lookup",status="503"} 7"#,
        r#"tierbed_requests_refused_total{reason="places"} 7"#,
        r#"tierbed_queue_seconds_count{route="/v1/predict"} 1"#,
        r#"tierbed_request_seconds_count{route="/v1/predict"} 1"#,
    ] {
        assert!(has(&text, line), "no {line} in\n{text}");
    }
    assert!(!text.contains(r#"tierbed_request_seconds_count{route="/v1/lookup"}"#), "{text}");
    let told = lines(&found);
    let refused = of(&told, "refused");
    assert_eq!((refused.len(), &refused[0]["reason"]), (5, &json!("places")), "{told:?}");
    assert_eq!(get(&server, "/health").json()["status"], "ok", "busy is not broken");
}

#[test]
fn clients_that_leave_before_the_answer_are_counted() {
    let scoring = Arc::new(Scoring::default());
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&options(), snapshot(), Some(predictor)).unwrap();
    let head = &models::slow_request();
    let half = "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nha";
    for text in [head, half] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    let counted = |route: &str| {
        let line = format!(r#"tierbed_requests_total{{route="{route}",status="499"}} 1"#);
        (0..400).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            has(&get(&server, "/metrics").text(), &line)
        })
    };
    assert!(counted("/v1/predict") && counted("/v1/lookup"));
    scoring.open();
}

#[test]
fn slow_requests_and_the_servers_life_are_logged_and_each_request_when_asked() {
    let log =
        LogOptions { level: LogLevel::Info, has_access: true, slow_ms: 0, ..LogOptions::default() };
    let (options, found) = logged(log);
    let options = ServeOptions { snapshot_name: Some("day-1".into()), ..options };
    let server = Server::start(&options, snapshot(), None).unwrap();
    let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}});
    assert_eq!(post_json(&server, &body).status, 200);
    assert!(server.stop());
    let told = lines(&found);
    let serving = of(&told, "serving")[0];
    assert_eq!((&serving["snapshot"], &serving["level"]), (&json!("day-1"), &json!("INFO")));
    assert_eq!(serving["address"], server.address().to_string());
    let slow = of(&told, "slow_request")[0];
    assert_eq!((&slow["route"], &slow["status"]), (&json!("/v1/lookup"), &json!(200)));
    let access = of(&told, "request")[0];
    assert_eq!(access["body_bytes"], body.to_string().len());
    assert_eq!((of(&told, "stopping").len(), of(&told, "stopped").len()), (1, 1));
}

#[test]
fn a_log_that_nobody_reads_stops_no_answer() {
    let (queue, _nobody_reads) = sync_channel(1);
    let log = LogOptions { slow_ms: 0, target: LogTarget::Queue(queue), ..LogOptions::default() };
    let server = Server::start(&ServeOptions { log, ..options() }, damaged(), None).unwrap();
    let body = json!({"features": {"item.v2": {"values": [0], "offsets": [0, 1]}}});
    for _ in 0..5 {
        assert_eq!(post_json(&server, &body).status, 500);
    }
    let text = get(&server, "/metrics").text();
    let dropped = text.lines().find(|line| line.starts_with("tierbed_log_lines_dropped_total "));
    assert!(!dropped.unwrap().ends_with(" 0"), "{text}");
}

#[test]
fn metrics_tell_the_build_the_snapshot_and_the_process() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let text = get(&server, "/metrics").text();
    let version = env!("CARGO_PKG_VERSION");
    assert!(has(&text, &format!(r#"tierbed_build_info{{version="{version}"}} 1"#)), "{text}");
    assert!(text.contains(r#"tierbed_snapshot_info{name="memory",identity=""#), "{text}");
    for name in [
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "tierbed_connections_open",
        "tierbed_body_bytes_total",
        "tierbed_pages_failed_total",
    ] {
        let found = text.lines().any(|line| line.split(' ').next() == Some(name));
        assert!(found, "no {name} in\n{text}");
    }
    assert!(!text.contains("# EOF") && has(&text, "# TYPE tierbed_body_bytes_total counter"));
    assert!(has(&text, "# TYPE tierbed_build_info gauge"), "{text}");
}

#[test]
fn metrics_come_in_the_format_that_is_asked_for() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let asked = |accept: &str| ask_with(&server, "GET /metrics", accept, b"");
    for accept in ["Accept: */*", "Accept: text/plain;version=0.0.4;q=0.5", "X-a: b"] {
        let answer = asked(accept);
        assert_eq!(answer.content_type, "text/plain; version=0.0.4; charset=utf-8", "{accept}");
    }
    let newer = "Accept: text/plain\r\n\
                 Accept: application/openmetrics-text;version=1.0.0;q=0.8,*/*;q=0.1";
    let answer = asked(newer);
    assert_eq!(answer.content_type, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    let text = answer.text();
    assert!(text.ends_with("# EOF\n") && has(&text, "# TYPE tierbed_body_bytes counter"));
}
