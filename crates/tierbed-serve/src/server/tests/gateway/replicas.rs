//! Servers of shards that are lost, slow, and come back.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// A way to a server on which nothing moves while it is held.
struct Way {
    address: SocketAddr,
    is_held: Arc<AtomicBool>,
}

impl Way {
    fn to(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, target) = (listener.local_addr().unwrap(), server.grpc_address().unwrap());
        let is_held = Arc::new(AtomicBool::new(false));
        let held = Arc::clone(&is_held);
        thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(target).unwrap());
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                for (from, to) in [(near, far), back] {
                    let held = Arc::clone(&held);
                    thread::spawn(move || copy(from, to, &held));
                }
            }
        });
        Self { address, is_held }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, is_held: &AtomicBool) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while is_held.load(Ordering::Relaxed) {
            pause(1);
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
}

/// Asks the gateway from several threads until told to end; returns answers and failures.
fn load(gateway: &Server, work: impl FnOnce()) -> (usize, Vec<String>) {
    let (ends, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failures = Mutex::new(Vec::new());
    let body = json!({"features": {"user": {"values": [1, 2, 3, 4, 5, 6], "offsets": [0, 6]}}});
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let answer = post_json(gateway, &body);
                    match answer.status {
                        200 => _ = answered.fetch_add(1, Ordering::Relaxed),
                        _ => failures.lock().unwrap().push(answer.text()),
                    }
                }
            });
        }
        work();
        ends.store(true, Ordering::Relaxed);
    });
    (answered.into_inner(), failures.into_inner().unwrap())
}

fn pause(ms: u64) {
    thread::sleep(Duration::from_millis(ms));
}

/// Waits until a number of the gateway's metrics is what it should be.
fn wait_for(gateway: &Server, name: &str, expected: u64) {
    for _ in 0..200 {
        if metric(gateway, name) == expected {
            return;
        }
        pause(25);
    }
    panic!("{name} is {}, not {expected}", metric(gateway, name));
}

#[test]
fn test_a_lost_replica_fails_no_request() {
    let shards = Shards::new(2, Ways::Hash);
    let first = [shards.start(0), shards.start(0)];
    let second = [shards.start(1)];
    shards.name(&[&first, &second]);
    let members = shards.path().join("members.toml");
    let routing = GatewayOptions::new(shards.path(), members.to_str().unwrap());
    let gateway = route(&routing).unwrap();
    wait_for(&gateway, "tierbed_shard_replicas_live{shard=\"0\"}", 2);
    let [lost, kept] = first;
    let (answered, failures) = load(&gateway, || {
        pause(150);
        // It is gone at once, with all that it was asked.
        drop(lost);
        pause(300);
    });
    assert_eq!(failures, Vec::<String>::new());
    assert!(answered > 50, "{answered} answers");
    wait_for(&gateway, "tierbed_shard_replicas_live{shard=\"0\"}", 1);
    // A new one is found by the file of members, and asked.
    let again = [kept, shards.start(0)];
    shards.name(&[&again, &second]);
    wait_for(&gateway, "tierbed_shard_replicas_live{shard=\"0\"}", 2);
    let (_, failures) = load(&gateway, || pause(150));
    assert_eq!(failures, Vec::<String>::new());
    let asked = |server: &Server| {
        let name = "tierbed_requests_total{route=\"/inference.GRPCInferenceService/ModelInfer\",\
                    status=\"200\"}";
        metric(server, name)
    };
    assert!(asked(&again[1]) > 5, "{} questions", asked(&again[1]));
}

#[test]
fn a_server_that_stops_for_a_moment_refuses_no_request() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let way = Way::to(&servers[0]);
    let other = servers[1].grpc_address().unwrap();
    let members = shards.path().join("members.toml");
    let named = [way.address, other].map(|at| format!("[[shard]]\nreplicas = [\"{at}\"]\n"));
    std::fs::write(&members, named.concat()).unwrap();
    let routing = GatewayOptions::new(shards.path(), members.to_str().unwrap());
    // The limits are those of a server as it comes.
    let gateway = Server::route(&options(), Routing::begin(&routing).unwrap(), None).unwrap();
    let body = json!({"features": {"user": {"values": [1, 2, 3, 4, 5, 6], "offsets": [0, 6]}}});
    (0..20).for_each(|_| assert_eq!(post_json(&gateway, &body).status, 200));
    assert_eq!(metric(&gateway, "tierbed_async_requests_total"), 20, "none takes a thread");
    way.is_held.store(true, Ordering::Relaxed);
    let refused = thread::scope(|scope| {
        let asked: Vec<_> = (0..48)
            .map(|_| {
                pause(4);
                scope.spawn(|| post_json(&gateway, &body))
            })
            .collect();
        way.is_held.store(false, Ordering::Relaxed);
        let answers = asked.into_iter().map(|one| one.join().unwrap());
        answers.filter(|it| it.status != 200).map(|it| it.text()).collect::<Vec<_>>()
    });
    assert_eq!(refused, Vec::<String>::new());
}

#[test]
fn a_server_without_room_is_asked_again() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    let gateway = shards.gateway(&servers, |_| {});
    let full = &servers[0];
    let places = full.places.try_acquire_many(full.place_count as u32).unwrap();
    let body = json!({"features": {"user": {"values": [1, 2, 3, 4, 5, 6], "offsets": [0, 6]}}});
    let answer = thread::scope(|scope| {
        let asked = scope.spawn(|| post_json(&gateway, &body));
        while metric(&gateway, "tierbed_shard_failures_total{shard=\"0\"}") < 3 {
            assert!(!asked.is_finished(), "{}", asked.join().unwrap().text());
            pause(1);
        }
        drop(places);
        asked.join().unwrap()
    });
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(metric(&gateway, "tierbed_shard_retries_total{shard=\"0\"}") >= 3);
    assert_eq!(metric(&gateway, "tierbed_shard_lost_total{shard=\"0\"}"), 0);
}

#[test]
fn test_a_lost_shard_is_said() {
    let shards = Shards::new(2, Ways::Hash);
    let mut servers = shards.start_all();
    let gateway = shards.gateway(&servers, |_| {});
    let standing = shards.gateway(&servers, |options| options.missing = MissingShard::DefaultRows);
    drop(servers.pop());
    wait_for(&gateway, "tierbed_shard_replicas_live{shard=\"1\"}", 0);
    wait_for(&standing, "tierbed_shard_replicas_live{shard=\"1\"}", 0);
    let map = shards.map();
    let mut located = Vec::new();
    map.locate(TableId(0), &(0..9).collect::<Vec<_>>(), &mut located).unwrap();
    let of = |shard| located.iter().position(|at| at.shard == Some(shard)).unwrap() as i64;
    let (here, lost) = (of(0), of(1));
    let body =
        |ids: &[i64]| json!({"features": {"user": {"values": ids, "offsets": [0, ids.len()]}}});
    assert_eq!(post_json(&gateway, &body(&[here])).status, 200);
    let answer = post_json(&gateway, &body(&[here, lost]));
    assert_eq!((answer.status, answer.field("retry-after")), (503, "1"), "{}", answer.text());
    assert!(answer.text().contains("shard: 1"), "{}", answer.text());
    assert!(metric(&gateway, "tierbed_requests_refused_total{reason=\"shard\"}") >= 1);

    let answer = post_json(&standing, &body(&[here, lost]));
    assert_eq!((answer.status, answer.field("tierbed-default-rows")), (200, "1"));
    assert_eq!(post_json(&standing, &body(&[here])).field("tierbed-default-rows"), "");
    assert_eq!(metric(&standing, "tierbed_shard_default_rows_total{shard=\"1\"}"), 1);
    // A row that was never stored has its initial value, whoever computes it.
    let absent = (450..500)
        .find(|id| {
            let mut at = Vec::new();
            map.locate(TableId(0), &[*id], &mut at).unwrap();
            at[0].shard == Some(1)
        })
        .unwrap();
    let bags = Bags { indices: &[absent], offsets: &[0, 1], weights: None, feature_count: 1 };
    let found = floats(&post_json(&standing, &body(&[absent])).json()["features"]["user"]);
    assert_eq!(found, direct(&shards.whole, 0, Pooling::Sum, &bags));
}

#[test]
fn a_gateway_that_finds_no_shard_says_which() {
    let shards = Shards::new(2, Ways::Hash);
    let only = [shards.start(0)];
    shards.name(&[&only, &[]]);
    let members = shards.path().join("members.toml");
    let mut routing = GatewayOptions::new(shards.path(), members.to_str().unwrap());
    routing.wait = Duration::from_millis(400);
    let error = route(&routing).unwrap_err();
    assert!(error.to_string().contains("shards_without_server: 1"), "{error}");
    // A server of another shard does not answer for one.
    shards.name(&[&only, &only]);
    let error = route(&routing).unwrap_err();
    assert!(error.to_string().contains("shards_without_server: 1"), "{error}");
    routing.members = shards.path().join("none").to_str().unwrap().to_owned();
    assert_eq!(route(&routing).unwrap_err().kind(), ErrorKind::Invalid);
}
