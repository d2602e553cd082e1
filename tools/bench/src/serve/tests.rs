use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use serde_json::json;
use tierbed_core::{Bags, TableId};
use tierbed_io::FsFolder;
use tierbed_snapshot::{FeatureLayout, Pooling, Snapshot, SnapshotOptions};

use super::arrivals::{Arrivals, Phase, Spread};
use super::peer::{Outcome, Protocol, Target};
use super::report::Times;
use super::rows::Shape;
use super::*;

const SHAPE: Shape = Shape {
    row_count: 1_000,
    dim: 4,
    id_count: 3,
    sample_count: 1,
    skew: 1.05,
    changed_share: 0.0,
};

fn target(protocol: &str, address: &str) -> Target {
    let told = json!({ "protocol": protocol, "address": address, "model": "t.rows" });
    serde_json::from_value(told).unwrap()
}

fn rows(ids: &[i64]) -> Vec<u8> {
    let mut out = Vec::new();
    ids.iter().for_each(|id| SHAPE.put_row(*id as u64, &mut out));
    out
}

#[test]
fn arrivals_repeat_have_their_rate_and_stay_in_their_phase() {
    let phases = [Phase { rate: 1_000.0, seconds: 2.0 }, Phase { rate: 4_000.0, seconds: 1.0 }];
    for spread in [Spread::Poisson, Spread::Constant] {
        let all: Vec<_> = Arrivals::new(&phases, spread, 7).collect();
        assert_eq!(all, Arrivals::new(&phases, spread, 7).collect::<Vec<_>>());
        assert!(all.windows(2).all(|two| two[0].due_us <= two[1].due_us));
        let of = |phase| all.iter().filter(move |one| one.phase == phase);
        assert!(of(0).all(|one| one.due_us <= 2_000_000), "{spread:?}");
        assert!(of(1).all(|one| (2_000_000..=3_000_000).contains(&one.due_us)), "{spread:?}");
        let counts = [of(0).count(), of(1).count()];
        let near = counts[0].abs_diff(2_000) < 200 && counts[1].abs_diff(4_000) < 300;
        assert!(near, "{spread:?}: {counts:?}");
    }
}

#[test]
fn ids_are_in_the_table_and_a_few_rows_are_popular() {
    let mut ids = rows::Ids::new(SHAPE, 3);
    let (mut drawn, mut counts) = (Vec::new(), vec![0; 1_000]);
    for _ in 0..10_000 {
        ids.draw(&mut drawn);
        drawn.iter().for_each(|id| counts[*id as usize] += 1);
    }
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let popular: usize = counts.iter().take(10).sum();
    assert!((6_000..24_000).contains(&popular), "{popular}");
}

#[test]
fn percentiles_are_times_that_happened() {
    let mut all: Vec<u32> = (1..=1_000).rev().collect();
    let times = Times::of(&mut all);
    assert_eq!((times.p50, times.p99, times.p999, times.max), (500, 990, 999, 1_000));
    assert_eq!(Times::of(&mut []), Times::default());
}

/// Answers with the rows, as each server would.
fn answers() -> [(Protocol, &'static str, Vec<u8>); 4] {
    let rows = rows(&[5, 7, 5]);
    let http = |more: &str, body: Vec<u8>| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{more}\r\n", body.len());
        [head.as_bytes(), &body[..]].concat()
    };
    let mut tensors = 2_u64.to_le_bytes().to_vec();
    tensors.extend_from_slice(b"{}");
    tensors.extend_from_slice(&rows);
    let infer = [b"{}  " as &[u8], &rows].concat();
    let (mut redis, mut memcached) = (b"*3\r\n".to_vec(), Vec::new());
    for row in rows.chunks(16) {
        redis.extend([b"$16\r\n" as &[u8], row, b"\r\n"].concat());
        memcached.extend([b"VALUE 5 0 16\r\n" as &[u8], row, b"\r\n"].concat());
    }
    memcached.extend_from_slice(b"END\r\n");
    [
        (Protocol::Lookup, "lookup", http("", tensors)),
        (Protocol::Infer, "infer", http("inference-header-content-length: 4\r\n", infer)),
        (Protocol::Redis, "redis", redis),
        (Protocol::Memcached, "memcached", memcached),
    ]
}

#[test]
fn every_protocol_finds_the_rows_of_a_whole_answer_only() {
    for (protocol, name, bytes) in answers() {
        let peer = target(name, "t:1").peer(SHAPE);
        for end in 0..bytes.len() {
            assert_eq!(peer.answer(&bytes[..end]).unwrap(), None, "{protocol:?} at {end}");
        }
        let two = [&bytes[..], &bytes[..3]].concat();
        let answer = peer.answer(&two).unwrap().unwrap();
        assert_eq!(
            (answer.byte_count, answer.outcome),
            (bytes.len(), Outcome::Good),
            "{protocol:?}"
        );
        let mut found = Vec::new();
        peer.rows(&bytes, &mut found);
        assert_eq!(found, rows(&[5, 7, 5]), "{protocol:?}");
        assert!(peer.answer(b"nonsense\r\n").is_err(), "{protocol:?}");
    }
}

#[test]
fn refusals_and_failures_are_told_apart() {
    let peer = target("lookup", "t:1").peer(SHAPE);
    for (status, outcome) in [
        (503, Outcome::Refused),
        (504, Outcome::Late),
        (400, Outcome::Failed),
        (500, Outcome::Failed),
    ] {
        let bytes = format!("HTTP/1.1 {status} No\r\ncontent-length: 2\r\n\r\n{{}}");
        assert_eq!(peer.answer(bytes.as_bytes()).unwrap().unwrap().outcome, outcome);
    }
    for (name, bytes) in [("redis", "-ERR no\r\n"), ("memcached", "SERVER_ERROR no\r\n")] {
        let answer = target(name, "t:1").peer(SHAPE).answer(bytes.as_bytes()).unwrap().unwrap();
        assert_eq!((answer.byte_count, answer.outcome), (bytes.len(), Outcome::Failed));
    }
}

/// A server of Redis' protocol that answers `MGET` with some rows.
struct Fake {
    listener: TcpListener,
    /// Held for writing, nobody is answered.
    gate: RwLock<()>,
    /// Returns the row at a place of an answer.
    row: fn(usize, i64) -> Vec<u8>,
}

impl Fake {
    fn new(row: fn(usize, i64) -> Vec<u8>) -> &'static Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake: &'static Self =
            Box::leak(Box::new(Self { listener, gate: RwLock::default(), row }));
        std::thread::spawn(move || {
            for stream in fake.listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || fake.answer(&mut stream));
            }
        });
        fake
    }

    fn answer(&self, stream: &mut (impl Read + Write)) -> std::io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            // One request at a time comes, and is small.
            let count = stream.read(&mut bytes)?;
            let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
            let ids: Vec<i64> =
                text.lines().skip(4).step_by(2).map(|id| id.parse().unwrap()).collect();
            if ids.is_empty() {
                return Ok(());
            }
            let _open = self.gate.read().unwrap();
            let mut answer = format!("*{}\r\n", ids.len()).into_bytes();
            for (at, id) in ids.into_iter().enumerate() {
                let row = (self.row)(at, id);
                answer.extend([b"$16\r\n" as &[u8], &row, b"\r\n"].concat());
            }
            stream.write_all(&answer)?;
        }
    }

    fn load(&self, rate: f64, seconds: f64, connections_max: usize) -> Value {
        let address = self.listener.local_addr().unwrap().to_string();
        let told = serve(
            &json!({
                "do": "load",
                "target": { "protocol": "redis", "address": address },
                "shape": { "row_count": 1_000, "dim": 4, "id_count": 3, "skew": 1.05,
                    "changed_share": CHANGED.changed_share },
                "versions": 1,
                "phases": [{ "rate": rate, "seconds": seconds }],
                "spread": "poisson",
                "seed": 1,
                "connections": 1,
                "connections_max": connections_max,
                "check_every": 7,
                "pids": [std::process::id()],
            })
            .to_string(),
        );
        told.unwrap()["phases"][0].clone()
    }
}

#[test]
fn a_stall_is_seen() {
    let fake = Fake::new(right);
    let stalling = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        let _closed = fake.gate.write().unwrap();
        std::thread::sleep(Duration::from_millis(100));
    });
    let told = fake.load(500.0, 1.0, 400);
    stalling.join().unwrap();
    // A tenth of the requests come during the stall; a closed loop would have sent one of them.
    assert!(told["good_us"]["p99"].as_u64().unwrap() >= 50_000, "{told}");
    assert_eq!(told["good"], told["offered"], "{told}");
    let checked = told["checked"].as_u64().unwrap();
    assert_eq!(
        (checked, &told["wrong"]),
        (told["offered"].as_u64().unwrap().div_ceil(7), &json!(0))
    );
    assert!(told["server_cpu_us"].is_u64(), "{told}");
}

#[test]
fn wrong_rows_are_counted() {
    let told = Fake::new(|_, id| rows(&[id + 1])).load(200.0, 0.2, 50);
    assert!(told["checked"].as_u64().unwrap() > 2 && told["checked"] == told["wrong"], "{told}");
}

#[test]
fn answers_of_two_versions_are_wrong() {
    let old_and_new = |at: usize, id| version(u32::from(at == 0), id);
    for (row, is_wrong) in
        [(old_and_new as fn(usize, i64) -> _, true), (|_, id| version(1, id), false)]
    {
        let told = Fake::new(row).load(400.0, 0.5, 50);
        assert!(told["checked"].as_u64().unwrap() > 10, "{told}");
        assert_eq!(told["wrong"] != 0, is_wrong, "{told}");
    }
}

/// Half of the rows change.
const CHANGED: Shape = Shape { changed_share: 0.5, ..SHAPE };

fn version(number: u32, id: i64) -> Vec<u8> {
    let mut out = Vec::new();
    CHANGED.put_version(id as u64, number, &mut out);
    out
}

fn right(_: usize, id: i64) -> Vec<u8> {
    version(0, id)
}

#[test]
fn requests_that_could_not_be_sent_in_time_void_a_run() {
    let fake = Fake::new(right);
    let closed = fake.gate.write().unwrap();
    let opening = std::thread::spawn(move || fake.load(200.0, 0.3, 1));
    std::thread::sleep(Duration::from_millis(200));
    drop(closed);
    let told = opening.join().unwrap();
    assert_eq!(told["is_void"], true, "{told}");
    assert_eq!(told["good"], told["offered"], "{told}");
}

#[test]
fn the_rows_of_a_snapshot_are_those_of_the_requests() {
    let folder = tempfile::tempdir().unwrap();
    let shape = json!({ "row_count": 500, "dim": 4, "id_count": 3, "skew": 1.05 });
    let path = folder.path().join("snapshot");
    let written =
        serve(&json!({ "do": "write", "out": path, "shape": shape }).to_string()).unwrap();
    assert_eq!(written["row_count"], 500);
    let asked = json!({ "do": "engine", "snapshot": path, "shape": shape, "seed": 1,
        "dram_budget_bytes": 4 << 20, "is_filled": true, "warm_count": 10, "count": 50 });
    let told = serve(&asked.to_string()).unwrap();
    assert_eq!(told["good_us"]["count"], 50, "{told}");
    assert_eq!(told["pages_per_request"], 0.0, "{told}");
    assert!(serve("{}").is_err());
}

#[test]
fn a_delta_has_the_rows_that_its_version_changes() {
    let folder = tempfile::tempdir().unwrap();
    let shape = json!({ "row_count": 500, "dim": 4, "id_count": 3, "skew": 1.05,
        "changed_share": 0.1 });
    let [base, delta] = ["base", "delta"].map(|name| folder.path().join(name));
    serve(&json!({ "do": "write", "out": base, "shape": shape }).to_string()).unwrap();
    let asked = json!({ "do": "delta", "out": delta, "snapshot": base, "shape": shape,
        "version": 3 });
    let told = serve(&asked.to_string()).unwrap();
    assert!((25..=75).contains(&told["row_count"].as_u64().unwrap()), "{told}");
    let open = |path| Arc::new(FsFolder::open(path).unwrap());
    let snapshot = Snapshot::open(open(&base), &SnapshotOptions::default()).unwrap();
    snapshot.apply(open(&delta)).unwrap();
    let layout = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let (ids, offsets): (Vec<i64>, Vec<i64>) = ((0..500).collect(), (0..=500).collect());
    let mut out = vec![0.0_f32; 500 * 4];
    snapshot.lookup(&layout, &Bags::new(&ids, &offsets, None, 1).unwrap(), &mut out).unwrap();
    let mut expected = Vec::new();
    let shape: Shape = serde_json::from_value(shape).unwrap();
    ids.iter().for_each(|id| shape.put_version(*id as u64, 3, &mut expected));
    assert_eq!(bytemuck::cast_slice::<f32, u8>(&out), expected);
}
