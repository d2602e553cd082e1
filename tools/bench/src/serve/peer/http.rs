//! Tierbed's two protocols over HTTP.

use serde_json::json;
use tierbed_core::Result;

use super::{cut, line, not_protocol, number, Answer, Outcome, Peer, Shape, Target};

/// A request of which only the ids change.
#[derive(Debug)]
struct Form {
    /// Before the ids.
    head: Vec<u8>,
    /// After them.
    tail: Vec<u8>,
}

impl Form {
    fn new(lines: &str, target: &Target, before: &[u8], ids: usize, tail: Vec<u8>) -> Self {
        let body_bytes = before.len() + ids * size_of::<i64>() + tail.len();
        let time = match target.timeout_ms {
            Some(ms) => format!("x-envoy-expected-rq-timeout-ms: {ms}\r\n"),
            None => String::new(),
        };
        let text = format!(
            "{lines}Host: {}\r\n{time}Content-Length: {body_bytes}\r\n\r\n",
            target.address
        );
        Self { head: [text.as_bytes(), before].concat(), tail }
    }

    fn put(&self, ids: &[i64], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head);
        put_all(ids, out);
        out.extend_from_slice(&self.tail);
    }
}

fn put_all(values: &[i64], out: &mut Vec<u8>) {
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

/// Makes a text longer by spaces, so that what follows lies at a multiple of eight bytes.
fn padded(mut text: String) -> String {
    let missing = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', missing));
    text
}

/// Asks `/v1/lookup`.
#[derive(Debug)]
pub(super) struct Lookup(Form);

impl Lookup {
    pub(super) fn new(target: &Target, shape: Shape) -> Self {
        let count = shape.asked();
        let (ids, end) = (8 * count, 8 * (2 * count + 1));
        let tensor = |len: usize, offsets: [usize; 2]| {
            let shape = [len];
            json!({ "dtype": "I64", "shape": shape, "data_offsets": offsets })
        };
        let header = padded(
            json!({
                "C0.values": tensor(count, [0, ids]),
                "C0.offsets": tensor(count + 1, [ids, end]),
            })
            .to_string(),
        );
        let before = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        let mut offsets = Vec::new();
        put_all(&(0..=count as i64).collect::<Vec<_>>(), &mut offsets);
        let lines = "POST /v1/lookup HTTP/1.1\r\nContent-Type: application/x-safetensors\r\n";
        Self(Form::new(lines, target, &before, count, offsets))
    }
}

impl Peer for Lookup {
    fn ask(&self, _: u32, ids: &[i64], out: &mut Vec<u8>) {
        self.0.put(ids, out);
    }

    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>> {
        answer(bytes)
    }

    fn rows(&self, answer: &[u8], out: &mut Vec<u8>) {
        let Some(Head { body, .. }) = Head::read(answer).ok().flatten() else { return };
        let Some((length, rest)) = body.split_first_chunk() else { return };
        let start = usize::try_from(u64::from_le_bytes(*length)).ok();
        if let Some(rows) = start.and_then(|start| rest.get(start..)) {
            out.extend_from_slice(rows);
        }
    }
}

/// Asks by the Open Inference Protocol.
#[derive(Debug)]
pub(super) struct Infer(Form);

impl Infer {
    pub(super) fn new(target: &Target, shape: Shape) -> Self {
        let count = shape.asked();
        let mut parameters = json!({ "binary_data_output": true });
        if let (Some(ms), Some(parameters)) = (target.timeout_ms, parameters.as_object_mut()) {
            parameters.insert("timeout".to_owned(), json!(ms * 1_000));
        }
        let head = padded(
            json!({
                "parameters": parameters,
                "inputs": [{ "name": "ids", "shape": [shape.sample_count, shape.id_count],
                    "datatype": "INT64",
                    "parameters": { "binary_data_size": 8 * count } }],
            })
            .to_string(),
        );
        let lines = format!(
            "POST /v2/models/{}/infer HTTP/1.1\r\nContent-Type: application/octet-stream\r\n\
             Inference-Header-Content-Length: {}\r\n",
            target.model,
            head.len()
        );
        Self(Form::new(&lines, target, head.as_bytes(), count, Vec::new()))
    }
}

impl Peer for Infer {
    fn ask(&self, _: u32, ids: &[i64], out: &mut Vec<u8>) {
        self.0.put(ids, out);
    }

    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>> {
        answer(bytes)
    }

    fn rows(&self, answer: &[u8], out: &mut Vec<u8>) {
        let Some(Head { body, json_bytes, .. }) = Head::read(answer).ok().flatten() else { return };
        if let Some(rows) = json_bytes.and_then(|start| body.get(start..)) {
            out.extend_from_slice(rows);
        }
    }
}

/// The head of an answer whose body is there, too.
struct Head<'a> {
    status: usize,
    json_bytes: Option<usize>,
    body: &'a [u8],
    byte_count: usize,
}

impl<'a> Head<'a> {
    /// Reads a head; `None` while the answer is not whole.
    fn read(bytes: &'a [u8]) -> Result<Option<Self>> {
        let Some((first, mut rest)) = line(bytes) else { return Ok(None) };
        let Some(status) = first.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3)) else {
            return Err(not_protocol("HTTP/1.1", first));
        };
        let (mut body_bytes, mut json_bytes) = (None, None);
        loop {
            let Some((field, after)) = line(rest) else { return Ok(None) };
            rest = after;
            if field.is_empty() {
                break;
            }
            let mut parts = field.splitn(2, |byte| *byte == b':');
            let (Some(name), Some(value)) = (parts.next(), parts.next()) else {
                return Err(not_protocol("a header", field));
            };
            if name.eq_ignore_ascii_case(b"content-length") {
                body_bytes = Some(number(value)?);
            } else if name.eq_ignore_ascii_case(b"inference-header-content-length") {
                json_bytes = Some(number(value)?);
            }
        }
        let Some(body_bytes) = body_bytes else { return Err(not_protocol("a length", first)) };
        let Some((body, _)) = cut(rest, body_bytes) else { return Ok(None) };
        let byte_count = bytes.len() - rest.len() + body_bytes;
        Ok(Some(Self { status: number(status)?, json_bytes, body, byte_count }))
    }
}

fn answer(bytes: &[u8]) -> Result<Option<Answer>> {
    let Some(Head { status, byte_count, .. }) = Head::read(bytes)? else { return Ok(None) };
    let outcome = match status {
        200 => Outcome::Good,
        503 => Outcome::Refused,
        504 => Outcome::Late,
        _ => Outcome::Failed,
    };
    Ok(Some(Answer { byte_count, outcome }))
}
