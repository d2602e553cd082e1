//! Request bodies: bounded reception into memory that all requests share.
//!
//! A body takes memory as its bytes come, never by what its head announces: who sends nothing
//! holds nothing. The first 64 KiB of every body and answer are always there, so that small
//! requests find room while large ones fill the rest.

use std::io::ErrorKind::{InvalidData, InvalidInput};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::{header, HeaderMap, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::answer::Refusal;
use crate::coding::{Coding, Inflating};
use crate::options::Limits;
use crate::timed::until;
use crate::wire::Pulse;

/// Bytes of every body and answer that count for nothing.
pub(crate) const FREE_BYTES: usize = 64 << 10;
/// Memory is counted in units of this many bytes.
const UNIT_BYTES: usize = 4 << 10;

/// Memory for bodies and answers beyond their first bytes.
#[derive(Debug, Clone)]
pub(crate) struct Buffers {
    units: Arc<Semaphore>,
    unit_count: usize,
}

/// Memory that a body or an answer takes; given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    buffers: Buffers,
    permit: Option<OwnedSemaphorePermit>,
}

impl Buffers {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let unit_count = bytes_max.div_ceil(UNIT_BYTES).clamp(1, u32::MAX as usize);
        let unit_count = unit_count.min(Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(unit_count)), unit_count }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        let used = self.unit_count.saturating_sub(self.units.available_permits());
        (used * UNIT_BYTES) as u64
    }

    pub(crate) fn hold_nothing(&self) -> Held {
        Held { buffers: self.clone(), permit: None }
    }
}

impl Held {
    /// Takes or gives back memory, so that `bytes` are held.
    ///
    /// # Errors
    /// 503 when there is not enough left.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Refusal> {
        let wanted = bytes.saturating_sub(FREE_BYTES).div_ceil(UNIT_BYTES);
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if wanted <= held {
            if let Some(permit) = &mut self.permit {
                drop(permit.split(held - wanted));
            }
            return Ok(());
        }
        let missing = u32::try_from(wanted - held).ok();
        let more = missing.and_then(|missing| {
            Arc::clone(&self.buffers.units).try_acquire_many_owned(missing).ok()
        });
        let Some(more) = more else {
            return Err(Refusal::busy("buffers", "no memory for more bodies now; try again later"));
        };
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

/// A body that has arrived.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Bytes,
    pub(crate) held: Held,
}

/// A body that comes in parts: from the router, or from the connection itself.
pub(crate) trait Coming:
    HttpBody<Data = Bytes, Error: std::error::Error + 'static> + Unpin
{
}

impl<B: HttpBody<Data = Bytes, Error: std::error::Error + 'static> + Unpin> Coming for B {}

/// A request whose head has come.
pub(crate) struct Arriving<'a, B> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: B,
    /// That of its connection.
    pub(crate) pulse: Option<&'a Pulse>,
}

/// Reads a request's body, and inflates it where it is compressed.
///
/// # Errors
/// 413 for a body larger than allowed, at once where the head says so; 415 for an unknown coding;
/// 408 for one that comes too slowly; 503 when there is no memory; 499 when the client leaves.
pub(crate) async fn receive(
    limits: &Limits,
    buffers: &Buffers,
    arriving: Arriving<'_, impl Coming>,
) -> Result<Received, Refusal> {
    let Arriving { headers, mut body, pulse } = arriving;
    let coding = Coding::given(headers, header::CONTENT_ENCODING.as_str())?;
    let announced = body.size_hint().exact();
    if announced.is_some_and(|bytes| bytes > limits.body_bytes_max as u64) {
        let found = announced.unwrap_or_default();
        return Err(Refusal::body_too_large(found, limits.body_bytes_max));
    }
    let mut held = buffers.hold_nothing();
    let mut parts = Parts::default();
    let mut inflating = coding.map(|coding| Inflating::new(coding, limits.body_bytes_max));
    let end = Instant::now() + Duration::from_millis(limits.body_ms_max);
    while let Some(part) = next_part(&mut body, limits, end).await? {
        if let Some(inflating) = &mut inflating {
            inflating.push(&part, 0, &mut held).await?;
            continue;
        }
        let byte_count = parts.byte_count() + part.len();
        if byte_count > limits.body_bytes_max {
            let found = format_args!("more than {}", limits.body_bytes_max);
            return Err(Refusal::body_too_large(found, limits.body_bytes_max));
        }
        held.resize(byte_count)?;
        parts.push(part);
    }
    if let Some(pulse) = pulse {
        pulse.body_is_read();
    }
    let bytes = inflating.map_or_else(|| Ok(parts.whole()), Inflating::finish)?;
    Ok(Received { bytes, held })
}

/// Returns the next part of a body, and `None` behind the last.
///
/// # Errors
/// 400 for chunks that are not HTTP, 499 when the client leaves.
pub(crate) async fn part(body: &mut impl Coming) -> Result<Option<Bytes>, Refusal> {
    loop {
        match std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            Some(Err(error)) => return Err(broken(&error)),
            // Trailers carry nothing for us.
            Some(Ok(frame)) => {
                if let Ok(part) = frame.into_data() {
                    return Ok(Some(part));
                }
            }
        }
    }
}

/// Returns the next part of a body that must be whole at its `end`.
///
/// # Errors
/// Those of [`part`]; 408 for one that comes too slowly.
pub(crate) async fn next_part(
    body: &mut impl Coming,
    limits: &Limits,
    end: Instant,
) -> Result<Option<Bytes>, Refusal> {
    let idle_end = Instant::now() + Duration::from_millis(limits.body_idle_ms_max);
    until(end.min(idle_end), part(body)).await.unwrap_or_else(|| {
        Err(Refusal::slow(if end < idle_end {
            format!("body did not arrive within {} ms", limits.body_ms_max)
        } else {
            format!("nothing came of the body for {} ms", limits.body_idle_ms_max)
        }))
    })
}

/// Tells a client that has left from one whose chunks are not HTTP, and who waits to hear of it.
fn broken(error: &(dyn std::error::Error + 'static)) -> Refusal {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let is_malformed = causes.any(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|cause| matches!(cause.kind(), InvalidInput | InvalidData))
    });
    match is_malformed {
        true => Refusal::new(StatusCode::BAD_REQUEST, "invalid", "the body's chunks are not HTTP"),
        false => Refusal::left(),
    }
}

/// A body that comes in parts; the usual lone part is never copied.
#[derive(Debug, Default)]
struct Parts {
    first: Bytes,
    all: Vec<u8>,
}

impl Parts {
    fn byte_count(&self) -> usize {
        self.first.len().max(self.all.len())
    }

    fn push(&mut self, part: Bytes) {
        if self.first.is_empty() && self.all.is_empty() {
            self.first = part;
            return;
        }
        if self.all.is_empty() {
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&part);
    }

    fn whole(self) -> Bytes {
        if self.all.is_empty() {
            self.first
        } else {
            self.all.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_beyond_the_first_bytes_and_given_back() {
        let buffers = Buffers::new(1 << 20);
        let mut first = buffers.hold_nothing();
        first.resize(FREE_BYTES).unwrap();
        assert_eq!(buffers.used_bytes(), 0);
        first.resize(FREE_BYTES + (1 << 20)).unwrap();
        assert_eq!(buffers.used_bytes(), 1 << 20);
        let mut second = buffers.hold_nothing();
        second.resize(FREE_BYTES).unwrap();
        assert_eq!(second.resize(FREE_BYTES + 1).unwrap_err().reason(), Some("buffers"));
        first.resize(FREE_BYTES + UNIT_BYTES).unwrap();
        assert_eq!(buffers.used_bytes(), UNIT_BYTES as u64);
        second.resize((1 << 20) - UNIT_BYTES).unwrap();
        drop((first, second));
        assert_eq!(buffers.used_bytes(), 0);
    }

    #[test]
    fn parts_make_the_whole() {
        let mut parts = Parts::default();
        for part in ["one ", "two ", "three"] {
            parts.push(Bytes::from_static(part.as_bytes()));
        }
        assert_eq!((parts.byte_count(), parts.whole()), (13, Bytes::from("one two three")));
    }
}
