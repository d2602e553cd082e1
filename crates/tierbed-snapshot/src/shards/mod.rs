//! Shards: one publish as several snapshots, and the map that says which has a row.
//!
//! A model that is larger than a host is divided: each shard is a snapshot of its own, whose rows
//! are numbered through from 0. `shards.json` beside them says how each table is divided.
//!
//! ```text
//! table, ids ─▶ ShardMap ─▶ shard and row of each ─▶ one lookup per shard ─▶ rows in order
//! ```
//!
//! Normative text: docs/reference/formats/shards.md.

mod either;
mod manifest;
mod map;
mod pages;
mod plan;
mod row_map;
mod row_shards;
mod scatter;
mod split;
mod writer;

#[cfg(any(test, fuzzing))]
pub(crate) use manifest::TEXT;

pub use either::PublishWriter;
pub use manifest::{
    DividedTable, Division, ShardInfo, ShardsManifest, PUBLISH_END, SHARDS_MAX, SHARDS_NAME,
    SHARDS_VERSION,
};
pub use map::{Located, ShardMap};
pub use plan::{DivideBy, PlacedShards, ShardPlan};
pub use row_shards::RowShards;
pub use split::{ShardPart, Split, TablePart};
pub use writer::{ShardOf, ShardsWriter, SHARD_ATTACHMENT};

#[cfg(test)]
mod tests;
