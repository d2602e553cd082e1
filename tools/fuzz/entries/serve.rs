//! Entries of the fuzz targets, compiled into the crate: any bytes that a client sends.
//!
//! Each decodes a request, and answers it where it is one. A client's mistake is refused as such; a
//! failure of the server, or a panic, is a bug.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue};
use tierbed_core::{Budget, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::{EngineChoice, EngineOptions, Folder, MemoryFolder};
use tierbed_snapshot::{Snapshot, SnapshotOptions, SnapshotWriter};
use tokio::sync::watch;

use crate::answer::Refusal;
use crate::body::Buffers;
use crate::coding::{Coding, Inflating};
use crate::generation::Serving;
use crate::grpc::message::Addressed;
use crate::grpc::reply;
use crate::job::{Prepared, HEADER_LENGTH};
use crate::log::{LogLevel, LogOptions, LogTarget};
use crate::oip::head::Parts;
use crate::oip::lookup as oip_lookup;
use crate::oip::request::Encoded;
use crate::options::{Limits, ServeOptions};
use crate::origin::Origin;
use crate::routes::Service;

const BYTES_MAX: usize = 1 << 20;

fn start() -> Result<Service> {
    let table = |name, row_count, dim| TableSchema::plain(name, row_count, dim);
    let schema = Schema::new(vec![table("user", 500, 4), table("item.v2", 1000, 7)])?;
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget)?;
    for row in 0..300 {
        writer.push(TableId(0), RowId(row), &[row as f32; 4])?;
    }
    writer.finish()?;
    let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
    let options = SnapshotOptions { dram_budget_bytes: 2 << 20, engine, ..Default::default() };
    let snapshot = Arc::new(Snapshot::open(folder, &options)?);
    let (target, level) = (LogTarget::Queue(sync_channel(0).0), LogLevel::Off);
    let limits = Limits {
        indices_max: 4096,
        bags_max: 4096,
        answer_bytes_max: BYTES_MAX,
        ..Limits::default()
    };
    let log = LogOptions { level, target, ..LogOptions::default() };
    let options = ServeOptions { log, limits, ..ServeOptions::default() };
    crate::server::service(&options, snapshot, None, watch::channel(false).1)
}

fn with_server(check: impl FnOnce(&Serving<'_>)) {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    let service =
        SERVICE.get_or_init(|| start().unwrap_or_else(|error| panic!("no server: {error}")));
    let serving = service.serving(None).unwrap_or_else(|error| panic!("no generation: {error:?}"));
    check(&serving);
}

/// Answers what was prepared.
fn answer(serving: &Serving<'_>, prepared: std::result::Result<Prepared, Refusal>) {
    let Prepared { mut queries, encode, .. } = match prepared {
        Ok(prepared) => prepared,
        Err(refusal) => {
            assert!(refusal.status().is_client_error(), "{}", refusal.message());
            return;
        }
    };
    for query in &mut queries {
        let looked_up = query.look_up(serving.source());
        looked_up.unwrap_or_else(|error| panic!("checked, and not looked up: {error}"));
    }
    if let Err(refusal) = encode(queries) {
        assert!(refusal.status().is_client_error(), "{}", refusal.message());
    }
}

/// Answers a request twice: decoded, and by its head where that is known by then.
fn answer_oip(serving: &Serving<'_>, encoded: &Encoded) {
    for _ in 0..2 {
        let held = serving.buffers.hold_nothing();
        answer(serving, oip_lookup::prepare(serving, encoded, held));
    }
}

/// A body of the Open Inference Protocol.
pub fn oip_json(bytes: &[u8]) {
    with_server(|serving| {
        let json = Bytes::copy_from_slice(bytes);
        let parts = Parts { json, binary: Bytes::new() };
        let _ = parts.search(&Origin::default());
        answer_oip(serving, &Encoded::Json(parts));
    });
}

/// A body whose tensors lie behind its JSON; the first two bytes say where that ends.
pub fn oip_binary(bytes: &[u8]) {
    let Some((length, body)) = bytes.split_first_chunk::<2>() else { return };
    let length = HeaderValue::from(u16::from_le_bytes(*length));
    let headers = HeaderMap::from_iter([(HEADER_LENGTH, length)]);
    with_server(|serving| {
        let Ok(parts) = Parts::cut(&headers, &Bytes::copy_from_slice(body)) else { return };
        answer_oip(serving, &Encoded::Json(parts));
    });
}

/// A message of `ModelInfer`.
pub fn grpc_infer(bytes: &[u8]) {
    let message = Bytes::copy_from_slice(bytes);
    if let Ok(addressed) = reply::decode::<Addressed>(message.clone()) {
        let _ = addressed.hurry();
        Origin::default().name(&addressed.id);
    }
    with_server(|serving| answer_oip(serving, &Encoded::Message(message)));
}

/// A body of `/v1/lookup`: JSON, or tensors behind a first byte that is no space or brace.
pub fn lookup(bytes: &[u8]) {
    let Some((kind, tensors)) = bytes.split_first() else { return };
    let is_binary = !matches!(kind, b' ' | b'{');
    with_server(|serving| {
        let (source, limits) = (serving.source(), &serving.limits);
        let body = Bytes::copy_from_slice(if is_binary { tensors } else { bytes });
        for _ in 0..2 {
            let held = serving.buffers.hold_nothing();
            answer(serving, crate::lookup::prepare(source, limits, &body, held, is_binary));
        }
    });
}

/// A compressed body; the first two bytes say how, and how large its parts are.
pub fn inflating(bytes: &[u8]) {
    let Some(([coding, part_bytes], body)) = bytes.split_first_chunk::<2>() else { return };
    let coding = if coding % 2 == 0 { Coding::Gzip } else { Coding::Deflate };
    let inflated = |part_bytes: usize| {
        now(async move {
            let mut held = Buffers::new(BYTES_MAX).hold_nothing();
            let mut inflating = Inflating::new(coding, BYTES_MAX);
            for part in body.chunks(part_bytes) {
                inflating.push(part, 0, &mut held).await?;
            }
            inflating.finish()
        })
    };
    let in_parts = inflated(usize::from(*part_bytes) + 1);
    let at_once = inflated(body.len().max(1));
    for refusal in [&in_parts, &at_once].into_iter().filter_map(|found| found.as_ref().err()) {
        assert!(refusal.status().is_client_error(), "{}", refusal.message());
    }
    assert_eq!(in_parts.ok(), at_once.ok(), "parts make no difference");
}

/// Ends a future that waits for nobody.
fn now<T>(future: impl Future<Output = T>) -> T {
    let (mut future, mut cx) = (pin!(future), Context::from_waker(Waker::noop()));
    loop {
        if let Poll::Ready(found) = future.as_mut().poll(&mut cx) {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("serve_oip_json", super::oip_json);
        replay_seeds("serve_oip_binary", super::oip_binary);
        replay_seeds("serve_grpc_infer", super::grpc_infer);
        replay_seeds("serve_lookup", super::lookup);
        replay_seeds("serve_inflating", super::inflating);
    }
}
