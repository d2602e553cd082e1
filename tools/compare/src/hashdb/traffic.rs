//! How do many buckets come in at once? Sorted by place, as many in flight as there are buffers.

use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Completion, IoEngine, Op, Request, PAGE_BYTES};

use super::bucket::BucketId;
use super::files::BucketFiles;
use super::index::Place;

/// A bucket to read: its name, its place, and a number that comes back with it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) id: BucketId,
    pub(crate) place: Place,
    pub(crate) tag: usize,
}

/// Takes the buckets of one sweep, in any order: the request and the bytes as read.
pub(crate) type BucketSink<'a> = dyn FnMut(Wanted, &[u8]) -> Result<()> + 'a;

/// Reads buckets and hands each to `sink`; returns the pages read.
///
/// # Errors
/// `Io`; errors of the sink pass through. Nothing flies afterwards.
pub(crate) fn read_buckets(
    wanted: &[Wanted],
    files: &BucketFiles,
    engine: &mut dyn IoEngine,
    sink: &mut BucketSink<'_>,
) -> Result<u64> {
    let mut done: Vec<Completion> = Vec::new();
    let mut next = wanted.iter().enumerate();
    let (mut result, mut pages) = (Ok(()), 0);
    let mut long = None;
    loop {
        // A read that does not fit a buffer waits until nothing flies.
        while long.is_none() && result.is_ok() {
            let Some(buf) = engine.acquire() else { break };
            let Some((at, bucket)) = next.next() else {
                engine.release(buf);
                break;
            };
            let len_bytes = bucket.place.page_count() * PAGE_BYTES;
            pages += bucket.place.page_count() as u64;
            match files.get(bucket.place.file()) {
                Err(error) => result = Err(error),
                Ok(_) if len_bytes > engine.buf_bytes() => long = Some(*bucket),
                Ok(file) => {
                    engine.submit(Request {
                        device: file.device_id,
                        op: Op::Read,
                        offset_bytes: bucket.place.offset_bytes(),
                        len_bytes: len_bytes as u32,
                        buf,
                        tag: at as u64,
                    });
                    continue;
                }
            }
            engine.release(buf);
        }
        if engine.in_flight_count() == 0 {
            match (long.take(), &result) {
                (Some(bucket), Ok(())) => {
                    result = read_long(bucket, files, sink);
                    continue;
                }
                _ => return result.map(|()| pages),
            }
        }
        engine.wait(&mut done)?;
        for completion in done.drain(..) {
            let bucket = wanted.get(completion.tag as usize);
            if result.is_ok() {
                result = completion.result.and_then(|()| {
                    let bucket = bucket.ok_or_else(|| Error::invalid("unknown tag"))?;
                    let len_bytes = bucket.place.page_count() * PAGE_BYTES;
                    sink(*bucket, engine.bytes(completion.buf).get(..len_bytes).unwrap_or(&[]))
                });
            }
            engine.release(completion.buf);
        }
    }
}

fn read_long(bucket: Wanted, files: &BucketFiles, sink: &mut BucketSink<'_>) -> Result<()> {
    let mut bytes = AlignedBuf::new(bucket.place.page_count() * PAGE_BYTES);
    files.get(bucket.place.file())?.device.read_at(bucket.place.offset_bytes(), &mut bytes)?;
    sink(bucket, &bytes)
}
