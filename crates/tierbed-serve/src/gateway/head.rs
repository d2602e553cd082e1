//! All of a generation but its rows, as a shard tells it: tables, features, attachments.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tierbed_core::{Budget, Error, Result, Schema, TableSchema};
use tierbed_io::{EngineChoice, EngineOptions, Folder, MemoryFolder};
use tierbed_snapshot::shards::ShardMap;
use tierbed_snapshot::{Snapshot, SnapshotOptions, SnapshotWriter};
use tonic::Status;

use super::pool::{Lost, Shard};
use super::replica::Replica;
use crate::grpc::shard_pb::{
    AttachmentRequest, AttachmentResponse, DescribeRequest, DescribeResponse,
};

const DESCRIBE: &str = "/tierbed.shard.v1.Shards/Describe";
const ATTACHMENT: &str = "/tierbed.shard.v1.Shards/Attachment";
/// Longest time for one question.
const TIME: Duration = Duration::from_secs(30);
/// Memory for the snapshot that holds attachments; it has no rows.
const BUDGET_BYTES: u64 = 16 << 20;

/// What a shard tells of a generation.
#[derive(Debug)]
pub(super) struct Head {
    /// The attachments, and tables of a row each.
    pub(super) snapshot: Arc<Snapshot>,
    /// The tables, with the rows of the whole model.
    pub(super) schema: Schema,
    /// A feature for each table.
    pub(super) features: Vec<Option<String>>,
    /// The model of lookups.
    pub(super) model: String,
}

impl Head {
    /// Asks a server of `shard` for the generation of `identity`, whose rows lie as `map` says.
    ///
    /// # Errors
    /// `Closed` when no server answers, `Invalid` when its tables are not those of the map.
    pub(super) async fn fetch(shard: &Shard, identity: &str, map: &ShardMap) -> Result<Self> {
        let mut last = Lost::NoReplica.error(shard.number());
        for replica in shard.replicas() {
            if !replica.is_live() || !replica.has(identity) {
                continue;
            }
            match Self::of(&replica, identity, map).await {
                Ok(head) => return Ok(head),
                Err(Failed::Wrong(error)) => return Err(error),
                Err(Failed::Lost(status)) => last = Lost::Failed(status).error(shard.number()),
            }
        }
        Err(last)
    }

    async fn of(
        replica: &Replica,
        identity: &str,
        map: &ShardMap,
    ) -> std::result::Result<Self, Failed> {
        let generation = identity.to_owned();
        let described: DescribeResponse =
            replica.ask(DESCRIBE, DescribeRequest { generation }, TIME).await?;
        let told: Schema = serde_json::from_str(&described.schema).map_err(|cause| {
            Error::corruption("a shard told of tables in another form").with("cause", cause)
        })?;
        let schema = whole(&told, map)?;
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let small = |table: &TableSchema| TableSchema { row_count: 1, ..table.clone() };
        let small = Schema::new(schema.tables().iter().map(small).collect())?;
        let mut writer =
            SnapshotWriter::create(Arc::clone(&folder), &small, &Budget::new(BUDGET_BYTES))?;
        for attachment in &described.attachments {
            let bytes = attached(replica, identity, &attachment.name, attachment.bytes).await?;
            writer.attach(&attachment.name, &bytes)?;
        }
        writer.finish()?;
        let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
        let options = SnapshotOptions {
            dram_budget_bytes: BUDGET_BYTES,
            engine,
            reader_count: 1,
            ..SnapshotOptions::default()
        };
        let snapshot = Arc::new(Snapshot::open(folder, &options)?);
        let mut of_table = HashMap::new();
        for feature in described.features {
            of_table.entry(feature.table).or_insert(feature.name);
        }
        let features = schema.tables().iter().map(|table| of_table.remove(&table.name)).collect();
        Ok(Self { snapshot, schema, features, model: replica.seen().model.clone() })
    }
}

/// Why a server told nothing.
enum Failed {
    Lost(Status),
    Wrong(Error),
}

impl From<Status> for Failed {
    fn from(status: Status) -> Self {
        Self::Lost(status)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Wrong(error)
    }
}

/// Returns the tables with the rows of all shards.
fn whole(told: &Schema, map: &ShardMap) -> Result<Schema> {
    let divided = map.tables().iter();
    let is_same = told.tables().len() == map.tables().len()
        && divided
            .clone()
            .zip(told.tables())
            .all(|(divided, told)| (&divided.name, divided.dim) == (&told.name, told.dim));
    if !is_same {
        return Err(Error::invalid("shards.json is of other tables than the shards")
            .with("publish", map.publish())
            .with("remedy", "give the shards.json that was published with the shards"));
    }
    let tables = divided
        .zip(told.tables())
        .map(|(divided, told)| TableSchema { row_count: divided.row_count, ..told.clone() });
    Schema::new(tables.collect())
}

/// Fetches an attachment, part by part.
async fn attached(
    replica: &Replica,
    generation: &str,
    name: &str,
    bytes: u64,
) -> std::result::Result<Vec<u8>, Failed> {
    let mut found = Vec::new();
    while (found.len() as u64) < bytes {
        let question = AttachmentRequest {
            generation: generation.to_owned(),
            name: name.to_owned(),
            offset: found.len() as u64,
        };
        let AttachmentResponse { part } = replica.ask(ATTACHMENT, question, TIME).await?;
        if part.is_empty() {
            let error = Error::corruption("an attachment of a shard ends too early");
            return Err(error.with("name", name).with("bytes", bytes).into());
        }
        found.extend_from_slice(&part);
    }
    Ok(found)
}
