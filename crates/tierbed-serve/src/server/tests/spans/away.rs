//! A collector that is away, hangs, or is there when the server drains.

use super::*;

/// An address at which nobody listens.
fn nobody() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// Waits for a condition; it must come true within half a minute.
fn until(is_so: impl Fn() -> bool) {
    for _ in 0..30_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it did not come true");
}

fn has(server: &Server, line: &str) -> bool {
    get(server, "/metrics").text().lines().any(|found| found == line)
}

#[test]
fn draining_sends_what_there_is() {
    let collector = Collector::start();
    let server = Server::start(&collector.options(), snapshot(), None).unwrap();
    assert_eq!(look_up(&server, "X-A: b", LOOKUP).status, 200);
    assert!(collector.spans().is_empty(), "a batch waits for company");
    server.drain();
    until(|| has(&server, "tierbed_spans_sent_total 3"));
    assert_eq!(collector.spans().len(), 3);
    assert!(has(&server, "tierbed_spans_dropped_total 0"));
}

#[test]
fn a_collector_that_is_away_costs_spans_and_one_line_of_the_log() {
    let (mut options, found) = logged(LogOptions::default());
    options.otlp_endpoint = Some(nobody());
    let server = Server::start(&options, snapshot(), None).unwrap();
    for (asked, dropped) in [(1, 3), (2, 5)] {
        assert_eq!(look_up(&server, "X-A: b", LOOKUP).status, 200, "{asked}");
        lock(&server.running).as_ref().unwrap().service.spans.flush();
        until(|| has(&server, &format!("tierbed_spans_dropped_total {dropped}")));
    }
    let told = lines(&found);
    let [line] = of(&told, "spans_not_sent")[..] else { panic!("{told:?}") };
    assert_eq!((&line["level"], &line["dropped"]), (&json!("WARN"), &json!(3)), "{line}");
    assert!(line["message"].as_str().unwrap().contains("Unavailable"), "{line}");
}

#[test]
fn a_collector_that_hangs_delays_no_answer_and_stopping_for_a_limited_time() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut options = ServeOptions { otlp_endpoint: Some(endpoint), ..options() };
    options.limits.stop_ms_max = 300;
    let server = Server::start(&options, snapshot(), None).unwrap();
    assert_eq!(look_up(&server, "X-A: b", LOOKUP).status, 200);
    server.drain();
    for _ in 0..50 {
        assert_eq!(look_up(&server, "X-A: b", LOOKUP).status, 200);
    }
    let clock = tierbed_core::env::SystemClock::default();
    assert!(server.stop());
    assert!(clock.now_us() < 5_000_000, "{} us", clock.now_us());
}

#[test]
fn a_wrong_collector_is_refused_when_the_server_starts() {
    for wrong in ["nowhere", "host:4317", "ftp://host", "http://", "http://a b:1"] {
        let options = ServeOptions { otlp_endpoint: Some(wrong.into()), ..options() };
        let told = Server::start(&options, snapshot(), None).unwrap_err().to_string();
        assert!(told.contains("remedy: write http://host:4317"), "{wrong}: {told}");
    }
}
