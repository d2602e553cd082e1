//! A memory-mapped file with bounded residency.

use std::fs::File;

use memmap2::Mmap;
use tierbed_core::{Error, Result};

/// A whole file, read-only, mapped. The kernel keeps of it what it has room for.
///
/// The file must not be shortened while it is mapped: reading beyond its end kills the process.
/// Vocabulary files are written once under another name and renamed, never changed.
#[derive(Debug)]
pub(crate) struct Mapping(Mmap);

impl Mapping {
    /// Maps `file`, which is not empty.
    pub(crate) fn of(file: &File) -> Result<Self> {
        // SAFETY: a vocabulary file is never changed once it has its name, so the bytes of the
        // map are those of a constant.
        let map = unsafe { Mmap::map(file) };
        map.map(Self).map_err(|error| Error::os("cannot map file", error))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
