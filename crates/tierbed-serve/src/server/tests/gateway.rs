//! A gateway and shards on the loopback, beside a server of the whole snapshot.

#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use std::thread;

use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use self::kit::{Shards, Ways};
use super::models::Scoring;
use super::*;
use crate::gateway::{GatewayOptions, MissingShard, Routing, RowType};

mod generations;
mod kit;
mod remedies;
mod replicas;

/// Starts a gateway.
fn route(routing: &GatewayOptions) -> Result<Server> {
    // What is refused here is refused for a reason, and not because other tests take the cores.
    let patient = limited(|limits| limits.queue_ms_max = 5_000);
    Server::route(&patient, Routing::begin(routing)?, None)
}

/// Makes a lookup of some features with random bags.
fn random_lookup(random: &mut SplitMix64) -> Value {
    let samples = random.below(5) as usize;
    let mut features = serde_json::Map::new();
    for (name, rows) in [("user", 500), ("item.v2", 1000), ("site", 30), ("day", 7)] {
        if random.below(5) == 0 && !features.is_empty() {
            continue;
        }
        let (mut offsets, mut values) = (vec![0], Vec::new());
        for _ in 0..samples {
            let length = random.below(4);
            // Few ids, so that some are asked for again.
            values.extend((0..length).map(|_| random.below(rows) as i64 / 3 * 3));
            offsets.push(values.len());
        }
        let mut feature = json!({"values": values, "offsets": offsets});
        if random.below(2) == 0 {
            let weights = values.iter().map(|_| random.below(9) as f64 / 4.0 - 1.0);
            feature["weights"] = weights.collect();
        }
        features.insert(name.to_owned(), feature);
    }
    let mut body = json!({"features": features});
    match random.below(3) {
        0 => body["pooling"] = json!("mean"),
        1 => body["pooling"] = json!("none"),
        _ => {}
    }
    body
}

#[test]
fn test_gateway_equals_one_server() {
    for ways in [Ways::Mixed, Ways::Hash] {
        let shards = Shards::new(2, ways);
        let servers = shards.start_all();
        let gateway = shards.gateway(&servers, |_| {});
        let one = Server::start(&options(), Arc::clone(&shards.whole), None).unwrap();
        assert_eq!(get(&gateway, "/").json()["features"], get(&one, "/").json()["features"]);
        let mut random = SplitMix64::new(7);
        for _ in 0..60 {
            let body = random_lookup(&mut random);
            let (found, expected) = (post_json(&gateway, &body), post_json(&one, &body));
            assert_eq!(found.status, expected.status, "{body}: {}", found.text());
            assert_eq!(found.text(), expected.text(), "{body}");
        }
        let bad = json!({"features": {"user": {"values": [500], "offsets": [0, 1]}}});
        assert_eq!(post_json(&gateway, &bad).text(), post_json(&one, &bad).text());
        let body = tensors(&[
            ("user.values", Dtype::I64, i64s(&USER.0)),
            ("user.offsets", Dtype::I64, i64s(&USER.1)),
            ("item.v2.values", Dtype::I64, i64s(&ITEM.0)),
            ("item.v2.offsets", Dtype::I64, i64s(&ITEM.1)),
            ("item.v2.weights", Dtype::F32, f32s(&WEIGHTS)),
        ]);
        let binary = |server| ask(server, "POST", "/v1/lookup", "application/x-safetensors", &body);
        assert_eq!(binary(&gateway).body, binary(&one).body);
        let ids = json!({"inputs": [{"name": "ids", "datatype": "INT64", "shape": [2, 4],
            "data": [3, 4, 5, 6, 499, 999, 29, 0]}]});
        let infer = |server| {
            let path = "/v2/models/tierbed.rows/infer";
            let body = ids.to_string();
            ask(server, "POST", path, "application/json", body.as_bytes()).json()["outputs"].clone()
        };
        assert_eq!(infer(&gateway), infer(&one));
        assert!(infer(&gateway)[0]["data"].as_array().unwrap().len() > 20);
        assert!(metric(&gateway, "tierbed_shard_requests_total{shard=\"1\"}") > 20);
        assert_eq!(metric(&gateway, "tierbed_shard_lost_total{shard=\"0\"}"), 0);
    }
}

#[test]
fn a_batch_asks_each_shard_once() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let gateway = shards.gateway(&servers, |_| {});
    let asked = |server: &Server| {
        let name = "tierbed_requests_total{route=\"/inference.GRPCInferenceService/ModelInfer\",\
                    status=\"200\"}";
        metric(server, name)
    };
    let ids: Vec<i64> = (0..30).collect();
    let offsets: Vec<i64> = (0..=30).collect();
    let feature = json!({"values": ids, "offsets": offsets});
    // Three tables, unpooled: three lookups of a server, one question to each shard.
    let body = json!({"features": {"user": feature, "item.v2": feature, "site": feature},
        "pooling": "none"});
    assert_eq!(post_json(&gateway, &body).status, 200);
    let before: Vec<_> = servers.iter().map(asked).collect();
    assert_eq!(before, [1, 1]);
    let bag = json!({"values": ids, "offsets": [0, 30]});
    let body = json!({"features": {"user": bag, "item.v2": bag}});
    assert_eq!(post_json(&gateway, &body).status, 200);
    assert_eq!(servers.iter().map(asked).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn shards_have_threads_of_their_own_where_requests_have_another_number() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let routing = Routing::begin(&shards.routing(&servers)).unwrap();
    let options = ServeOptions { worker_threads: 3, ..options() };
    let gateway = Server::route(&options, routing, None).unwrap();
    let body = json!({"features": {"user": {"values": [1, 2, 3, 4], "offsets": [0, 4]}}});
    assert_eq!(post_json(&gateway, &body).status, 200);
    assert!(gateway.stop());
    assert!(servers.iter().all(Server::stop), "they have no questions left");
}

#[test]
fn rows_may_come_narrower() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let narrow = shards.gateway(&servers, |options| options.row_type = RowType::Bf16);
    let body = json!({"features": {"user": {"values": [1, 2], "offsets": [0, 1, 2]}}});
    let found = floats(&post_json(&narrow, &body).json()["features"]["user"]);
    let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
    assert_eq!(found, [[rounded(1.1); 4], [rounded(2.1); 4]].concat());
    assert!(RowType::from_name("int9").is_err() && RowType::from_name("f16").is_ok());
}

#[test]
fn predictions_are_scored_at_the_gateway() {
    let shards = Shards::new(2, Ways::Mixed);
    let servers = shards.start_all();
    let scoring = || Some(Arc::new(Scoring::default()) as Arc<dyn Predictor>);
    let gateway =
        Server::route(&options(), Routing::begin(&shards.routing(&servers)).unwrap(), scoring())
            .unwrap();
    let one = Server::start(&options(), Arc::clone(&shards.whole), scoring()).unwrap();
    let body = json!({"dense": [[0.5], [7]], "values": [5, 6, 6, 9]}).to_string();
    let predict = |server| {
        let answer = ask(server, "POST", "/v1/predict", "application/json", body.as_bytes());
        (answer.status, answer.text())
    };
    assert_eq!(predict(&gateway), predict(&one));
    assert_eq!(predict(&gateway).0, 200);
}

#[test]
fn shards_may_want_certificates_and_tokens() {
    let shards = Shards::new(1, Ways::Hash);
    let tokens = shards.path().join("tokens");
    let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    std::fs::write(&tokens, format!("gateway {digest} infer\n")).unwrap();
    let wanting = ServeOptions { tokens: Some(tokens), ..kit::shard_options() };
    let server = Server::start(&wanting, shards.open(0), None).unwrap();
    let mut routing = shards.routing(std::slice::from_ref(&server));
    routing.wait = Duration::from_millis(300);
    let error = route(&routing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    let secret = shards.path().join("secret");
    std::fs::write(&secret, "test\n").unwrap();
    routing.access.token = Some(secret);
    routing.wait = GatewayOptions::WAIT;
    let gateway = route(&routing).unwrap();
    let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}});
    assert_eq!(post_json(&gateway, &body).status, 200);
    routing.access.key = Some("key.pem".into());
    assert!(route(&routing).unwrap_err().to_string().contains("shard-ca"));
}
