//! What gateways refuse, and what their errors tell to do.

#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use super::*;

/// Starts a gateway, which waits for no shard for long.
fn refused(routing: &GatewayOptions, remedy: &str) {
    let quick = GatewayOptions { wait: Duration::from_millis(300), ..routing.clone() };
    let error = route(&quick).unwrap_err().to_string();
    assert!(error.contains(remedy), "{error}");
}

#[test]
fn members_that_do_not_fit_are_written_as_the_error_says() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let routing = shards.routing(&servers);
    let members = shards.path().join("members.toml");
    let fitting = std::fs::read_to_string(&members).unwrap();
    let first = fitting.split("[[shard]]").nth(1).unwrap();
    std::fs::write(&members, format!("[[shard]]{first}")).unwrap();
    refused(&routing, "write one [[shard]] for each shard, in order");
    std::fs::write(&members, fitting.replace("[\"", "[\"http://")).unwrap();
    refused(&routing, "give the address that its server has by grpc-address");
    std::fs::write(&members, fitting.replace("127.0.0.1", "no host")).unwrap();
    refused(&routing, "name host:port, and files of TLS in PEM");
    std::fs::write(&members, &fitting).unwrap();
    let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}});
    assert_eq!(post_json(&route(&routing).unwrap(), &body).status, 200);
}

#[test]
fn the_map_is_that_of_the_shards() {
    let (shards, other) = (Shards::new(2, Ways::Hash), Shards::new(2, Ways::Mixed));
    let servers = shards.start_all();
    let fitting = shards.routing(&servers);
    let file = other.path().join("shards.json");
    let told = std::fs::read(&file).unwrap();
    let mut manifest = other.map().manifest().clone();
    manifest.publish += 1;
    std::fs::write(&file, manifest.encode().unwrap()).unwrap();
    let routing = GatewayOptions { route: file.clone(), ..fitting.clone() };
    refused(&routing, "give the shards.json of the publish that the shards serve");
    manifest.publish -= 1;
    manifest.tables[3].name = "week".to_owned();
    std::fs::write(&file, manifest.encode().unwrap()).unwrap();
    refused(&routing, "give the shards.json that was published with the shards");
    std::fs::write(&file, told).unwrap();
    assert!(route(&fitting).is_ok());
}

#[test]
fn what_a_gateway_has_not_is_left_out() {
    let shards = Shards::new(1, Ways::Hash);
    let servers = shards.start_all();
    let routing = shards.routing(&servers);
    let deltas = ServeOptions { deltas: Some(shards.path().into()), ..options() };
    let error =
        Server::route(&deltas, Routing::begin(&routing).unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("let the shards follow deltas, and leave out deltas here"), "{error}");
    let gateway = route(&routing).unwrap();
    let error = gateway.apply(Arc::new(MemoryFolder::new())).unwrap_err().to_string();
    assert!(error.contains("push the delta to the channel, or to those of the shards"), "{error}");
    // A map of more shards is another model's.
    let more = Shards::new(2, Ways::Hash);
    let next = shards.path().join("next");
    std::fs::copy(more.path().join("shards.json"), &next).unwrap();
    std::fs::rename(next, shards.path().join("shards.json")).unwrap();
    let told = || get(&gateway, "/health").text();
    let began = std::time::Instant::now();
    while !told().contains("start a gateway for the new shards beside this one") {
        assert!(began.elapsed() < Duration::from_secs(10), "{}", told());
        thread::sleep(Duration::from_millis(20));
    }
    let body = json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}});
    assert_eq!(post_json(&gateway, &body).status, 200, "it goes on as before");
}

#[test]
fn limits_of_shards_are_those_of_the_gateway() {
    let shards = Shards::new(1, Ways::Hash);
    let limits = Limits { indices_max: 3, ..Limits::default() };
    let small = ServeOptions { limits, ..kit::shard_options() };
    let server = Server::start(&small, shards.open(0), None).unwrap();
    let gateway = shards.gateway(std::slice::from_ref(&server), |_| {});
    let body = json!({"features": {"user": {"values": [1, 2, 3, 4], "offsets": [0, 4]}}});
    let answer = post_json(&gateway, &body);
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("raise the shards' limits to those of the gateway"));
    drop((gateway, server));
    let servers = shards.start_all();
    assert_eq!(post_json(&shards.gateway(&servers, |_| {}), &body).status, 200);
}

#[test]
fn a_table_that_no_feature_reads_cannot_be_asked_for() {
    let shards = Shards::new(1, Ways::Hash);
    let feature =
        |name: &str| ServedFeature { name: name.into(), table: name.into(), pooling: "sum".into() };
    let few = ServeOptions { features: Some(vec![feature("user")]), ..kit::shard_options() };
    let server = Server::start(&few, shards.open(0), None).unwrap();
    let gateway = shards.gateway(std::slice::from_ref(&server), |_| {});
    fn ask(gateway: &Server, name: &str) -> Answer {
        let feature = json!({"values": [1], "offsets": [0, 1]});
        post_json(gateway, &json!({"features": {name: feature}}))
    }
    assert_eq!(ask(&gateway, "user").status, 200);
    let answer = ask(&gateway, "site");
    assert!(answer.text().contains("publish with a feature of each table"), "{}", answer.text());
    drop((gateway, server));
    let servers = shards.start_all();
    assert_eq!(ask(&shards.gateway(&servers, |_| {}), "site").status, 200);
}

#[test]
fn the_dashboard_asks_for_metrics_that_a_gateway_has() {
    let shards = Shards::new(1, Ways::Hash);
    let servers = shards.start_all();
    let gateway = shards.gateway(&servers, |_| {});
    let metrics = get(&gateway, "/metrics").text();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/grafana/tierbed.json");
    let dashboard = std::fs::read_to_string(path).unwrap();
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = dashboard.split(|c| !is_of_name(c));
    let names: std::collections::BTreeSet<_> =
        words.filter(|word| word.starts_with("tierbed_shard")).collect();
    assert!(names.len() > 6, "{names:?}");
    for name in names {
        let is_there = |line: &str| {
            line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name} "))
        };
        assert!(metrics.lines().any(is_there), "{name} in\n{metrics}");
    }
}
