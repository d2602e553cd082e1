//! The shared types of Tierbed: ids, bags, schemas, stores, errors. No input or output.
//!
//! Tables, rows and bags ([`ids`], [`bags`], [`schema`]); the narrow waist every store
//! implements ([`store`]); the memory budget ([`budget`]); what can go wrong
//! ([`error`]); clock and random seed ([`mod@env`]); how work goes to another
//! thread ([`handover`]); and what was counted ([`stats`]). Every other crate depends on
//! this one; this one depends on none of ours.

pub mod bags;
pub mod budget;
pub mod checksum;
pub mod conformance;
pub mod env;
pub mod error;
pub mod handover;
pub mod ids;
pub mod poison;
pub mod schema;
pub mod stats;
pub mod store;

pub use bags::Bags;
pub use budget::{Budget, Reservation};
pub use error::{Error, ErrorKind, Result};
pub use ids::{RowId, RowKey, TableId};
pub use poison::{check_disk_quota, Poison};
pub use schema::{InitSpec, OptimizerKind, Schema, TableSchema};
pub use store::{RowStore, RowWrite, TrainStore};

#[cfg(target_endian = "big")]
compile_error!(
    "tierbed stores row bytes as little-endian words and does not run on big-endian machines"
);
