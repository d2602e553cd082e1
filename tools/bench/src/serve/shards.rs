//! The rows of the benchmark in shards, by a hash of their ids.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Budget, Error, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder};
use tierbed_snapshot::shards::{
    DividedTable, Division, ShardInfo, ShardMap, ShardsManifest, SHARDS_NAME,
};
use tierbed_snapshot::SnapshotWriter;

use super::rows::{attach_serving, weight, Shape, TABLE};

/// The publish that all shards are of.
const PUBLISH: u64 = 1;

/// What `shards` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardsJob {
    /// New folder of the map and the snapshots.
    out: PathBuf,
    shape: Shape,
    count: u32,
}

/// Writes `shards.json`, and `shard.0`, `shard.1` and so on beside it.
pub(super) fn write(job: &ShardsJob) -> Result<Value> {
    let ShardsJob { out, shape, count } = job;
    shape.check()?;
    let folder = FsFolder::create(out)?;
    let dim = shape.dim as u32;
    let names = (0..*count).map(|shard| format!("shard.{shard}"));
    let table = |row_count| TableSchema::plain(TABLE, row_count, dim);
    let of = |shards| ShardsManifest {
        publish: PUBLISH,
        replicas: 1,
        shards,
        tables: vec![DividedTable {
            name: TABLE.to_owned(),
            row_count: shape.row_count,
            dim,
            divided: Division::Hash,
        }],
    };
    let told = |folder, identity| ShardInfo { folder, identity, file_bytes: 0 };
    let shards = names.clone().map(|name| told(name, String::new()));
    folder.write_atomic(SHARDS_NAME, &of(shards.collect()).encode()?)?;
    let map = ShardMap::open(out)?;
    let mut weights = vec![0.0; shape.dim];
    for (shard, name) in (0..*count).zip(names) {
        let row_count = map.rows_of(TableId(0), shard)?;
        let schema = Schema::new(vec![table(row_count.max(1))])?;
        let own: Arc<dyn Folder> = Arc::new(FsFolder::create(out.join(name))?);
        let mut writer = SnapshotWriter::create(own, &schema, &Budget::unlimited())?;
        for row in 0..row_count {
            let global = map.global_of(TableId(0), shard, row)?.ok_or_else(|| {
                Error::corruption("a shard has a row that the map does not know").with("row", row)
            })?;
            for (column, out) in weights.iter_mut().enumerate() {
                *out = weight(global, 0, column);
            }
            writer.push(TableId(0), RowId(row), &weights)?;
        }
        let tag = json!({ "publish": PUBLISH, "shard": shard, "shard_count": count });
        writer.attach("shard", tag.to_string().as_bytes())?;
        attach_serving(&mut writer, *shape)?;
        writer.finish()?;
    }
    Ok(json!({ "shards": count }))
}
