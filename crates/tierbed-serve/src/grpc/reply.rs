//! Messages of gRPC: five bytes before each, and trailers behind the last.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{header, HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use hyper::body::Frame;
use prost::bytes::{Buf, BufMut};
use prost::encoding::{encode_key, encode_varint, encoded_len_varint, key_len, WireType};
use prost::Message;
use tierbed_core::{Error, Result};

use super::message::TYPE;
use super::pb::{ModelInferResponse, ModelStreamInferResponse};
use crate::answer::Refusal;
use crate::body::Held;
use crate::coding::{Coding, Inflating};

/// Bytes before a message: whether it is compressed, and its length.
pub(super) const FRAME_BYTES: usize = 5;
/// The field `infer_response` of an answer within a stream.
const INFER_RESPONSE: u32 = 2;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Appends the bytes before a message.
pub(super) fn begin(message_bytes: usize, out: &mut Vec<u8>) {
    frame(false, message_bytes, out);
}

fn frame(is_compressed: bool, message_bytes: usize, out: &mut Vec<u8>) {
    let Ok(length) = u32::try_from(message_bytes) else {
        panic!("an answer of {message_bytes} bytes was not refused");
    };
    out.put_u8(u8::from(is_compressed));
    out.put_u32(length);
}

/// What comes before a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) is_compressed: bool,
    pub(super) length: usize,
}

impl Head {
    /// Reads it where it is whole.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (mut head, _) = bytes.split_at_checked(FRAME_BYTES)?;
        Some(Self { is_compressed: head.get_u8() != 0, length: head.get_u32() as usize })
    }
}

/// A message as it came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Framed {
    pub(super) is_compressed: bool,
    pub(super) bytes: Bytes,
}

impl Framed {
    /// Takes the only message out of a body.
    ///
    /// # Errors
    /// `Invalid` for none, several, or one that is cut off.
    pub(super) fn only(body: &Bytes) -> Result<Self> {
        match Head::read(body) {
            Some(Head { is_compressed, length }) if FRAME_BYTES + length == body.len() => {
                Ok(Self { is_compressed, bytes: body.slice(FRAME_BYTES..) })
            }
            _ => Err(Error::invalid("body must hold one message").with("body_bytes", body.len())),
        }
    }

    /// Inflates the message where it is compressed.
    ///
    /// # Errors
    /// 400 where the call names no coding, and those of [`Inflating`].
    pub(super) async fn plain(
        self,
        bytes_max: usize,
        coding: Option<Coding>,
        held: &mut Held,
    ) -> std::result::Result<Bytes, Refusal> {
        let Self { is_compressed, bytes } = self;
        if !is_compressed {
            return Ok(bytes);
        }
        let Some(coding) = coding else {
            let message = "message is compressed, but grpc-encoding names no coding";
            return Err(Error::invalid(message).into());
        };
        let mut inflating = Inflating::new(coding, bytes_max);
        inflating.push(&bytes, bytes.len(), held).await?;
        let plain = inflating.finish()?;
        held.resize(plain.len())?;
        Ok(plain)
    }
}

/// Compresses an answer of one message.
///
/// # Errors
/// Those of [`Coding::deflate`].
pub(crate) fn deflated(answer: &[u8], coding: Coding) -> Result<Vec<u8>> {
    let (_, message) = answer.split_at(FRAME_BYTES);
    let message = coding.deflate(&[message])?;
    let mut bytes = Vec::with_capacity(FRAME_BYTES + message.len());
    frame(true, message.len(), &mut bytes);
    bytes.extend_from_slice(&message);
    Ok(bytes)
}

/// Decodes a message.
///
/// # Errors
/// `Invalid` for bytes that are none.
pub(crate) fn decode<M: Message + Default>(message: Bytes) -> Result<M> {
    M::decode(message).map_err(|cause| Error::invalid("message is malformed").with("cause", cause))
}

fn framed(message: &impl Message) -> Bytes {
    let mut bytes = Vec::with_capacity(FRAME_BYTES + message.encoded_len());
    begin(message.encoded_len(), &mut bytes);
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.into()
}

/// Answers with a message.
pub(super) fn told(message: &impl Message) -> Response {
    whole(framed(message))
}

/// Makes an answer of one message to one of a stream: what comes before it, and itself.
pub(super) fn within_stream(answer: &Bytes) -> [Bytes; 2] {
    let message = answer.slice(FRAME_BYTES..);
    let message_bytes = message.len() as u64;
    let before_bytes = key_len(INFER_RESPONSE) + encoded_len_varint(message_bytes);
    let mut before = Vec::with_capacity(FRAME_BYTES + before_bytes);
    begin(before_bytes + message.len(), &mut before);
    encode_key(INFER_RESPONSE, WireType::LengthDelimited, &mut before);
    encode_varint(message_bytes, &mut before);
    [before.into(), message]
}

/// Makes the answer to a refused request of a stream: its error, and its id as Triton tells it.
pub(super) fn refused_in_stream(id: String, message: &str) -> Bytes {
    framed(&ModelStreamInferResponse {
        error_message: message.to_owned(),
        infer_response: Some(ModelInferResponse { id, ..ModelInferResponse::default() }),
    })
}

/// Makes what ends a call that went well.
pub(super) fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, HeaderValue::from_static("0"));
    trailers
}

/// Answers with a message and the bytes before it.
pub(super) fn whole(bytes: Bytes) -> Response {
    let mut response = Response::new(Body::new(Whole { bytes, has_ended: false }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(TYPE));
    response
}

/// An answer that went well.
#[derive(Debug)]
struct Whole {
    bytes: Bytes,
    has_ended: bool,
}

impl hyper::body::Body for Whole {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        if !self.bytes.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.bytes)))));
        }
        if std::mem::replace(&mut self.has_ended, true) {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_holds_one_message() {
        let mut framed = Vec::new();
        begin(3, &mut framed);
        framed.extend_from_slice(b"abc");
        assert_eq!(framed, b"\0\0\0\0\x03abc");
        let of = |bytes: &[u8]| Framed::only(&Bytes::copy_from_slice(bytes));
        let plain = |bytes: &'static [u8]| Framed { is_compressed: false, bytes: bytes.into() };
        assert_eq!(of(&framed).unwrap(), plain(b"abc"));
        assert_eq!(of(b"\0\0\0\0\0").unwrap(), plain(b""));
        for bad in [&b""[..], b"\0\0\0\0", &framed[..7], &[&framed[..], b"d"].concat()] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
        framed[0] = 1;
        assert_eq!(of(&framed).unwrap(), Framed { is_compressed: true, ..plain(b"abc") });
    }
}
