//! A line to a store that cuts, delays, or answers by itself.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// What becomes of a connection, which has one request.
#[derive(Debug, Clone, Copy)]
pub enum Line {
    Fine,
    /// Nobody answers.
    Closed,
    /// The store is reached late.
    Slow(Duration),
    /// The answer ends after so many bytes.
    Cut(u64),
    /// This is answered: status, body.
    Says(&'static str, &'static str),
}

type Lines = dyn Fn(u64) -> Line + Send + Sync;

pub struct Proxy {
    address: SocketAddr,
    count: Arc<AtomicU64>,
}

impl Proxy {
    /// Leads to `endpoint`; `line` is asked what becomes of each connection, counted from 0.
    pub fn new(endpoint: &str, line: impl Fn(u64) -> Line + Send + Sync + 'static) -> Self {
        let to: SocketAddr = endpoint.strip_prefix("http://").unwrap().parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let count = Arc::new(AtomicU64::new(0));
        let (line, counter): (Arc<Lines>, _) = (Arc::new(line), Arc::clone(&count));
        // It ends with the test program.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let line = line(counter.fetch_add(1, Ordering::SeqCst));
                std::thread::spawn(move || serve(client.unwrap(), to, line));
            }
        });
        Self { address, count }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

fn serve(mut client: TcpStream, to: SocketAddr, line: Line) {
    match line {
        Line::Fine => forward(client, to, u64::MAX),
        Line::Closed => {}
        Line::Slow(pause) => {
            std::thread::sleep(pause);
            forward(client, to, u64::MAX);
        }
        Line::Cut(bytes) => forward(client, to, bytes),
        Line::Says(status, body) => {
            swallow(&mut client);
            let len = body.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}"
            );
            // Whoever asked may have gone.
            let _ = client.write_all(answer.as_bytes());
        }
    }
}

/// Copies both ways, at most `bytes` of the answer.
fn forward(client: TcpStream, to: SocketAddr, bytes: u64) {
    let Ok(store) = TcpStream::connect(to) else { return };
    let (mut from_client, mut to_store) = (client.try_clone().unwrap(), store.try_clone().unwrap());
    let asking = std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_store));
    let mut to_client = &client;
    let _ = std::io::copy(&mut (&store).take(bytes), &mut to_client);
    let _ = client.shutdown(Shutdown::Both);
    let _ = store.shutdown(Shutdown::Both);
    let _ = asking.join();
}

/// Reads a request with its body.
fn swallow(client: &mut TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && client.read(&mut byte).is_ok_and(|len| len == 1) {
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let len = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let _ = std::io::copy(&mut client.take(len.unwrap_or(0)), &mut std::io::sink());
}
