//! Shards of a small model, each a snapshot in memory, and their files.

#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use std::path::Path;

use tierbed_snapshot::shards::{
    DividedTable, Division, ShardInfo, ShardMap, ShardsManifest, SHARDS_NAME,
};

use super::*;

/// How tables are divided.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ways {
    Hash,
    /// Each table in a way of its own.
    Mixed,
}

/// A model as a whole, and in shards.
pub(super) struct Shards {
    pub(super) whole: Arc<Snapshot>,
    folders: Vec<Arc<dyn Folder>>,
    files: tempfile::TempDir,
}

/// The publish that they are of.
pub(super) const PUBLISH: u64 = 77;

pub(super) fn open(folder: &Arc<dyn Folder>) -> Arc<Snapshot> {
    let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
    let options = SnapshotOptions { dram_budget_bytes: 4 << 20, engine, ..Default::default() };
    Arc::new(Snapshot::open(Arc::clone(folder), &options).unwrap())
}

/// A shard's server listens for gRPC.
pub(super) fn shard_options() -> ServeOptions {
    let patient = limited(|limits| limits.queue_ms_max = 5_000);
    ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..patient }
}

/// What the snapshot of a shard says of itself.
pub(super) fn tag(publish: u64, delta: u64, shard: usize, shard_count: usize) -> String {
    json!({"publish": publish, "delta": delta, "shard": shard, "shard_count": shard_count})
        .to_string()
}

fn manifest(schema: &Schema, shard_count: usize, ways: Ways) -> ShardsManifest {
    let shard = |shard| ShardInfo {
        folder: format!("shard.{shard}"),
        identity: format!("{shard:024x}"),
        file_bytes: 1,
    };
    let last = shard_count as u32 - 1;
    let divide = |at: usize, rows: u64| match (ways, at) {
        (Ways::Hash, _) | (Ways::Mixed, 0) => Division::Hash,
        (Ways::Mixed, 1) => {
            let bounds = (0..=shard_count as u64).map(|bound| bound * rows / shard_count as u64);
            Division::Rows { bounds: bounds.collect() }
        }
        (Ways::Mixed, 2) => Division::Everywhere,
        (Ways::Mixed, _) => Division::Whole { shard: last },
    };
    let tables = schema.tables().iter().enumerate().map(|(at, table)| DividedTable {
        name: table.name.clone(),
        row_count: table.row_count,
        dim: table.dim,
        divided: divide(at, table.row_count),
    });
    ShardsManifest {
        publish: PUBLISH,
        replicas: 1,
        shards: (0..shard_count).map(shard).collect(),
        tables: tables.collect(),
    }
}

impl Shards {
    pub(super) fn new(shard_count: usize, ways: Ways) -> Self {
        let tables = [("user", 500, 4), ("item.v2", 1000, 7), ("site", 30, 5), ("day", 7, 3)];
        let schema = tables.map(|(name, rows, dim)| table(name, rows, dim)).into();
        let schema = Schema::new(schema).unwrap();
        let budget = Budget::new(1 << 20);
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget).unwrap();
        for row in 0..300 {
            writer.push(TableId(0), RowId(row), &[row as f32 + 0.1; 4]).unwrap();
            writer.push(TableId(1), RowId(3 * row), &[row as f32 - 0.7; 7]).unwrap();
        }
        writer.push(TableId(2), RowId(3), &[-0.0; 5]).unwrap();
        writer.finish().unwrap();
        let whole = open(&folder);
        let files = tempfile::tempdir().unwrap();
        let bytes = manifest(&schema, shard_count, ways).encode().unwrap();
        std::fs::write(files.path().join(SHARDS_NAME), bytes).unwrap();
        let map = ShardMap::open(files.path()).unwrap();
        let folders = (0..shard_count).map(|shard| written(&whole, &map, shard)).collect();
        Self { whole, folders, files }
    }

    pub(super) fn path(&self) -> &Path {
        self.files.path()
    }

    pub(super) fn map(&self) -> ShardMap {
        ShardMap::open(self.path()).unwrap()
    }

    /// Opens the snapshot of a shard.
    pub(super) fn open(&self, shard: usize) -> Arc<Snapshot> {
        open(&self.folders[shard])
    }

    pub(super) fn start(&self, shard: usize) -> Server {
        Server::start(&shard_options(), self.open(shard), None).unwrap()
    }

    /// Starts a server of each shard.
    pub(super) fn start_all(&self) -> Vec<Server> {
        (0..self.folders.len()).map(|shard| self.start(shard)).collect()
    }

    /// Names the servers of each shard to gateways.
    pub(super) fn name(&self, servers: &[&[Server]]) {
        let shards = servers.iter().map(|replicas| {
            let addresses = replicas.iter().map(|server| server.grpc_address().unwrap());
            let addresses: Vec<_> =
                addresses.map(|address| format!("{:?}", address.to_string())).collect();
            format!("[[shard]]\nreplicas = [{}]\n", addresses.join(", "))
        });
        let text: String = shards.collect();
        // As an operator should: the file is never seen half written.
        let next = self.path().join("members.next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(next, self.path().join("members.toml")).unwrap();
    }

    /// Returns how a gateway finds a server of each shard.
    pub(super) fn routing(&self, servers: &[Server]) -> GatewayOptions {
        let servers: Vec<_> = servers.chunks(1).collect();
        self.name(&servers);
        let members = self.path().join("members.toml");
        GatewayOptions::new(self.path(), members.to_str().unwrap())
    }

    pub(super) fn gateway(
        &self,
        servers: &[Server],
        change: impl FnOnce(&mut GatewayOptions),
    ) -> Server {
        let mut routing = self.routing(servers);
        change(&mut routing);
        let patient = limited(|limits| limits.queue_ms_max = 5_000);
        let options = ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..patient };
        Server::route(&options, Routing::begin(&routing).unwrap(), None).unwrap()
    }
}

/// Writes the snapshot of a shard: every row that it has, stored in the whole one or not.
fn written(whole: &Snapshot, map: &ShardMap, shard: usize) -> Arc<dyn Folder> {
    let rows_of = |at: usize| map.rows_of(TableId(at as u32), shard as u32).unwrap();
    let tables = whole
        .schema()
        .tables()
        .iter()
        .enumerate()
        .map(|(at, table)| TableSchema { row_count: rows_of(at).max(1), ..table.clone() });
    let schema = Schema::new(tables.collect()).unwrap();
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget).unwrap();
    for at in 0..whole.schema().tables().len() {
        let table = TableId(at as u32);
        for row in 0..rows_of(at) {
            let global = map.global_of(table, shard as u32, row).unwrap().unwrap();
            let bags = Bags {
                indices: &[global as i64],
                offsets: &[0, 1],
                weights: None,
                feature_count: 1,
            };
            let weights = direct(whole, at as u32, Pooling::None, &bags);
            writer.push(table, RowId(row), &weights).unwrap();
        }
    }
    let tag = tag(PUBLISH, 0, shard, map.shard_count() as usize);
    writer.attach("shard", tag.as_bytes()).unwrap();
    writer.finish().unwrap();
    folder
}
