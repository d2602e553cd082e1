//! Objects: bytes under names, and the two conditional writes that versions need.
//!
//! A folder ([`FolderObjects`](crate::FolderObjects)) implements it, and any store can that writes
//! conditionally, as S3 does. A write is seen whole or not at all, and by everybody at once;
//! nothing else is asked.

use std::fmt::Debug;
use std::ops::{Deref, Range};
use std::sync::Arc;

use tierbed_core::{Error, Result};

/// An object of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name, from the location's root.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// When it was written, in seconds since 1970.
    pub modified_s: u64,
}

/// What tells one content of an object from the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag(pub String);

/// An object that was read whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// For a later [`When::Unchanged`].
    pub tag: Tag,
}

/// The condition of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum When {
    /// None.
    Always,
    /// There is no such object.
    Absent,
    /// The object is the one that was read with this tag.
    Unchanged(Tag),
}

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// It is written.
    Done,
    /// The condition did not hold; nothing is written.
    Lost,
}

/// Bytes under names such as `v/000001/rows.pages`.
pub trait Objects: Send + Sync + Debug {
    /// Lists the objects below `folder`, or all, in ascending order of names.
    ///
    /// # Errors
    /// `Io` when the store refuses, `Invalid` when it does not let us in.
    fn list(&self, folder: Option<&str>) -> Result<Vec<Listed>>;

    /// Reads a small object whole; `None` when there is none.
    ///
    /// # Errors
    /// `Corruption` when it has more than `bytes_max`; else as [`list`](Self::list).
    fn get(&self, name: &str, bytes_max: u64) -> Result<Option<Found>>;

    /// Reads a range of an object; `None` when there is no object.
    ///
    /// # Errors
    /// `Corruption` when the object ends before; else as [`list`](Self::list).
    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Option<Vec<u8>>>;

    /// Writes a small object whole, durably, if the condition holds.
    ///
    /// # Errors
    /// As [`list`](Self::list), and `NoSpace`. The object may then be written all the same.
    fn put(&self, name: &str, bytes: &[u8], when: &When) -> Result<Put>;

    /// As [`put`](Self::put), of bytes that need not be copied to be sent.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn put_shared(&self, name: &str, bytes: Shared, when: &When) -> Result<Put> {
        self.put(name, &bytes, when)
    }

    /// Writes a large object from chunks of equal length; the last one may be shorter. It may be
    /// seen in part until this returns.
    ///
    /// # Errors
    /// Those of the chunks; else as [`put`](Self::put).
    fn put_large(&self, name: &str, chunks: &mut Chunks<'_>) -> Result<()>;

    /// Removes an object; fine when there is none.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    fn remove(&self, name: &str) -> Result<()>;
}

/// Bytes that a write may hold on to until it is answered.
pub type Shared = Arc<dyn Deref<Target = [u8]> + Send + Sync>;

/// The bytes of a large object.
pub type Chunks<'a> = dyn Iterator<Item = Result<Vec<u8>>> + 'a;

/// Returns the error of a store that does not compare before it writes.
pub(crate) fn no_conditions() -> Error {
    Error::unsupported("store does not compare before it writes")
        .with("remedy", "use a store that has conditional writes: If-Match and If-None-Match")
}
