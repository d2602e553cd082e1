//! Messages of a call that sends many, as they come.

use axum::body::{Body, Bytes};
use prost::bytes::BytesMut;
use tierbed_core::Error;
use tokio::time::{Duration, Instant};

use super::reply::{Framed, Head, FRAME_BYTES};
use crate::answer::Refusal;
use crate::body::{next_part, part, Held};
use crate::options::Limits;

/// The body of a call, cut into its messages.
#[derive(Debug)]
pub(super) struct Messages {
    body: Body,
    /// What has come of the next message, and perhaps of those behind it.
    bytes: BytesMut,
}

impl Messages {
    pub(super) fn new(body: Body) -> Self {
        Self { body, bytes: BytesMut::new() }
    }

    /// Returns the next message, and `None` behind the last. Before a message a client may be
    /// silent; within one it has the time of a body.
    ///
    /// # Errors
    /// 413 for a message larger than allowed, 408 for one that comes too slowly, 400 for one that
    /// is cut off, 503 when there is no memory, 499 when the client leaves.
    pub(super) async fn next(
        &mut self,
        limits: &Limits,
        held: &mut Held,
    ) -> Result<Option<Framed>, Refusal> {
        while self.bytes.is_empty() {
            match part(&mut self.body).await? {
                Some(part) => self.bytes.extend_from_slice(&part),
                None => return Ok(None),
            }
        }
        let end = Instant::now() + Duration::from_millis(limits.body_ms_max);
        loop {
            if let Some(framed) = self.take(limits)? {
                held.resize(framed.bytes.len())?;
                return Ok(Some(framed));
            }
            held.resize(self.bytes.len())?;
            match next_part(&mut self.body, limits, end).await? {
                Some(part) => self.bytes.extend_from_slice(&part),
                None => {
                    let error = Error::invalid("the last message is cut off");
                    return Err(error.with("found_bytes", self.bytes.len()).into());
                }
            }
        }
    }

    /// Takes the first message where it is whole.
    fn take(&mut self, limits: &Limits) -> Result<Option<Framed>, Refusal> {
        let Some(Head { is_compressed, length }) = Head::read(&self.bytes) else { return Ok(None) };
        if length > limits.body_bytes_max {
            return Err(Refusal::body_too_large(length, limits.body_bytes_max));
        }
        if self.bytes.len() < FRAME_BYTES + length {
            return Ok(None);
        }
        let mut bytes: Bytes = self.bytes.split_to(FRAME_BYTES + length).freeze();
        Ok(Some(Framed { is_compressed, bytes: bytes.split_off(FRAME_BYTES) }))
    }
}
