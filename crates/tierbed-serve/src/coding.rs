//! Codings of bodies and messages: gzip and deflate, within the limits of plain ones.
//!
//! Bytes are inflated as they come. A body that grows beyond `body_bytes_max` is refused there and
//! then, whatever is left of it: a bomb costs no more memory than the largest plain body.

use std::io::{self, Write};

use axum::body::Bytes;
use axum::http::{header, HeaderMap, StatusCode};
use flate2::write::{GzDecoder, GzEncoder, ZlibEncoder};
use flate2::{Compression, Decompress, FlushDecompress, Status};
use tierbed_core::Error;

use crate::answer::Refusal;
use crate::body::Held;
use crate::grpc::reply;

/// Bytes that are inflated in one step.
const STEP_BYTES: usize = 32 << 10;
/// Bytes that are inflated before others have their turn on an async thread.
const TURN_BYTES: usize = 64 << 10;

/// How bytes are made smaller on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    Deflate,
}

impl Coding {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [Self::Gzip, Self::Deflate]
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(name))
    }

    /// Returns how a request's body or messages are coded, by the header of that name.
    ///
    /// # Errors
    /// 415 for a coding that is not taken, or several.
    pub(crate) fn given(headers: &HeaderMap, name: &str) -> Result<Option<Self>, Refusal> {
        let parsed = headers.get(name).map(|found| {
            let word = found.to_str().ok().map(str::trim);
            let known = word.and_then(Self::parse);
            if known.is_some() || word.is_some_and(|word| word.eq_ignore_ascii_case("identity")) {
                return Ok(known);
            }
            let message =
                format!("{name} {found:?} is not taken (expected: gzip, deflate or identity)");
            Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid", message))
        });
        parsed.transpose().map(Option::flatten)
    }

    /// Returns how a client wants its answer: the only coding that `Accept-Encoding` names. HTTP
    /// libraries name all that they can read, by themselves; for these the work would be wasted.
    pub(crate) fn wanted(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(header::ACCEPT_ENCODING)?.to_str().ok()?;
        let mut named = text.split(',').map(|item| item.split(';').map(str::trim));
        let mut accepted = named.by_ref().filter_map(|mut item| {
            let name = item.next().filter(|name| !name.eq_ignore_ascii_case("identity"))?;
            let is_refused = item.any(|parameter| {
                let share = parameter.strip_prefix("q=").and_then(|share| share.parse().ok());
                share == Some(0.0_f32)
            });
            (!is_refused).then_some(name)
        });
        let only = accepted.next()?;
        accepted.next().is_none().then(|| Self::parse(only))?
    }

    /// Tells whether a call's client can read messages of this coding.
    pub(crate) fn is_read(self, headers: &HeaderMap) -> bool {
        let named = headers.get("grpc-accept-encoding").and_then(|value| value.to_str().ok());
        named.is_some_and(|named| {
            named.split(',').any(|name| Self::parse(name.trim()) == Some(self))
        })
    }

    /// Makes bytes smaller, fast rather than well: vectors hardly shrink.
    ///
    /// # Errors
    /// `Io` when the encoder fails.
    pub(crate) fn deflate(self, parts: &[&[u8]]) -> tierbed_core::Result<Vec<u8>> {
        let (out, level) = (Vec::new(), Compression::fast());
        let deflated = match self {
            Self::Gzip => {
                let mut encoder = GzEncoder::new(out, level);
                parts
                    .iter()
                    .try_for_each(|part| encoder.write_all(part))
                    .and_then(|()| encoder.finish())
            }
            Self::Deflate => {
                let mut encoder = ZlibEncoder::new(out, level);
                parts
                    .iter()
                    .try_for_each(|part| encoder.write_all(part))
                    .and_then(|()| encoder.finish())
            }
        };
        deflated.map_err(|cause| Error::os("cannot compress the answer", cause))
    }
}

/// How an encoded answer is packed for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pack {
    /// A body of HTTP.
    Body(Coding),
    /// The message of a call.
    Message(Coding),
}

impl Pack {
    /// Packs the bytes of an answer.
    ///
    /// # Errors
    /// Those of [`Coding::deflate`].
    pub(crate) fn apply(self, bytes: &Bytes) -> tierbed_core::Result<Bytes> {
        let packed = match self {
            Self::Body(coding) => coding.deflate(&[bytes]),
            Self::Message(coding) => reply::deflated(bytes, coding),
        };
        packed.map(Bytes::from)
    }
}

/// Bytes that are being inflated.
#[derive(Debug)]
pub(crate) struct Inflating {
    decoder: Decoder,
    bytes_max: usize,
    /// Bytes inflated since others had their turn.
    turn_bytes: usize,
}

#[derive(Debug)]
enum Decoder {
    Gzip(Box<GzDecoder<Vec<u8>>>),
    Deflate { state: Box<Decompress>, out: Vec<u8>, has_ended: bool },
}

impl Decoder {
    fn len(&self) -> usize {
        match self {
            Self::Gzip(decoder) => decoder.get_ref().len(),
            Self::Deflate { out, .. } => out.len(),
        }
    }

    /// Takes some of `part`, and returns how much; 0 behind the end.
    fn step(&mut self, part: &[u8]) -> io::Result<usize> {
        match self {
            Self::Gzip(decoder) => decoder.write(part),
            Self::Deflate { has_ended: true, .. } => Ok(0),
            Self::Deflate { state, out, has_ended } => {
                let taken = state.total_in();
                out.reserve(STEP_BYTES);
                let status = state.decompress_vec(part, out, FlushDecompress::None)?;
                *has_ended = status == Status::StreamEnd;
                // A part is in memory.
                Ok((state.total_in() - taken) as usize)
            }
        }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip(decoder) => decoder.finish(),
            Self::Deflate { out, has_ended: true, .. } => Ok(out),
            Self::Deflate { .. } => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Inflating {
    pub(crate) fn new(coding: Coding, bytes_max: usize) -> Self {
        let decoder = match coding {
            Coding::Gzip => Decoder::Gzip(Box::new(GzDecoder::new(Vec::new()))),
            Coding::Deflate => {
                let state = Box::new(Decompress::new(true));
                Decoder::Deflate { state, out: Vec::new(), has_ended: false }
            }
        };
        Self { decoder, bytes_max, turn_bytes: 0 }
    }

    /// Inflates some more; `held` holds `before` bytes for others, and the inflated ones.
    ///
    /// # Errors
    /// 413 for more than is allowed, 503 when there is no memory, 400 for bytes of another form.
    pub(crate) async fn push(
        &mut self,
        mut part: &[u8],
        before: usize,
        held: &mut Held,
    ) -> Result<(), Refusal> {
        while !part.is_empty() {
            let len = self.decoder.len();
            let taken = self.decoder.step(part).map_err(|cause| malformed(&cause))?;
            let more = self.decoder.len() - len;
            if taken == 0 && more == 0 {
                return Err(malformed(&"bytes follow the end"));
            }
            (_, part) = part.split_at(taken);
            if self.decoder.len() > self.bytes_max {
                return Err(Refusal::inflated(self.bytes_max));
            }
            held.resize(before + self.decoder.len())?;
            self.turn_bytes += more;
            if self.turn_bytes > TURN_BYTES {
                self.turn_bytes = 0;
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Returns what was inflated.
    ///
    /// # Errors
    /// 400 for bytes that are cut off or damaged, 413 for more than is allowed.
    pub(crate) fn finish(self) -> Result<Bytes, Refusal> {
        let Self { decoder, bytes_max, .. } = self;
        let bytes = decoder.finish().map_err(|cause| malformed(&cause))?;
        match bytes.len() <= bytes_max {
            true => Ok(bytes.into()),
            false => Err(Refusal::inflated(bytes_max)),
        }
    }
}

fn malformed(cause: &dyn std::fmt::Display) -> Refusal {
    Error::invalid("compressed body cannot be read").with("cause", cause).into()
}

#[cfg(test)]
mod tests;
