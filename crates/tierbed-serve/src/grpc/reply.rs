//! Messages of gRPC: five bytes before each, and trailers behind the last.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{header, HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use hyper::body::Frame;
use prost::bytes::{Buf, BufMut};
use prost::Message;
use tierbed_core::{Error, Result};

use super::message::TYPE;
use crate::answer::Refusal;

/// Bytes before a message: whether it is compressed, and its length.
const FRAME_BYTES: usize = 5;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Appends the bytes before a message.
pub(super) fn begin(message_bytes: usize, out: &mut Vec<u8>) {
    let Ok(length) = u32::try_from(message_bytes) else {
        panic!("an answer of {message_bytes} bytes was not refused");
    };
    out.put_u8(0);
    out.put_u32(length);
}

/// Takes the only message out of a body.
///
/// # Errors
/// 501 for a compressed one, 400 for none, several, or one that is cut off.
pub(super) fn message(mut body: Bytes) -> std::result::Result<Bytes, Refusal> {
    let malformed = |found: usize| {
        let error = Error::invalid("body must hold one message").with("body_bytes", found);
        Refusal::from(error)
    };
    if body.len() < FRAME_BYTES {
        return Err(malformed(body.len()));
    }
    let (is_compressed, length) = (body.get_u8() != 0, body.get_u32());
    if is_compressed {
        let message = "compressed messages are not taken; send them as they are";
        return Err(Refusal::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message));
    }
    match usize::try_from(length) == Ok(body.len()) {
        true => Ok(body),
        false => Err(malformed(FRAME_BYTES + body.len())),
    }
}

/// Decodes a message.
///
/// # Errors
/// `Invalid` for bytes that are none.
pub(super) fn decode<M: Message + Default>(message: Bytes) -> Result<M> {
    M::decode(message).map_err(|cause| Error::invalid("message is malformed").with("cause", cause))
}

/// Answers with a message.
pub(super) fn told(message: &impl Message) -> Response {
    let mut bytes = Vec::with_capacity(FRAME_BYTES + message.encoded_len());
    begin(message.encoded_len(), &mut bytes);
    bytes.extend_from_slice(&message.encode_to_vec());
    whole(bytes.into())
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
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(STATUS, HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
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
        let of = |bytes: &[u8]| message(Bytes::copy_from_slice(bytes));
        assert_eq!(of(&framed).unwrap(), Bytes::from("abc"));
        assert_eq!(of(b"\0\0\0\0\0").unwrap(), Bytes::new());
        for bad in [&b""[..], b"\0\0\0\0", &framed[..7], &[&framed[..], b"d"].concat()] {
            assert_eq!(of(bad).unwrap_err().status(), StatusCode::BAD_REQUEST, "{bad:?}");
        }
        framed[0] = 1;
        assert_eq!(of(&framed).unwrap_err().status(), StatusCode::NOT_IMPLEMENTED);
    }
}
