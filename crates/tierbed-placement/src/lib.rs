//! Placement of rows on pages, with replicas, learned from a query log.
//!
//! A page read brings a whole page of rows, a query needs few of them. Rows that are asked for
//! together should share a page, and a row of several such groups may sit on several:
//!
//! ```text
//! query log ──▶ partition: every row has one home page ──▶ replicate: more pages ──▶ placement
//! ```
//!
//! [`QueryLog`] is what was asked, [`Placement`] is which rows are on which page. Its type, its
//! file and the index that selects pages are those of `tierbed-snapshot`. Nothing here reads a page
//! or knows what a row holds.
//!
//! Source: MaxEmbed §5 (the problem, and one answer).

mod choose;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/placement.rs"]
pub mod fuzz;
mod hypergraph;
mod incidence;
mod mapping;
mod method;
mod misses;
pub mod partition;
mod progress;
mod quality;
mod query_log;
pub mod replicate;
mod resume;
mod shards;
mod trial;

pub use choose::{choose, Choice, TrialReads};
pub use mapping::{read_mapping, write_mapping};
pub use method::{build, build_each, BuildInput, Method};
pub use misses::{miss_stream, CacheInFront, MissStream};
pub use progress::{BuildReport, Report};
pub use quality::{connectivity_sum, count_page_reads, index_by_use, PageReads};
pub use query_log::{
    decode_packed, encode_packed, read_log, write_packed, PackedQueries, QueryLog, QueryLogBuilder,
    QuerySource, ReadOptions, TextQueries,
};
pub use shards::{count_shard_reads, divide_rows, ShardReads, ShardingOptions};
pub use tierbed_snapshot::{Placement, PlacementBuilder, ReplicaBudget};
