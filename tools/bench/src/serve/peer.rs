//! Peers: the protocols by which servers are asked for rows.
//!
//! | peer | request | rows in the answer |
//! |---|---|---|
//! | `lookup` | `POST /v1/lookup` in safetensors, one feature, a bag for each id | one tensor |
//! | `infer` | Open Inference Protocol, `ids` as binary tensor, a feature for each id | `pooled` |
//! | `grpc` | the same over gRPC | `pooled` |
//! | `redis` | `MGET` | bulk strings |
//! | `memcached` | `get` | values |

mod grpc;
mod http;
mod keys;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Error, Result};

use super::rows::Shape;

/// A protocol's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Protocol {
    Lookup,
    Infer,
    Grpc,
    Redis,
    Memcached,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Good,
    /// The server had no room.
    Refused,
    /// The request's time was over.
    Late,
    Failed,
}

/// A whole answer at the beginning of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) byte_count: usize,
    pub(super) outcome: Outcome,
}

/// Speaks a protocol.
pub(super) trait Peer: Send {
    /// Appends a request; `number` counts those of the connection, from 0.
    fn ask(&self, number: u32, ids: &[i64], out: &mut Vec<u8>);

    /// Finds an answer; `None` while more bytes must come.
    ///
    /// # Errors
    /// `Invalid` for bytes that are no answer.
    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>>;

    /// Appends the rows of a good answer; fewer where it is not what it should be.
    fn rows(&self, answer: &[u8], out: &mut Vec<u8>);
}

/// Where and how a server is asked.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    /// Host and port.
    pub(super) address: String,
    pub(super) protocol: Protocol,
    /// Of the Open Inference Protocol.
    #[serde(default)]
    model: String,
    /// The time that every request has; none for ever.
    #[serde(default)]
    timeout_ms: Option<u64>,
}

impl Target {
    pub(super) fn peer(&self, shape: Shape) -> Box<dyn Peer> {
        match self.protocol {
            Protocol::Lookup => Box::new(http::Lookup::new(self, shape)),
            Protocol::Infer => Box::new(http::Infer::new(self, shape)),
            Protocol::Grpc => Box::new(grpc::Grpc::new(self, shape)),
            Protocol::Redis => Box::new(keys::Redis),
            Protocol::Memcached => Box::new(keys::Memcached),
        }
    }
}

/// What `fill` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FillJob {
    target: Target,
    shape: Shape,
}

/// Rows that are set before their replies are read.
const FILL_ROWS: u64 = 256;

/// Rows that are asked for at once, so that they are in memory.
const WARM_ROWS: u64 = 1_024;

/// How long a server that has no room for such a request is left alone.
const ROOM: Duration = Duration::from_millis(50);
/// How often it is asked again.
const ROOM_RETRIES: u32 = 200;

/// Brings all rows into a server's memory: into a key-value store by setting them, into Tierbed by
/// asking for them.
pub(super) fn fill(job: &FillJob) -> Result<Value> {
    job.shape.check()?;
    let keys::Store { set, reply } = match job.target.protocol {
        Protocol::Lookup => return warm(job),
        Protocol::Redis => keys::REDIS,
        Protocol::Memcached => keys::MEMCACHED,
        other => {
            return Err(Error::invalid("rows are brought by lookup, redis or memcached")
                .with("found", format_args!("{other:?}")))
        }
    };
    let failed = |cause| cannot_fill(job, cause);
    let mut stream = TcpStream::connect(&job.target.address).map_err(failed)?;
    let (mut request, mut row, mut replies) = (Vec::new(), Vec::new(), Vec::new());
    let count = job.shape.row_count;
    for first in (0..count).step_by(FILL_ROWS as usize) {
        let end = count.min(first + FILL_ROWS);
        request.clear();
        for id in first..end {
            row.clear();
            job.shape.put_row(id, &mut row);
            set(id, &row, &mut request);
        }
        stream.write_all(&request).map_err(failed)?;
        replies.resize((end - first) as usize * reply.len(), 0);
        stream.read_exact(&mut replies).map_err(failed)?;
        if replies.chunks(reply.len()).any(|found| found != reply) {
            let found = String::from_utf8_lossy(&replies).into_owned();
            return Err(Error::invalid("the store did not take a row")
                .with("address", &job.target.address)
                .with("found", found.chars().take(80).collect::<String>()));
        }
    }
    Ok(json!({ "row_count": count }))
}

/// Asks for all rows, one part after another, and compares every one.
fn warm(job: &FillJob) -> Result<Value> {
    let failed = |cause| cannot_fill(job, cause);
    let mut stream = TcpStream::connect(&job.target.address).map_err(failed)?;
    let row_count = job.shape.row_count;
    for first in (0..row_count).step_by(WARM_ROWS as usize) {
        let ids: Vec<i64> = (first..row_count.min(first + WARM_ROWS)).map(|id| id as i64).collect();
        let shape = Shape { id_count: ids.len(), sample_count: 1, ..job.shape };
        let peer = job.target.peer(shape);
        let heard = ask_until_room(&*peer, &mut stream, &ids).map_err(failed)??;
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        peer.rows(&heard, &mut found);
        ids.iter().for_each(|id| shape.put_row(*id as u64, &mut expected));
        if found != expected {
            let text = String::from_utf8_lossy(&heard).into_owned();
            return Err(Error::invalid("the server answers other rows than it was given")
                .with("first", first)
                .with("found", text.chars().take(200).collect::<String>()));
        }
    }
    Ok(json!({ "row_count": row_count }))
}

/// Asks, and asks again while the server has no room; returns the whole answer.
fn ask_until_room(
    peer: &dyn Peer,
    stream: &mut TcpStream,
    ids: &[i64],
) -> std::io::Result<Result<Vec<u8>>> {
    let (mut request, mut part) = (Vec::new(), [0; 1 << 16]);
    peer.ask(0, ids, &mut request);
    let mut retries = 0;
    loop {
        stream.write_all(&request)?;
        let mut heard = Vec::new();
        let outcome = loop {
            match peer.answer(&heard) {
                Err(error) => return Ok(Err(error)),
                Ok(Some(Answer { outcome, .. })) => break outcome,
                Ok(None) => {}
            }
            let count = stream.read(&mut part)?;
            if count == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            heard.extend(part.iter().take(count));
        };
        if outcome != Outcome::Refused || retries == ROOM_RETRIES {
            return Ok(Ok(heard));
        }
        retries += 1;
        std::thread::sleep(ROOM);
    }
}

fn cannot_fill(job: &FillJob, cause: std::io::Error) -> Error {
    Error::os("cannot fill the server", cause).with("address", &job.target.address)
}

/// Returns the number in ASCII digits.
fn number(bytes: &[u8]) -> Result<usize> {
    let number = std::str::from_utf8(bytes).ok().and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| not_protocol("a number", bytes))
}

fn not_protocol(expected: &str, found: &[u8]) -> Error {
    let found = String::from_utf8_lossy(found).into_owned();
    Error::invalid("the answer is not of the protocol")
        .with("expected", expected)
        .with("found", format_args!("{:?}", found.chars().take(80).collect::<String>()))
}

/// Cuts some bytes off; `None` while not all have come.
fn cut(bytes: &[u8], count: usize) -> Option<(&[u8], &[u8])> {
    bytes.split_at_checked(count)
}

/// Cuts a line off, without its end; `None` while it is not whole.
fn line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.windows(2).position(|two| two == b"\r\n")?;
    let (line, rest) = bytes.split_at(end);
    rest.strip_prefix(b"\r\n").map(|rest| (line, rest))
}
