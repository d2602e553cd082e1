//! The address for operators.

#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use std::io::{BufRead, BufReader};

use super::*;

/// SHA-256 of `abc`, and of 56 letters, from FIPS 180-4.
const TOKENS: &str = "\
ranker ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad infer
operator 248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1 metrics,admin
";
const OPERATOR: &str =
    "Authorization: Bearer abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";

fn with_admin(options: ServeOptions) -> ServeOptions {
    ServeOptions { admin_address: Some("127.0.0.1:0".into()), ..options }
}

fn admin(server: &Server, what: &str, lines: &str) -> Answer {
    ask_at(server.admin_address().unwrap(), what, lines, b"")
}

fn stats(server: &Server) -> Value {
    admin(server, "GET /stats", "X: y").json()
}

fn lookup(server: &Server) -> u16 {
    let body = json!({"features": {"user": {"values": [1, 2, 2], "offsets": [0, 3]}}});
    post_json(server, &body).status
}

/// Events of a server, as they come.
struct Events(BufReader<TcpStream>);

impl Events {
    fn of(server: &Server) -> Self {
        let mut stream = TcpStream::connect(server.admin_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let head = "GET /stats HTTP/1.1\r\nHost: t\r\nAccept: text/event-stream\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        Self(BufReader::new(stream))
    }

    fn status(&mut self) -> u16 {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).unwrap());
            }
        }
    }
}

#[test]
fn operators_have_routes_of_their_own() {
    let server = Server::start(&with_admin(options()), snapshot(), None).unwrap();
    let page = admin(&server, "GET /", "X: y");
    assert_eq!((page.status, page.content_type.as_str()), (200, "text/html; charset=utf-8"));
    assert!(page
        .field("content-security-policy")
        .starts_with("default-src 'none'; style-src 'sha"));
    for path in ["/livez", "/readyz", "/metrics", "/stats"] {
        assert_eq!(admin(&server, &format!("GET {path}"), "X: y").status, 200, "{path}");
    }
    for what in ["POST /v1/lookup", "GET /v2", "GET /health", "GET /favicon.ico"] {
        assert_eq!(admin(&server, what, "X: y").status, 404, "{what}");
    }
    assert_eq!(admin(&server, "GET /drain", "X: y").status, 405);
    assert_eq!(get(&server, "/stats").status, 404);
    assert_eq!(ask(&server, "POST", "/drain", "text/plain", b"").status, 404);
    assert_eq!(get(&server, "/readyz").status, 200);
}

#[test]
fn statistics_tell_what_happened() {
    let named = with_admin(ServeOptions {
        snapshot_name: Some("day-1".into()),
        model_name: "ads".into(),
        ..options()
    });
    let server = Server::start(&named, snapshot(), None).unwrap();
    let before = stats(&server);
    assert_eq!((&before["model"], &before["snapshot"]), (&json!("ads"), &json!("day-1")));
    assert_eq!((&before["state"], &before["faults"]), (&json!("ready"), &json!([])));
    assert_eq!(before["generation"]["number"], 0);
    assert_eq!(before["generation"]["identity"], get(&server, "/health").json()["identity"]);
    // A window needs a tenth of a second to tell rates.
    std::thread::sleep(Duration::from_millis(150));
    (0..4).for_each(|_| assert_eq!(lookup(&server), 200));
    assert_eq!(post_json(&server, &json!({})).status, 400);
    let after = stats(&server);
    let requests = &after["requests"];
    assert_eq!((&requests["answered"], &requests["invalid"]), (&json!(4), &json!(1)));
    assert_eq!(requests["refused_by_reason"], json!({}));
    let tiers = after["tiers"].as_array().unwrap();
    let rows = |name: &str| {
        let tier = tiers.iter().find(|tier| tier["name"].as_str().unwrap().starts_with(name));
        let tier = tier.unwrap_or_else(|| panic!("no {name}: {after}"));
        (tier["rows"].as_u64().unwrap(), tier["recent_ratio"].as_f64().unwrap())
    };
    assert_eq!((rows("cache"), rows("storage")), ((6, 0.75), (2, 0.25)));
    assert_eq!(after["pages"]["read"], 1);
    let recent = &after["recent"];
    let told = recent["requests_per_s"].as_f64().unwrap() * recent["seconds"].as_f64().unwrap();
    assert!((told - 5.0).abs() < 1e-6, "{recent}");
    let us = |name: &str| recent["latency"][name].as_u64().unwrap();
    assert!(us("p50_us") > 0 && us("p50_us") <= us("p99_us") && us("p99_us") <= us("p999_us"));
    let memory = &after["memory"];
    assert_eq!(memory["budget_bytes"], 2 << 20);
    let parts = memory["parts_bytes"].as_object().unwrap().values();
    assert_eq!(json!(parts.map(|part| part.as_u64().unwrap()).sum::<u64>()), memory["used_bytes"]);
    assert!(memory["process_bytes"].as_u64() > memory["used_bytes"].as_u64());
}

#[test]
fn events_come_each_second_to_a_bounded_number_until_the_server_stops() {
    let server = Server::start(&with_admin(options()), snapshot(), None).unwrap();
    let mut events = Events::of(&server);
    let first = events.next().unwrap();
    assert_eq!(first["requests"]["answered"], 0);
    assert_eq!(lookup(&server), 200);
    let answered = |event: &Value| event["requests"]["answered"] == 1;
    assert!(answered(&events.next().unwrap()) || answered(&events.next().unwrap()));
    let mut others: Vec<_> = (1..16).map(|_| Events::of(&server)).collect();
    others.iter_mut().for_each(|other| assert_eq!(other.status(), 200));
    assert_eq!(Events::of(&server).status(), 503);
    assert_eq!(stats(&server)["requests"]["refused_by_reason"], json!({"watchers": 1}));
    drop(others);
    // Who has left is noticed by the next event at the latest.
    while Events::of(&server).status() != 200 {
        std::thread::sleep(Duration::from_millis(50));
    }
    let text = admin(&server, "GET /metrics", "X: y").text();
    assert!(text.contains(r#"tierbed_requests_total{route="/stats",status="200"}"#), "{text}");
    assert!(server.stop());
    assert!(events.take(10).count() < 10, "the stream ends");
}

#[test]
fn the_generation_that_answers_is_told() {
    let clock = Arc::new(ManualClock::default());
    let timed = ServeOptions { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..options() };
    let snapshot = snapshot();
    let server = Server::start(&with_admin(timed), Arc::clone(&snapshot), None).unwrap();
    clock.advance_us(5_000_000);
    assert_eq!(stats(&server)["generation"]["active_s"], 5.0);
    let now = server.apply(deltas::delta(&snapshot, 1, None)).unwrap();
    clock.advance_us(2_000_000);
    let told = &stats(&server)["generation"];
    assert_eq!((&told["number"], &told["identity"]), (&json!(1), &json!(now.identity)));
    assert_eq!((&told["active_s"], &told["delta_rows"]), (&json!(2.0), &json!(40)));
    server.apply(Arc::new(MemoryFolder::new())).unwrap_err();
    let after = stats(&server);
    let told = &after["generation"];
    assert_eq!((&told["deltas_applied"], &told["deltas_refused"]), (&json!(1), &json!(1)));
    assert_eq!((&told["number"], &told["active_s"]), (&json!(1), &json!(2.0)));
    assert_eq!((&after["faults"][0]["kind"], &after["uptime_s"]), (&json!("delta"), &json!(7.0)));
}

#[test]
fn draining_is_told_by_every_probe_and_is_not_for_pages_of_other_sites() {
    let server = Server::start(&with_admin(options()), snapshot(), None).unwrap();
    let foreign = admin(&server, "POST /drain", "Origin: http://elsewhere.example");
    assert_eq!((foreign.status, &foreign.json()["kind"]), (403, &json!("invalid")));
    assert_eq!(admin(&server, "POST /drain", "Origin: null").status, 403);
    assert_eq!(get(&server, "/readyz").status, 200);
    let drained = admin(&server, "POST /drain", "Origin: http://t");
    assert_eq!((drained.status, drained.json()), (200, json!({"state": "draining"})));
    assert_eq!(stats(&server)["state"], "draining");
    assert_eq!(get(&server, "/readyz").status, 503);
    assert_eq!(admin(&server, "GET /readyz", "X: y").status, 503);
    assert_eq!(admin(&server, "GET /livez", "X: y").status, 200);
    assert_eq!(lookup(&server), 200);
}

#[test]
fn reading_and_draining_need_tokens_of_their_scopes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens");
    std::fs::write(&path, TOKENS).unwrap();
    let guarded = ServeOptions { tokens: Some(path.clone()), ..with_admin(options()) };
    let server = Server::start(&guarded, snapshot(), None).unwrap();
    let status = |what: &str, lines: &str| admin(&server, what, lines).status;
    for open in ["GET /", "GET /livez", "GET /readyz"] {
        assert_eq!(status(open, "X: y"), 200, "{open}");
    }
    for what in ["GET /stats", "GET /metrics", "POST /drain", "GET /none"] {
        let found = (status(what, "X: y"), status(what, "Authorization: Bearer abc"));
        assert_eq!(found, (401, 403), "{what}");
    }
    assert_eq!((status("GET /stats", OPERATOR), status("GET /metrics", OPERATOR)), (200, 200));
    std::fs::write(&path, TOKENS.replace("metrics,admin", "metrics")).unwrap();
    server.reload();
    assert_eq!((status("GET /stats", OPERATOR), status("POST /drain", OPERATOR)), (200, 403));
    std::fs::write(&path, TOKENS).unwrap();
    server.reload();
    assert_eq!(status("POST /drain", OPERATOR), 200);
}

#[test]
fn an_address_that_others_reach_needs_clients_that_are_known() {
    let reached =
        ServeOptions { admin_address: Some("0.0.0.0:0".into()), requires_auth: true, ..options() };
    let error = Server::start(&reached, snapshot(), None).unwrap_err().to_string();
    assert!(error.contains("give tokens or tls_client_ca"), "{error}");
    let taken = Server::start(&with_admin(options()), snapshot(), None).unwrap();
    let address = taken.admin_address().map(|address| address.to_string());
    let error =
        Server::start(&ServeOptions { admin_address: address, ..options() }, snapshot(), None);
    assert!(error.unwrap_err().to_string().contains("choose a free port"));
}

#[test]
fn operators_are_answered_where_clients_find_no_room() {
    let narrow = with_admin(limited(|limits| limits.connections_max = 1));
    let server = Server::start(&narrow, snapshot(), None).unwrap();
    let _only = TcpStream::connect(server.address()).unwrap();
    while get(&server, "/livez").status != 503 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let told = stats(&server);
    assert!(told["requests"]["refused_by_reason"]["connections"].as_u64() >= Some(1), "{told}");
    assert_eq!(told["connections"]["open_max"], 1);
}

#[test]
fn a_server_that_starts_lives_and_is_not_ready() {
    let (stop, stopping) = watch::channel(false);
    let service = Arc::new(service(&options(), snapshot(), None, stopping).unwrap());
    let runtime = runtime(1).unwrap();
    let opened = crate::admin::open(&runtime, &service, "127.0.0.1:0").unwrap();
    let asked = |path: &str| ask_at(opened.address, &format!("GET {path}"), "X: y", b"");
    assert_eq!((asked("/livez").status, asked("/readyz").status), (200, 503));
    assert_eq!(asked("/stats").json()["state"], "starting");
    assert!(asked("/metrics").text().contains("\ntierbed_ready 0\n"));
    service.begin();
    assert_eq!(asked("/readyz").status, 200);
    assert_eq!(asked("/stats").json()["state"], "ready");
    assert!(asked("/metrics").text().contains("\ntierbed_ready 1\n"));
    stop.send_replace(true);
    runtime.block_on(opened.ended).unwrap();
}
