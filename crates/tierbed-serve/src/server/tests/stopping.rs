//! Nobody who came in time goes without an answer.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// Asks on a connection of its own; `None` when nobody lets it in.
///
/// # Panics
/// When it was let in and not answered.
fn ask_once(address: SocketAddr) -> Option<()> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let body = r#"{"features":{"user":{"values":[1],"offsets":[0,1]}}}"#;
    let head = format!(
        "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut start = [0; 12];
    let answered = stream.write_all(head.as_bytes()).and_then(|()| stream.read_exact(&mut start));
    answered.expect("let in, and not answered");
    assert_eq!(&start, b"HTTP/1.1 200");
    Some(())
}

#[test]
fn a_request_that_lies_unread_in_its_socket_is_answered() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let idle: Vec<_> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(50));
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| server.stop());
        std::thread::sleep(Duration::from_millis(20));
        for mut stream in idle {
            stream.write_all(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
            assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
        }
        assert!(stopping.join().unwrap());
    });
}

#[test]
fn connections_that_are_kept_alive_end_with_an_answer() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let ask = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n";
    stream.write_all(ask).unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    let stopping = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| server.stop());
        std::thread::sleep(Duration::from_millis(50));
        stream.write_all(ask).unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("HTTP/1.1 200"), "the second request is answered: {rest}");
        stopping.join().unwrap()
    });
    assert!(stopping);
}

#[test]
fn stopping_under_load_leaves_nobody_without_an_answer() {
    let answered = AtomicUsize::new(0);
    for _ in 0..12 {
        let server = Server::start(&options(), snapshot(), None).unwrap();
        let (address, is_over) = (server.address(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        match ask_once(address) {
                            Some(()) => answered.fetch_add(1, Ordering::Relaxed),
                            None => break,
                        };
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(60));
            assert!(server.stop());
            is_over.store(true, Ordering::Relaxed);
        });
    }
    assert!(answered.load(Ordering::Relaxed) > 100);
}

#[test]
fn half_sent_heads_do_not_hold_the_server_up() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let mut half = TcpStream::connect(server.address()).unwrap();
    half.write_all(b"GET /health HTTP/1.1\r\nHo").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let clock = tierbed_core::env::SystemClock::default();
    assert!(server.stop());
    assert!(clock.now_us() < 8_000_000, "it waits a moment, not until its own time is over");
}

/// A recorder writes its last queries when the snapshot goes: a stopped server must let it.
#[test]
fn a_server_that_stopped_holds_no_snapshot() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    assert!(Arc::strong_count(&snapshot) > 1);
    assert!(server.stop());
    assert_eq!(Arc::strong_count(&snapshot), 1);
    assert!(server.stop());
}
