//! Immutable serving snapshots: pages of rows, and lookups that read few of them.
//!
//! A snapshot is a folder written once and read by lookups: rows on 4 KiB checksummed pages in
//! the order the publisher chose ([`SnapshotWriter`]), a forward index that says on which page a
//! row starts, and named attachments. [`Snapshot`] answers a batch of bags in one pass:
//!
//! ```text
//! bags ─▶ unique rows ─▶ row cache ─▶ forward index ─▶ pages, read once ─▶ check ─▶ pool ─▶ out
//!                                          └─ not stored: the initial value is computed
//! ```
//!
//! Rows never written take no storage; the normative format is docs/reference/formats/snapshot.md.

mod apply;
mod bits;
pub mod blocks;
mod codecs;
pub mod delta;
mod elsewhere;
pub mod forward_index;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/snapshot.rs"]
pub mod fuzz;
mod import;
pub mod index;
mod layers;
mod lookup;
pub mod manifest;
mod open;
mod overlay;
pub mod page;
mod placed;
mod placed_writer;
pub mod placement;
mod places;
mod published_ids;
mod reader;
mod readers;
mod record;
mod refresh;
mod rows;
mod scratch;
pub mod select;
pub mod shards;
mod snapshot;
mod tails;
mod tiers;
mod verify;
mod view;
mod warm;
mod writer;

pub use apply::Generation;
pub use codecs::{InitialCode, PageLayout, TableCodecs};
pub use delta::chain::BaseChain;
pub use elsewhere::{Ask, Elsewhere};
pub use import::{import_tables, PlainTable};
pub use index::PageIndex;
pub use lookup::{Begun, LookupStats, PendingLookup};
pub use placed::PlacedTables;
pub use placed_writer::RowSource;
pub use placement::{Placement, PlacementBuilder, ReplicaBudget};
pub use published_ids::PublishedIds;
pub use record::{RecordOptions, RecordStats, Recorded};
pub use refresh::{RefreshOptions, RefreshStats};
pub use rows::SnapshotRows;
pub use shards::{Located, ShardMap};
pub use snapshot::{
    Backend, PlacementSummary, SelectOptions, Snapshot, SnapshotOptions, SnapshotStats, Summary,
    TableSummary,
};
pub use tails::{HeadSize, TableHeads};
pub use tierbed_kernels::{FeatureLayout, Pooling};
pub use tiers::{
    CachePart, CacheTier, HeadRows, MissMode, NeighbourFile, NeighbourOptions, NeighbourStats,
    NeighboursOf, ResidentTable, SharedTiers, Tail, TierStackOptions, TierSummary,
    NEIGHBOURS_MAGIC,
};
pub use view::View;
pub use writer::{Report, SnapshotWriter};
