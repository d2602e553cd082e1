//! The program as a gateway, before itself as the servers of two shards.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kit::{command, element, run, Running};
use tierbed_core::{Budget, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_snapshot::shards::{
    DividedTable, Division, ShardInfo, ShardMap, ShardsManifest, SHARDS_NAME,
};
use tierbed_snapshot::SnapshotWriter;

const ROWS: u64 = 1000;
const DIM: u32 = 4;

/// Writes a table `item` in two shards.
fn write_shards(folder: &Path) {
    let shard = |shard: u32| ShardInfo {
        folder: format!("shard.{shard}"),
        identity: shard.to_string(),
        file_bytes: 1,
    };
    let divided = Division::Hash;
    let table = DividedTable { name: "item".to_owned(), row_count: ROWS, dim: DIM, divided };
    let manifest = ShardsManifest {
        publish: 5,
        replicas: 1,
        shards: (0..2).map(shard).collect(),
        tables: vec![table],
    };
    fs::write(folder.join(SHARDS_NAME), manifest.encode().unwrap()).unwrap();
    let map = ShardMap::open(folder).unwrap();
    for shard in 0..2 {
        let row_count = map.rows_of(TableId(0), shard).unwrap();
        let schema = Schema::new(vec![TableSchema::plain("item", row_count, DIM)]).unwrap();
        let out = Arc::new(FsFolder::create(folder.join(format!("shard.{shard}"))).unwrap());
        let mut writer = SnapshotWriter::create(out, &schema, &Budget::new(64 << 20)).unwrap();
        for row in 0..row_count {
            let id = map.global_of(TableId(0), shard, row).unwrap().unwrap();
            let weights: Vec<f32> = (0..DIM).map(|at| element(id, at)).collect();
            writer.push(TableId(0), RowId(row), &weights).unwrap();
        }
        let tag = format!(r#"{{"publish": 5, "shard": {shard}, "shard_count": 2}}"#);
        writer.attach("shard", tag.as_bytes()).unwrap();
        writer.finish().unwrap();
    }
}

fn grpc_of(server: &Running) -> &str {
    server.line.split("grpc://").nth(1).unwrap().trim()
}

#[test]
fn a_gateway_is_told_by_route_and_members() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path());
    let shards: Vec<_> = (0..2)
        .map(|shard| {
            let place = folder.path().join(format!("shard.{shard}"));
            Running::start(&place, &["--grpc-address", "127.0.0.1:0"])
        })
        .collect();
    let members = folder.path().join("members.toml");
    let named = shards.iter().map(|it| format!("[[shard]]\nreplicas = [\"{}\"]\n", grpc_of(it)));
    fs::write(&members, named.collect::<String>()).unwrap();
    let (route, members) = (folder.path().to_str().unwrap(), members.to_str().unwrap());
    let words = ["--route", route, "--members", members, "--address", "127.0.0.1:0"];
    let gateway = Running::of(&mut command(&words));
    let ids = [0, 7, 8, 9, 998, 999];
    let (status, body) = gateway.lookup(&ids);
    assert_eq!(status, 200, "{body}");
    let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
    for (bag, row) in ids.into_iter().enumerate() {
        for at in 0..DIM {
            let found = answer["features"]["item"][bag][at as usize].as_f64().unwrap();
            assert_eq!(found as f32, element(row, at), "row {row}, element {at}");
        }
    }
    assert_eq!(gateway.get("/readyz").0, 200);
    for (words, remedy) in [
        (&["--route", route][..], "give route and members together"),
        (&["ads", "--route", route, "--members", members], "leave out one of SNAPSHOT and --route"),
        (&["--route", route, "--members", "dns:rows:1"], "dns:rows-{shard}"),
    ] {
        let (code, _, told) = run(words);
        assert!(code == 2 && told.contains(remedy), "{told}");
    }
}
