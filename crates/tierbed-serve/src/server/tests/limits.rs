//! Clients that send slowly, take slowly, lie about lengths, or ask for too much.

use super::*;

/// The answer on a connection: its status, and its body as text.
fn read_answer(stream: &mut TcpStream) -> (u16, String) {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = Vec::new();
    let head_len = loop {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "closed without an answer");
        bytes.push(byte[0]);
        if bytes.ends_with(b"\r\n\r\n") {
            break bytes.len();
        }
    };
    let head = String::from_utf8(bytes[..head_len].to_vec()).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")).unwrap();
    let mut body = vec![0; length.trim().parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head + &String::from_utf8(body).unwrap())
}

fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.address()).unwrap()
}

fn sent(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = connect(server);
    stream.write_all(bytes).unwrap();
    stream
}

/// Tells whether the server has closed the connection, within some seconds.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

const HALF_HEAD: &[u8] = b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\nX-a: b";
const HALF_BODY: &[u8] =
    b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n\
      Content-Length: 100\r\n\r\n{";

fn good() -> Value {
    json!({"features": {"user": {"values": [1], "offsets": [0, 1]}}})
}

fn counted(server: &Server, line: &str) -> bool {
    get(server, "/metrics").text().lines().any(|found| found == line)
}

#[test]
fn bodies_and_heads_that_never_end_take_no_place() {
    let narrow = limited(|limits| limits.requests_max = 4);
    let server = Server::start(&narrow, snapshot(), None).unwrap();
    let halves = [HALF_HEAD, HALF_BODY, b"", HALF_BODY];
    let held: Vec<_> = (0..300).map(|at| sent(&server, halves[at % 4])).collect();
    for _ in 0..20 {
        assert_eq!(post_json(&server, &good()).status, 200);
    }
    assert_eq!(get(&server, "/health").status, 200);
    assert!(counted(&server, "tierbed_requests_in_flight 0"));
    drop(held);
}

#[test]
fn a_crowd_that_does_harm_keeps_nobody_from_an_answer() {
    let hasty = limited(|limits| {
        (limits.connections_max, limits.body_bytes_max) = (4_000, 1_000);
        (limits.head_ms_max, limits.body_ms_max) = (3_000, 3_000);
    });
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let large = b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n";
    let harm: [(&[u8], Option<u16>); 4] =
        [(HALF_HEAD, Some(408)), (HALF_BODY, Some(408)), (large, Some(413)), (b"", None)];
    // Both ends of a connection are files of this process.
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let count = files.map_or(2_000, |files| files.saturating_sub(500) / 8 * 4).min(2_000) as usize;
    let crowd: Vec<_> = (0..count).map(|at| sent(&server, harm[at % 4].0)).collect();
    for _ in 0..50 {
        assert_eq!(post_json(&server, &good()).status, 200);
    }
    assert!(counted(&server, "tierbed_requests_in_flight 0"));
    for (at, mut stream) in crowd.into_iter().enumerate() {
        if let Some(status) = harm[at % 4].1 {
            assert_eq!(read_answer(&mut stream).0, status);
        }
    }
    for (line, count) in [
        ("tierbed_requests_total{route=\"/v1/lookup\",status=\"200\"}", 50),
        ("tierbed_requests_total{route=\"/v1/lookup\",status=\"408\"}", count / 4),
        ("tierbed_requests_total{route=\"/v1/lookup\",status=\"413\"}", count / 4),
        ("tierbed_connections_cut_total{reason=\"head\"}", count / 4),
    ] {
        assert!(counted(&server, &format!("{line} {count}")), "no {line} {count}");
    }
}

#[test]
fn heads_that_take_too_long_are_ended_and_told_so() {
    let hasty = limited(|limits| limits.head_ms_max = 200);
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let mut half = sent(&server, HALF_HEAD);
    let (status, text) = read_answer(&mut half);
    assert_eq!(status, 408, "{text}");
    assert!(text.contains("within 200 ms"), "{text}");
    assert!(is_closed(&mut half));
    // A byte now and then is no excuse.
    let mut dripping = connect(&server);
    dripping.set_nodelay(true).unwrap();
    let ended = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        dripping.write_all(b"G").is_err()
    });
    assert!(ended, "a dripping head was never ended");
    assert!(counted(&server, r#"tierbed_connections_cut_total{reason="head"} 2"#));
}

#[test]
fn bodies_that_pause_or_drip_are_ended_and_told_so() {
    let hasty = limited(|limits| (limits.body_ms_max, limits.body_idle_ms_max) = (600, 150));
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let (status, text) = read_answer(&mut sent(&server, HALF_BODY));
    assert!(status == 408 && text.contains("nothing came of the body for 150 ms"), "{text}");
    let mut dripping = sent(&server, HALF_BODY);
    let mut writing = dripping.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        for _ in 0..60 {
            std::thread::sleep(Duration::from_millis(40));
            if writing.write_all(b" ").is_err() {
                return;
            }
        }
    });
    let (status, text) = read_answer(&mut dripping);
    assert!(status == 408 && text.contains("did not arrive within 600 ms"), "{text}");
    drop(dripping);
    drip.join().unwrap();
}

#[test]
fn connections_without_requests_are_closed_after_a_while() {
    let hasty = limited(|limits| limits.idle_ms_max = 150);
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let mut idle = sent(&server, b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(read_answer(&mut idle).0, 200);
    assert!(is_closed(&mut idle) && is_closed(&mut connect(&server)));
}

#[test]
fn clients_that_do_not_take_their_answer_are_cut_off() {
    let hasty = limited(|limits| limits.answer_ms_max = 300);
    let server = Server::start(&hasty, snapshot(), None).unwrap();
    let values = vec![1; 500_000];
    let body = json!({"features": {"user": {"values": values, "offsets": [0, 500_000]}},
        "pooling": "none"})
    .to_string();
    let head =
        format!("POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut lazy = sent(&server, head.as_bytes());
    lazy.write_all(body.as_bytes()).unwrap();
    // They are counted one after the other, while the connection ends.
    let told = [
        "tierbed_answers_unfinished_total 1",
        r#"tierbed_connections_cut_total{reason="answer"} 1"#,
        "tierbed_buffered_bytes 0",
    ];
    let are_counted = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        told.iter().all(|told| counted(&server, told))
    });
    assert!(are_counted, "{}", get(&server, "/metrics").text());
}

#[test]
fn a_large_answer_reaches_a_client_that_reads_late() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let values = vec![1; 400_000];
    let body = json!({"features": {"user": {"values": values, "offsets": [0, 400_000]}},
        "pooling": "none"})
    .to_string();
    let head = format!(
        "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let mut late = sent(&server, head.as_bytes());
    late.write_all(body.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(600));
    let (status, text) = read_answer(&mut late);
    let found: Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!((status, floats(&found["features"]["user"]).len()), (200, 1_600_000));
}

#[test]
fn lengths_over_the_limit_are_refused_before_a_byte_comes() {
    let small = limited(|limits| limits.body_bytes_max = 1000);
    let server = Server::start(&small, snapshot(), None).unwrap();
    for head in [
        "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n",
        "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n\
         Content-Length: 999999999999\r\n\r\n",
    ] {
        let (status, text) = read_answer(&mut sent(&server, head.as_bytes()));
        assert!(status == 413 && text.contains("body_bytes_max: 1000"), "{text}");
    }
    // One that goes on sending all the same reads its answer, too.
    let mut sending = sent(&server, b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\n");
    sending.write_all(b"Transfer-Encoding: chunked\r\n\r\n").unwrap();
    for _ in 0..20 {
        if sending.write_all(&[b"64\r\n" as &[u8], &[b' '; 100], b"\r\n"].concat()).is_err() {
            break;
        }
    }
    let (status, text) = read_answer(&mut sending);
    assert!(status == 413 && text.contains("found: more than 1000"), "{text}");
}

#[test]
fn chunks_that_are_not_http_are_refused_in_words() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let mut stream = sent(&server, b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\n");
    stream.write_all(b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{}\r\n").unwrap();
    let (status, text) = read_answer(&mut stream);
    assert!(status == 400 && text.contains("chunks are not HTTP"), "{text}");
}

#[test]
fn large_bodies_find_no_memory_while_small_ones_do() {
    let tight = limited(|limits| {
        (limits.buffer_bytes_max, limits.body_bytes_max) = (128 << 10, 1 << 20);
    });
    let server = Server::start(&tight, snapshot(), None).unwrap();
    let head = "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: 190000\r\n\r\n";
    let holding = || {
        let mut stream = sent(&server, head.as_bytes());
        stream.write_all(&[b' '; 180_000]).unwrap();
        stream
    };
    let first = holding();
    let is_held = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        let text = get(&server, "/metrics").text();
        let line = text.lines().find(|line| line.starts_with("tierbed_buffered_bytes ")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap() > 110_000
    });
    assert!(is_held, "the first body's bytes are counted");
    let (status, text) = read_answer(&mut holding());
    assert!(status == 503 && text.contains("retry-after: 1"), "{text}");
    assert_eq!(post_json(&server, &good()).status, 200, "small requests find room");
    assert!(counted(&server, r#"tierbed_requests_refused_total{reason="buffers"} 1"#));
    drop(first);
    let is_free = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        counted(&server, "tierbed_buffered_bytes 0")
    });
    assert!(is_free, "memory is given back when the client leaves");
}

#[test]
fn empty_bags_and_large_answers_have_limits_that_are_named() {
    let small = limited(|limits| {
        (limits.bags_max, limits.answer_bytes_max, limits.indices_max) = (1000, 4000, 1000);
    });
    let server = Server::start(&small, snapshot(), None).unwrap();
    let bags = |count: usize| {
        let offsets = vec![0; count + 1];
        json!({"features": {"user": {"values": [], "offsets": offsets}}})
    };
    let answer = post_json(&server, &bags(1001));
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("bags_max: 1000"), "{}", answer.text());
    let answer = post_json(&server, &bags(1000));
    assert!(answer.status == 400 && answer.text().contains("answer_bytes_max: 4000"));
    assert_eq!(post_json(&server, &bags(60)).status, 200);
    let rows = json!({"values": vec![1; 999], "offsets": [0, 999]});
    let unpooled = json!({"features": {"user": rows}, "pooling": "none"});
    assert!(post_json(&server, &unpooled).text().contains("answer_bytes_max"));
    assert_eq!(post_json(&server, &json!({"features": {"user": rows}})).status, 200);
}

#[test]
fn weights_out_of_range_are_named() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let ask = |weight: f64| {
        let user = json!({"values": [1, 2], "offsets": [0, 2], "weights": [1.0, weight]});
        post_json(&server, &json!({"features": {"user": user}}))
    };
    assert_eq!(ask(3e38).status, 200);
    for weight in [1e39, -1e300] {
        let answer = ask(weight);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("position: 1"), "{}", answer.text());
        assert!(answer.text().contains("feature: user"), "{}", answer.text());
    }
}

#[test]
fn connections_over_the_limit_are_told_so() {
    let few = limited(|limits| limits.connections_max = 3);
    let server = Server::start(&few, snapshot(), None).unwrap();
    let ask = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n";
    let mut open: Vec<_> = (0..3).map(|_| sent(&server, ask)).collect();
    for stream in &mut open {
        assert_eq!(read_answer(stream).0, 200);
    }
    let (status, text) = read_answer(&mut sent(&server, ask));
    assert!(status == 503 && text.contains("retry-after") && text.contains("connections"));
    open.truncate(1);
    let has_room = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        read_answer(&mut sent(&server, ask)).0 == 200
    });
    assert!(has_room, "closed connections make room");
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let mut all = Vec::new();
    for id in 0..100 {
        let indices = json!({"values": [id], "offsets": [0, 1]});
        let body = json!({"features": {"user": indices}}).to_string();
        all.extend_from_slice(b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: ");
        all.extend_from_slice(format!("{}\r\n\r\n{body}", body.len()).as_bytes());
    }
    let mut stream = sent(&server, &all);
    for id in 0..100 {
        let (status, text) = read_answer(&mut stream);
        let body: Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        assert_eq!((status, floats(&body["features"]["user"])), (200, vec![id as f32 + 0.1; 4]));
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    for (bad, name) in [
        (limited(|limits| limits.bags_max = 0), "bags_max"),
        (limited(|limits| limits.head_ms_max = 0), "head_ms_max"),
        (limited(|limits| limits.queue_ms_max = 0), "queue_ms_max"),
        (limited(|limits| limits.idle_ms_max = 1 << 40), "idle_ms_max"),
        (ServeOptions { lookup_threads: 0, ..options() }, "lookup_threads"),
    ] {
        let error = Server::start(&bad, snapshot(), None).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Invalid);
        assert!(error.to_string().contains(name), "{error}");
    }
}
