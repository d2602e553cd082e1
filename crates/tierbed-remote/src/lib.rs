//! Versions of a served model: where they lie, and how they get from publisher to server whole.
//!
//! ```text
//! published folder ─push─▶ v/<seq>/... ─▶ HEAD.<channel>.json ─pull─▶ <local>/<seq>/
//!                          parts, digests     compare-and-swap         verified, then renamed
//! ```
//!
//! A [`Location`] is a folder or a bucket: anything that has [`Objects`]. This crate knows folders
//! and bytes: what a published folder means is its caller's business. Format:
//! docs/reference/formats/remote.md.
//!
//! # Invariants
//!
//! - A version is whole once it has its manifest, and never changes from then on.
//! - A HEAD names digests: no byte reaches a server that was not in the published folder.
//! - A channel moves by compare-and-swap, so that of two publishers one is told that it lost.
//! - A kill anywhere leaves the old HEAD or the new one. The rest is pruned or gone on with.

mod bandwidth;
#[cfg(feature = "s3")]
mod bucket;
mod channels;
mod digest;
mod folder;
#[cfg(any(test, fuzzing))]
#[path = "../../../tools/fuzz/entries/remote.rs"]
pub mod fuzz;
mod head;
mod listing;
mod local;
mod location;
mod marks;
mod names;
mod objects;
mod parts;
mod prune;
mod pull;
mod push;
mod retry;

pub use bandwidth::Bandwidth;
#[cfg(feature = "s3")]
pub use bucket::{BucketKind, BucketObjects, BucketSettings};
pub use digest::Digest;
pub use folder::FolderObjects;
pub use head::{Head, Link, Past};
pub use listing::{Channel, Listing, State, Version};
pub use local::Local;
pub use location::{open_objects, Location};
pub use names::{check_channel, Seq, PARTS_NAME};
pub use objects::{Chunks, Found, Listed, Objects, Put, Shared, Tag, When};
pub use parts::{FileParts, Parts, PART_BYTES};
pub use prune::{Prune, Pruned};
pub use pull::{Pull, Pulled, Want};
pub use push::{Expected, Push, Pushed};
pub use retry::Retry;

/// Hears how many of how many bytes are done; an error ends the work.
pub type Progress<'a> = dyn FnMut(u64, u64) -> tierbed_core::Result<()> + 'a;
