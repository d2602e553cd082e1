//! What if the disk lies? A seeded faulty disk for tests.
//!
//! A [`SimFolder`] is a [`tierbed_io::Folder`] in memory that behaves as the worst disk the
//! stores must live with. Stores run on it unchanged. The same seed, plan and order of calls give
//! the same faults, so use the `inline` engine where a run must repeat.
//!
//! # The model
//!
//! Every file has what programs *see*, what is *durable*, and the list of changes (writes and
//! length changes) since its last sync. Names likewise: creating, renaming and removing are seen
//! at once and durable after a sync of the folder; syncing a file does not make its name durable.
//!
//! ```text
//! write_at ─▶ seen, + unsynced change          open(Create), rename, remove ─▶ seen, + unsynced
//! sync     ─▶ durable := durable + changes     Folder::sync                 ─▶ durable names
//! crash    ─▶ durable + some of the changes    crash         ─▶ durable + some of the name changes
//! ```
//!
//! **Power loss** ([`SimFolder::crash`]): each unsynced write is, independently and in order,
//! kept, dropped, or torn (each 512-byte sector of it kept or dropped); each unsynced change of a
//! length or a name is kept or dropped. A rename happens whole or not at all. Synced data is
//! intact. [`FaultPlan::crash_after_io`] stops the world in the middle of a run: the call in
//! flight fails with its effect unsynced, and so does every call after it.
//!
//! **Honest failures**, to be survived: a full disk, an error from a read, a write or a sync. A
//! failed sync settles the changes as a power loss would (the kernel drops pages it could not
//! write and forgets that they were dirty): a later sync succeeds and the lost data stays lost.
//! Whether programs still see the lost data, or the old bytes again, is luck too.
//!
//! **Lies**, to be detected by checksums, not survived: a *lost* write is acknowledged and never
//! happens; a *misdirected* write lands on another page; a *torn* write is acknowledged and only
//! some of its sectors happen; a *bit flip* changes one bit of what a read returns.
//!
//! Only calls that change something count as I/Os ([`SimFolder::io_count`]), since a crash
//! between two reads is a crash at the next change. To test a store at every crash point, run it
//! once to learn the count, then once with each `crash_after_io` below it; the checks of [`job`]
//! do that and more for anything that trains.

pub mod batch;
pub mod conformance;
mod device;
mod disk;
mod file;
mod folder;
pub mod fuzz;
pub mod job;
pub mod kill;
mod plan;
pub mod rows;

pub use device::SimDevice;
pub use folder::SimFolder;
pub use plan::{Chance, FaultPlan, IoCounts};
