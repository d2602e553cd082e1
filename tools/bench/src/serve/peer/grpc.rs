//! The Open Inference Protocol over gRPC, in as much of HTTP/2 as one call at a time takes.
//!
//! ```text
//! preface, settings ─▶ head, message ─▶ ... ─▶ head, message ─▶ trailers: grpc-status
//! ```
//!
//! The settings forbid a table of header fields, so every head can be read by itself, and open the
//! windows so far that no run exhausts them.

#![expect(clippy::big_endian_bytes, reason = "HTTP/2 and gRPC count in network order")]

use tierbed_core::Result;

use super::{not_protocol, Answer, Outcome, Peer, Shape, Target};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEAD_BYTES: usize = 9;
/// What every server takes.
const FRAME_BYTES_MAX: usize = 1 << 14;
/// Bytes before a message: whether it is compressed, and its length.
const MESSAGE_HEAD_BYTES: usize = 5;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

const WINDOW_BYTES_MAX: u32 = (1 << 31) - 1;
/// What a connection's window is before it is opened.
const WINDOW_BYTES: u32 = (1 << 16) - 1;

/// `grpc-status` in Huffman's code, as servers without a table of fields send it.
const STATUS: [u8; 9] = [0x88, 0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f];

/// Asks by `ModelInfer`.
#[derive(Debug)]
pub(super) struct Grpc {
    /// Fields of a call's head.
    fields: Vec<u8>,
    /// The message before its ids.
    message: Vec<u8>,
    rows_bytes: usize,
}

/// Appends a frame.
fn frame(kind: u8, flags: u8, stream: u32, parts: &[&[u8]], out: &mut Vec<u8>) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    assert!(length <= FRAME_BYTES_MAX, "a frame of {length} bytes");
    let [_, length @ ..] = (length as u32).to_be_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// Appends a string of a head, in plain bytes.
fn text(text: &str, out: &mut Vec<u8>) {
    let Some(length) = u8::try_from(text.len()).ok().filter(|length| *length < 127) else {
        panic!("{text:?} is too long for a head")
    };
    out.push(length);
    out.extend_from_slice(text.as_bytes());
}

/// Appends a number of a message.
fn varint(mut number: usize, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Appends a field of a message.
fn field(tag: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(tag << 3 | 2);
    varint(bytes.len(), out);
    out.extend_from_slice(bytes);
}

impl Grpc {
    pub(super) fn new(target: &Target, shape: Shape) -> Self {
        // POST, http, then path, authority and content type by their numbers in the static table.
        let mut fields = vec![0x83, 0x86, 0x04];
        text("/inference.GRPCInferenceService/ModelInfer", &mut fields);
        fields.push(0x01);
        text(&target.address, &mut fields);
        fields.extend_from_slice(&[0x0f, 0x10]);
        text("application/grpc", &mut fields);
        let mut named = vec![("te", "trailers".to_owned())];
        named.extend(target.timeout_ms.map(|ms| ("grpc-timeout", format!("{ms}m"))));
        for (name, value) in named {
            fields.push(0x00);
            text(name, &mut fields);
            text(&value, &mut fields);
        }
        let (mut message, mut input, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        varint(shape.sample_count, &mut lengths);
        varint(shape.id_count, &mut lengths);
        field(1, b"ids", &mut input);
        field(2, b"INT64", &mut input);
        field(3, &lengths, &mut input);
        field(1, target.model.as_bytes(), &mut message);
        field(5, &input, &mut message);
        // The ids are the last field, raw_input_contents.
        message.push(7 << 3 | 2);
        varint(8 * shape.asked(), &mut message);
        Self { fields, message, rows_bytes: 4 * shape.dim * shape.asked() }
    }
}

impl Peer for Grpc {
    fn ask(&self, number: u32, ids: &[i64], out: &mut Vec<u8>) {
        if number == 0 {
            out.extend_from_slice(PREFACE);
            let no_table = [0, 1, 0, 0, 0, 0];
            let [a, b, c, d] = WINDOW_BYTES_MAX.to_be_bytes();
            frame(SETTINGS, 0, 0, &[&no_table, &[0, 4, a, b, c, d]], out);
            let more = WINDOW_BYTES_MAX - WINDOW_BYTES;
            frame(WINDOW_UPDATE, 0, 0, &[&more.to_be_bytes()], out);
        }
        let stream = 2 * number + 1;
        frame(HEADERS, END_HEADERS, stream, &[&self.fields], out);
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let length = (self.message.len() + ids.len()) as u32;
        let message = [&[0], &length.to_be_bytes()[..], &self.message, &ids].concat();
        let mut rest = &message[..];
        while let Some((part, after)) = rest.split_at_checked(FRAME_BYTES_MAX) {
            frame(DATA, 0, stream, &[part], out);
            rest = after;
        }
        frame(DATA, END_STREAM, stream, &[rest], out);
    }

    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>> {
        let mut rest = bytes;
        while let Some((Frame { kind, flags, payload }, after)) = Frame::cut(rest)? {
            rest = after;
            let is_last = flags & END_STREAM != 0 && matches!(kind, DATA | HEADERS);
            if kind == RST_STREAM || is_last {
                let outcome = if kind == HEADERS { outcome(payload) } else { Outcome::Failed };
                return Ok(Some(Answer { byte_count: bytes.len() - rest.len(), outcome }));
            }
        }
        Ok(None)
    }

    fn rows(&self, answer: &[u8], out: &mut Vec<u8>) {
        let (mut rest, mut message) = (answer, Vec::new());
        while let Ok(Some((Frame { kind, payload, .. }, after))) = Frame::cut(rest) {
            rest = after;
            if kind == DATA {
                message.extend_from_slice(payload);
            }
        }
        // The elements are the last field, raw_output_contents.
        let start = message.len().checked_sub(self.rows_bytes);
        if let Some(rows) =
            start.filter(|at| *at > MESSAGE_HEAD_BYTES).and_then(|at| message.get(at..))
        {
            out.extend_from_slice(rows);
        }
    }
}

struct Frame<'a> {
    kind: u8,
    flags: u8,
    payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Cuts a frame off; `None` while it is not whole.
    fn cut(bytes: &'a [u8]) -> Result<Option<(Self, &'a [u8])>> {
        let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEAD_BYTES>() else {
            return Ok(None);
        };
        let [a, b, c, kind, flags, ..] = *head;
        if kind > 9 {
            return Err(not_protocol("a frame of HTTP/2", bytes));
        }
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let whole = rest.split_at_checked(length);
        Ok(whole.map(|(payload, after)| (Self { kind, flags, payload }, after)))
    }
}

/// Reads the status among the fields behind an answer.
fn outcome(fields: &[u8]) -> Outcome {
    let at = fields.windows(STATUS.len()).position(|name| *name == STATUS);
    let value = at.and_then(|at| fields.get(at + STATUS.len()..));
    // A digit in Huffman's code: OK, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED.
    match value {
        Some([0x81, 0x07, ..]) => Outcome::Good,
        Some([0x81, 0x6b, ..]) => Outcome::Late,
        Some([0x81, 0x7b, ..]) => Outcome::Refused,
        _ => Outcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(timeout_ms: Option<u64>) -> Target {
        let told = serde_json::json!({ "protocol": "grpc", "address": "t:1", "model": "t.rows",
            "timeout_ms": timeout_ms });
        serde_json::from_value(told).unwrap()
    }

    const SHAPE: Shape = Shape {
        row_count: 10,
        dim: 2,
        id_count: 3,
        sample_count: 1,
        skew: 0.0,
        changed_share: 0.0,
    };

    fn trailers(status: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &[&[0x00], &STATUS, status], &mut bytes);
        bytes
    }

    #[test]
    fn a_call_is_a_head_and_a_message_and_the_first_has_a_preface() {
        let peer = Grpc::new(&target(Some(40)), SHAPE);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        peer.ask(0, &[1, 2, 3], &mut first);
        peer.ask(1, &[1, 2, 3], &mut second);
        assert!(first.starts_with(PREFACE) && !second.starts_with(PREFACE));
        let (head, rest) = Frame::cut(&second).unwrap().unwrap();
        assert_eq!((head.kind, head.flags, second[8]), (HEADERS, END_HEADERS, 3));
        assert!(head.payload.ends_with(b"\x0cgrpc-timeout\x0340m"));
        let (data, rest) = Frame::cut(rest).unwrap().unwrap();
        assert_eq!((data.kind, data.flags, rest.len()), (DATA, END_STREAM, 0));
        assert_eq!(data.payload[4] as usize, data.payload.len() - MESSAGE_HEAD_BYTES);
        assert!(data.payload.ends_with(&3_i64.to_le_bytes()));
    }

    #[test]
    fn a_long_message_is_cut_into_frames() {
        let peer = Grpc::new(&target(None), Shape { sample_count: 1_000, ..SHAPE });
        let (mut bytes, ids) = (Vec::new(), [7; 3_000]);
        peer.ask(1, &ids, &mut bytes);
        let (mut rest, mut kinds, mut message) = (&bytes[..], Vec::new(), Vec::new());
        while let Some((Frame { kind, flags, payload }, after)) = Frame::cut(rest).unwrap() {
            rest = after;
            kinds.push((kind, flags));
            if kind == DATA {
                message.extend_from_slice(payload);
            }
        }
        assert_eq!(kinds, [(HEADERS, END_HEADERS), (DATA, 0), (DATA, END_STREAM)]);
        let length = u32::from_be_bytes(message[1..5].try_into().unwrap());
        assert_eq!(length as usize, message.len() - MESSAGE_HEAD_BYTES);
        assert!(message.ends_with(&7_i64.to_le_bytes().repeat(3_000)));
    }

    #[test]
    fn an_answer_is_whole_with_its_trailers_and_its_status_is_read() {
        let peer = Grpc::new(&target(None), SHAPE);
        let rows: Vec<u8> = (0..24).collect();
        let mut bytes = Vec::new();
        frame(SETTINGS, 0, 0, &[], &mut bytes);
        frame(HEADERS, END_HEADERS, 1, &[&[0x88]], &mut bytes);
        frame(DATA, 0, 1, &[&[0, 0, 0, 0, 26], &[7 << 3 | 2, 24], &rows], &mut bytes);
        bytes.extend(trailers(&[0x81, 0x07]));
        for end in 0..bytes.len() {
            assert_eq!(peer.answer(&bytes[..end]).unwrap(), None, "{end}");
        }
        let answer = Answer { byte_count: bytes.len(), outcome: Outcome::Good };
        assert_eq!(peer.answer(&[&bytes[..], b"\0\0"].concat()).unwrap(), Some(answer));
        let mut found = Vec::new();
        peer.rows(&bytes, &mut found);
        assert_eq!(found, rows);
        for (status, outcome) in [
            (&[0x81, 0x6b], Outcome::Late),
            (&[0x81, 0x7b], Outcome::Refused),
            (&[0x82, 0x08], Outcome::Failed),
        ] {
            assert_eq!(peer.answer(&trailers(status)).unwrap().unwrap().outcome, outcome);
        }
        let mut reset = Vec::new();
        frame(RST_STREAM, 0, 1, &[&[0; 4]], &mut reset);
        assert_eq!(peer.answer(&reset).unwrap().unwrap().outcome, Outcome::Failed);
        assert!(peer.answer(b"HTTP/1.1 400 Bad Request\r\n").is_err());
    }
}
