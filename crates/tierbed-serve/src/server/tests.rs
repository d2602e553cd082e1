//! Through a real socket, with a client of plain bytes.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{json, Value};
use tierbed_core::env::{Clock, ManualClock};
use tierbed_core::{Bags, Budget, InitSpec, RowId, Schema, TableId, TableSchema};
use tierbed_io::{EngineChoice, EngineOptions, Folder, FsFolder, MemoryFolder, OpenMode};
use tierbed_snapshot::{FeatureLayout, Pooling, SnapshotOptions, SnapshotWriter};

use self::models::{Scoring, Thinking, SLOW};
use super::*;
use crate::features::ServedFeature;
use crate::log::{LogLevel, LogOptions, LogTarget};
use crate::options::Limits;

mod admin;
mod admission;
mod batches;
mod deltas;
mod follow;
mod gateway;
mod grpc;
mod hosted;
mod hot;
mod inline;
mod known;
mod limits;
mod models;
mod oip;
mod origin;
mod pending;
mod predictions;
#[cfg(feature = "otel")]
mod spans;
mod stopping;
mod telling;
mod tls;
mod tokens;

fn table(name: &str, row_count: u64, dim: u32) -> TableSchema {
    TableSchema {
        init: InitSpec::Uniform { low: -1.0, high: 1.0 },
        seed: 3,
        ..TableSchema::plain(name, row_count, dim)
    }
}

fn snapshot_in(folder: &Arc<dyn Folder>, serving: Option<&str>) -> Arc<Snapshot> {
    let schema = Schema::new(vec![table("user", 500, 4), table("item.v2", 1000, 7)]).unwrap();
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(folder), &schema, &budget).unwrap();
    for row in 0..300 {
        writer.push(TableId(0), RowId(row), &[row as f32 + 0.1; 4]).unwrap();
        writer.push(TableId(1), RowId(3 * row), &[row as f32 - 0.7; 7]).unwrap();
    }
    if let Some(serving) = serving {
        writer.attach("serving.json", serving.as_bytes()).unwrap();
    }
    writer.finish().unwrap();
    let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
    let options = SnapshotOptions { dram_budget_bytes: 2 << 20, engine, ..Default::default() };
    Arc::new(Snapshot::open(Arc::clone(folder), &options).unwrap())
}

/// Returns a number of a server's metrics.
fn metric(server: &Server, name: &str) -> u64 {
    let metrics = get(server, "/metrics").text();
    let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().unwrap()
}

fn snapshot() -> Arc<Snapshot> {
    snapshot_in(&(Arc::new(MemoryFolder::new()) as Arc<dyn Folder>), None)
}

fn options() -> ServeOptions {
    let log = LogOptions { level: LogLevel::Off, ..LogOptions::default() };
    ServeOptions { address: "127.0.0.1:0".into(), log, ..ServeOptions::default() }
}

fn limited(limit: impl FnOnce(&mut Limits)) -> ServeOptions {
    let mut options = options();
    limit(&mut options.limits);
    options
}

struct Answer {
    status: u16,
    content_type: String,
    /// Bytes of the JSON before binary tensors.
    header_bytes: Option<usize>,
    /// In lower case.
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The value of a header; empty without one.
    fn field(&self, name: &str) -> &str {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find_map(|(known, value)| (known == name).then_some(value)).unwrap_or_default()
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }
}

fn ask(server: &Server, method: &str, path: &str, content_type: &str, body: &[u8]) -> Answer {
    ask_with(server, &format!("{method} {path}"), &format!("Content-Type: {content_type}"), body)
}

/// Asks with header lines of the caller's own.
fn ask_with(server: &Server, what: &str, lines: &str, body: &[u8]) -> Answer {
    ask_at(server.address(), what, lines, body)
}

fn ask_at(address: SocketAddr, what: &str, lines: &str, body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "{what} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n{lines}\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses early may close before it has read everything.
    let _ = stream.write_all(body);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole head");
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let field = |name: &str| {
        let line = head.lines().find(|line| line.starts_with(name));
        line.map_or("", |line| line[name.len()..].trim()).to_owned()
    };
    assert!(field("transfer-encoding:").is_empty(), "answers have a length");
    let body = bytes[end + 4..].to_vec();
    assert_eq!(field("content-length:").parse::<usize>().unwrap(), body.len());
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let header_bytes = field("inference-header-content-length:").parse().ok();
    let content_type = field("content-type:");
    Answer { status, content_type, header_bytes, head, body }
}

fn get(server: &Server, path: &str) -> Answer {
    ask(server, "GET", path, "text/plain", b"")
}

fn post_json(server: &Server, body: &Value) -> Answer {
    ask(server, "POST", "/v1/lookup", "application/json", body.to_string().as_bytes())
}

fn direct(snapshot: &Snapshot, table: u32, pooling: Pooling, bags: &Bags<'_>) -> Vec<f32> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(table), pooling)]).unwrap();
    let mut out = vec![0.0; plan.output_len(bags)];
    snapshot.lookup(&plan, bags, &mut out).unwrap();
    out
}

fn floats(value: &Value) -> Vec<f32> {
    let rows = value.as_array().unwrap().iter();
    rows.flat_map(|row| row.as_array().unwrap()).map(|x| x.as_f64().unwrap() as f32).collect()
}

const USER: ([i64; 5], [i64; 4]) = ([1, 1, 299, 450, 7], [0, 3, 3, 5]);
const ITEM: ([i64; 4], [i64; 4]) = ([0, 3, 999, 1], [0, 1, 2, 4]);
const WEIGHTS: [f32; 4] = [0.5, 2.0, -1.0, 0.25];

#[test]
fn json_lookups_equal_the_snapshot() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    let item = Bags::new(&ITEM.0, &ITEM.1, Some(&WEIGHTS), 1).unwrap();
    let body = json!({"features": {
        "user": {"values": USER.0, "offsets": USER.1},
        "item.v2": {"values": ITEM.0, "offsets": ITEM.1, "weights": WEIGHTS},
    }});
    let answer = post_json(&server, &body);
    assert_eq!((answer.status, answer.content_type.as_str()), (200, "application/json"));
    let features = &answer.json()["features"];
    assert_eq!(floats(&features["user"]), direct(&snapshot, 0, Pooling::Sum, &user));
    assert_eq!(floats(&features["item.v2"]), direct(&snapshot, 1, Pooling::Sum, &item));
    for (name, pooling) in [("mean", Pooling::Mean), ("none", Pooling::None)] {
        let body =
            json!({"features": {"user": {"values": USER.0, "offsets": USER.1}}, "pooling": name});
        let answer = post_json(&server, &body).json();
        assert_eq!(floats(&answer["features"]["user"]), direct(&snapshot, 0, pooling, &user));
    }
}

fn tensors(named: &[(&str, Dtype, Vec<u8>)]) -> Vec<u8> {
    let views = named.iter().map(|(name, dtype, bytes)| {
        let size = if *dtype == Dtype::I64 { 8 } else { 4 };
        (*name, TensorView::new(*dtype, vec![bytes.len() / size], bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn i64s(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn binary_lookups_equal_the_snapshot() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let body = tensors(&[
        ("user.values", Dtype::I64, i64s(&USER.0)),
        ("user.offsets", Dtype::I64, i64s(&USER.1)),
        ("item.v2.values", Dtype::I64, i64s(&ITEM.0)),
        ("item.v2.offsets", Dtype::I64, i64s(&ITEM.1)),
        ("item.v2.weights", Dtype::F32, f32s(&WEIGHTS)),
    ]);
    let answer = ask(&server, "POST", "/v1/lookup", "application/x-safetensors", &body);
    assert_eq!((answer.status, answer.content_type.as_str()), (200, "application/x-safetensors"));
    let out = SafeTensors::deserialize(&answer.body).unwrap();
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    let item = Bags::new(&ITEM.0, &ITEM.1, Some(&WEIGHTS), 1).unwrap();
    let found = out.tensor("user").unwrap();
    assert_eq!((found.dtype(), found.shape()), (Dtype::F32, &[3, 4][..]));
    assert_eq!(found.data(), f32s(&direct(&snapshot, 0, Pooling::Sum, &user)));
    let found = out.tensor("item.v2").unwrap();
    assert_eq!(found.data(), f32s(&direct(&snapshot, 1, Pooling::Sum, &item)));
}

#[test]
fn features_come_from_the_snapshot_or_the_options() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let serving = r#"{"features": [{"name": "C1", "table": "user", "pooling": "mean"},
        {"name": "C2", "table": "user"}], "model": "dlrm"}"#;
    let snapshot = snapshot_in(&folder, Some(serving));
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let body = json!({"features": {"C1": {"values": USER.0, "offsets": USER.1},
        "C2": {"values": USER.0, "offsets": USER.1}}});
    let answer = post_json(&server, &body).json();
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    assert_eq!(floats(&answer["features"]["C1"]), direct(&snapshot, 0, Pooling::Mean, &user));
    assert_eq!(floats(&answer["features"]["C2"]), direct(&snapshot, 0, Pooling::Sum, &user));
    let about = get(&server, "/").json();
    assert_eq!(
        about["features"][0],
        json!({"name": "C1", "table": "user", "pooling": "mean", "dim": 4})
    );

    let feature = |name: &str, table: &str, pooling: &str| ServedFeature {
        name: name.into(),
        table: table.into(),
        pooling: pooling.into(),
    };
    let given = |features| ServeOptions { features: Some(features), ..options() };
    let named = given(vec![feature("x", "item.v2", "sum")]);
    let server = Server::start(&named, Arc::clone(&snapshot), None).unwrap();
    assert_eq!(get(&server, "/").json()["features"][0]["table"], "item.v2");
    for bad in [
        vec![feature("x", "nothing", "sum")],
        vec![feature("x", "user", "max")],
        vec![feature("x", "user", "sum"), feature("x", "user", "sum")],
    ] {
        assert!(Server::start(&given(bad), Arc::clone(&snapshot), None).is_err());
    }
}

#[test]
fn bad_requests_say_what_is_wrong() {
    let small = limited(|limits| (limits.body_bytes_max, limits.indices_max) = (4096, 10));
    let server = Server::start(&small, snapshot(), None).unwrap();
    let user = |values: Value, offsets: Value| {
        let indices = json!({"values": values, "offsets": offsets});
        json!({"features": {"user": indices}})
    };
    let two = json!({"features": {"user": {"values": [1], "offsets": [0, 1]},
        "item.v2": {"values": [], "offsets": [0, 0, 0]}}});
    for (body, message) in [
        (user(json!([500]), json!([0, 1])), "row id out of range (table: user, row: 500"),
        (user(json!([-1]), json!([0, 1])), "row: -1"),
        (user(json!([1]), json!([0, 2])), "the last offset must be the number of indices"),
        (user(json!([1]), json!([])), "feature: user"),
        (user(json!([1.5]), json!([0, 1])), "not the expected JSON"),
        (user(json!(vec![0; 11]), json!([0, 11])), "too many indices"),
        (
            json!({"features": {"C9": {"values": [1], "offsets": [0, 1]}}}),
            "unknown feature (feature: C9, expected: one of user, item.v2",
        ),
        (json!({"features": {}}), "at least one feature"),
        (json!({"feature": {}}), "not the expected JSON"),
        (
            json!({"features": {"user": {"values": [], "offsets": [0]}}, "pooling": "max"}),
            "unknown pooling",
        ),
        (two, "same number of samples"),
    ] {
        let answer = post_json(&server, &body);
        assert_eq!((answer.status, &answer.json()["kind"]), (400, &json!("invalid")), "{body}");
        let found = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(found.contains(message), "{body}: {found}");
    }
    for body in [
        b"not tensors".to_vec(),
        tensors(&[("user.values", Dtype::I64, i64s(&[1]))]),
        tensors(&[
            ("user.values", Dtype::F32, f32s(&[1.0])),
            ("user.offsets", Dtype::I64, i64s(&[0, 1])),
        ]),
        tensors(&[("user.ids", Dtype::I64, i64s(&[1]))]),
        tensors(&[("user", Dtype::I64, i64s(&[1]))]),
    ] {
        let answer = ask(&server, "POST", "/v1/lookup", "application/x-safetensors", &body);
        assert_eq!((answer.status, &answer.json()["kind"]), (400, &json!("invalid")));
    }
    let status = |method, path, content_type, body: &[u8]| {
        let answer = ask(&server, method, path, content_type, body);
        assert!(answer.json()["message"].is_string());
        answer.status
    };
    assert_eq!(status("POST", "/v1/lookup", "application/json", &[b' '; 5000]), 413);
    assert_eq!(status("POST", "/v1/lookup", "text/csv", b"1,2"), 415);
    assert_eq!(status("GET", "/v1/lookup", "application/json", b""), 405);
    assert_eq!(status("GET", "/v3/lookup", "application/json", b""), 404);
    assert_eq!(status("POST", "/v1/predict", "application/json", b"{}"), 501);
}

#[test]
fn health_and_metrics_count_what_happened() {
    let clock = Arc::new(ManualClock::default());
    let timed = ServeOptions {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        snapshot_name: Some("day-1".into()),
        ..options()
    };
    let server = Server::start(&timed, snapshot(), None).unwrap();
    clock.advance_us(2_500_000);
    let health = get(&server, "/health").json();
    let identity = health["identity"].as_str().unwrap();
    assert_eq!(identity.len(), 24, "{identity}");
    let expected = json!({"status": "ok", "reasons": [], "snapshot": "day-1",
        "identity": identity, "generation": 0, "tables": 2, "rows": 600, "uptime_s": 2.5,
        "version": null, "freshness_s": null, "sync_lag_s": null});
    assert_eq!(health, expected);
    let body = json!({"features": {"user": {"values": [1, 2, 2], "offsets": [0, 3]}}});
    assert_eq!(post_json(&server, &body).status, 200);
    assert_eq!(post_json(&server, &body).status, 200);
    assert_eq!(post_json(&server, &json!({})).status, 400);
    get(&server, "/nowhere");
    let answer = get(&server, "/metrics");
    assert_eq!(answer.content_type, "text/plain; version=0.0.4; charset=utf-8");
    let text = answer.text();
    for line in [
        r#"tierbed_requests_total{route="/v1/lookup",status="200"} 2"#,
        r#"tierbed_requests_total{route="/v1/lookup",status="400"} 1"#,
        r#"tierbed_requests_total{route="other",status="404"} 1"#,
        r#"tierbed_request_seconds_count{route="/v1/lookup"} 3"#,
        "tierbed_indices_total 6",
        "tierbed_rows_total 4",
        "tierbed_cache_hits_total 2",
        "tierbed_cache_misses_total 2",
        "tierbed_pages_read_total 1",
        "tierbed_read_bytes_total 4096",
        "tierbed_dram_budget_bytes 2097152",
    ] {
        assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
    }
}

#[test]
fn corruption_is_an_error_of_the_server() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    let server = Server::start(&options(), snapshot, None).unwrap();
    // The first page to fill up is one of the wider table.
    let body = json!({"features": {"item.v2": {"values": [0, 3], "offsets": [0, 2]}}});
    let answer = post_json(&server, &body);
    assert_eq!((answer.status, &answer.json()["kind"]), (500, &json!("corruption")));
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn slow_predictions_do_not_hold_up_health_and_full_servers_say_so() {
    let scoring = Arc::new(Scoring::default());
    let narrow = ServeOptions { lookup_threads: 1, ..limited(|limits| limits.requests_max = 1) };
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&narrow, snapshot(), Some(predictor)).unwrap();
    std::thread::scope(|scope| {
        // The lookups below may have the only place when the slow request arrives.
        let slow = scope.spawn(|| loop {
            let answer = ask(&server, "POST", "/v1/predict", "application/json", SLOW.as_bytes());
            if answer.status != 503 {
                break answer;
            }
        });
        let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}});
        let refused = loop {
            let answer = post_json(&server, &body);
            if answer.status != 200 {
                break answer;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        assert_eq!((refused.status, &refused.json()["kind"]), (503, &json!("busy")));
        assert_eq!(get(&server, "/health").status, 200);
        scoring.open();
        assert_eq!(slow.join().unwrap().status, 200);
        assert_eq!(post_json(&server, &body).status, 200);
    });
}

#[test]
fn a_request_that_never_ends_is_ended() {
    let hasty = limited(|limits| limits.body_ms_max = 50);
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let head = "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nhalf";
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = [0; 12];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"HTTP/1.1 408");
}

#[test]
fn many_clients_at_once() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let expected: HashMap<i64, Vec<f32>> = (0..20)
        .map(|id| {
            let indices = [id, id + 200];
            let bags = Bags::new(&indices, &[0, 2], None, 1).unwrap();
            (id, direct(&snapshot, 0, Pooling::Sum, &bags))
        })
        .collect();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                for round in 0..20 {
                    let id = (client * 7 + round) % 20;
                    let indices = json!({"values": [id, id + 200], "offsets": [0, 2]});
                    let body = json!({"features": {"user": indices}});
                    let answer = post_json(server, &body);
                    assert_eq!(floats(&answer.json()["features"]["user"]), expected[&id]);
                }
            });
        }
    });
}

#[test]
fn stops_when_told_and_refuses_a_taken_port() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let taken = ServeOptions { address: server.address().to_string(), ..options() };
    let error = Server::start(&taken, snapshot(), None).unwrap_err();
    assert!(error.to_string().contains(&server.address().to_string()), "{error}");
    let nowhere = ServeOptions { address: "not an address".into(), ..options() };
    assert_eq!(
        Server::start(&nowhere, snapshot(), None).unwrap_err().kind(),
        tierbed_core::ErrorKind::Invalid
    );
    assert!(!server.wait(Duration::from_millis(5)));
    // An idle keep-alive connection must not hold the server up.
    let mut idle = TcpStream::connect(server.address()).unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    let mut byte = [0];
    idle.read_exact(&mut byte).unwrap();
    assert!(server.stop());
    assert!(server.wait(Duration::ZERO));
    assert!(TcpStream::connect(server.address()).is_err());
    assert!(server.stop());
}

#[test]
fn waits_for_work_whose_client_has_left_and_tells_what_does_not_end() {
    let (asked, is_asked) = mpsc::sync_channel(0);
    let (answer, told) = mpsc::sync_channel(1);
    let thinking = Arc::new(Thinking::new(asked, told));
    let hasty = limited(|limits| limits.stop_ms_max = 50);
    for is_in_time in [false, true] {
        let options = if is_in_time { options() } else { hasty.clone() };
        let predictor = Arc::clone(&thinking) as Arc<dyn Predictor>;
        let server = Server::start(&options, snapshot(), Some(predictor)).unwrap();
        let mut client = TcpStream::connect(server.address()).unwrap();
        client.write_all(models::slow_request().as_bytes()).unwrap();
        is_asked.recv().unwrap();
        drop(client);
        if is_in_time {
            let later = answer.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                later.send(()).unwrap();
            });
            assert!(server.stop(), "the work ended in time");
        } else {
            assert!(!server.stop(), "the work goes on");
            answer.send(()).unwrap();
        }
    }
}
