//! The live SSTs and their levels, as of one commit.
//!
//! A [`Version`] is never changed: an edit makes the next one. A commit writes the version in
//! one checksummed file, `commit-<number>.version`; normative text:
//! `docs/reference/formats/lsm.md`.

#![expect(clippy::indexing_slicing, reason = "a version has LEVELS_MAX levels")]

mod file;

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::{Error, Result};

use crate::key::Key;

pub(crate) use file::{decode, encode, encoded_len, StoredVersion};

/// Number of an SST; grows, never used twice within a committed history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SstId(pub u64);

impl SstId {
    pub(crate) fn file_name(self) -> String {
        format!("{:06}.sst", self.0)
    }
}

/// What is known about an SST without opening it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SstMeta {
    /// Its number.
    pub id: SstId,
    /// First key.
    pub first: Key,
    /// Last key.
    pub last: Key,
    /// Rows in it.
    pub row_count: u64,
    /// Bytes of each of its blocks.
    pub block_bytes: u32,
    /// Blocks of rows; they come first.
    pub rows_blocks: u32,
    /// Blocks of the index; they follow.
    pub index_blocks: u32,
    /// Blocks of the filter; they come last.
    pub filter_blocks: u32,
    /// Bytes of the filter, 0 when there is none.
    pub filter_bytes: u64,
    /// Bits per row the filter was built with.
    pub filter_bits_per_row: u32,
}

impl SstMeta {
    /// Returns the number of blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.rows_blocks.saturating_add(self.index_blocks).saturating_add(self.filter_blocks)
    }

    /// Returns the length of the file: `size(k)` of RecDB's equations.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        u64::from(self.block_count()) * u64::from(self.block_bytes)
    }

    /// Returns whether the key ranges of `self` and `other` meet.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Most levels a tree may have.
pub const LEVELS_MAX: usize = 7;

/// The live SSTs. Level 0: flushes, oldest first, overlapping; deeper levels: one run each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    levels: Vec<Vec<SstMeta>>,
}

impl Default for Version {
    fn default() -> Self {
        Self { levels: vec![Vec::new(); LEVELS_MAX] }
    }
}

impl Version {
    /// Builds a version of `levels`.
    ///
    /// # Errors
    /// `Corruption` when a level below 0 overlaps itself, an SST occurs twice or is malformed:
    /// versions come from disk.
    pub fn new(mut levels: Vec<Vec<SstMeta>>) -> Result<Self> {
        let damaged = |what: &str| Error::corruption(format!("version: {what}"));
        if levels.len() > LEVELS_MAX {
            return Err(damaged("too many levels").with("levels", levels.len()));
        }
        levels.resize(LEVELS_MAX, Vec::new());
        let mut ids = BTreeSet::new();
        for sst in levels.iter().flatten() {
            let is_fresh = ids.insert(sst.id);
            if !is_fresh || sst.first > sst.last || sst.rows_blocks == 0 || sst.block_bytes == 0 {
                return Err(damaged("malformed SST").with("sst_id", sst.id.0));
            }
        }
        for (level, ssts) in levels.iter().enumerate().skip(1) {
            let ascends = ssts.is_sorted_by(|one, next| one.last < next.first);
            if !ascends {
                return Err(damaged("level overlaps itself").with("level", level));
            }
        }
        Ok(Self { levels })
    }

    /// Returns the SSTs of `level`: level 0 oldest first, others in key order.
    ///
    /// # Panics
    /// When `level` is not below [`LEVELS_MAX`].
    #[must_use]
    pub fn level(&self, level: usize) -> &[SstMeta] {
        assert!(level < LEVELS_MAX, "level {level} of a tree of {LEVELS_MAX}");
        &self.levels[level]
    }

    /// Returns every SST with its level.
    pub fn ssts(&self) -> impl Iterator<Item = (usize, &SstMeta)> {
        let numbered = self.levels.iter().enumerate();
        numbered.flat_map(|(level, ssts)| ssts.iter().map(move |sst| (level, sst)))
    }

    /// Returns the bytes of a level.
    #[must_use]
    pub fn level_bytes(&self, level: usize) -> u64 {
        self.level(level).iter().map(SstMeta::size_bytes).sum()
    }

    /// Returns the bytes of all SSTs.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.ssts().map(|(_, sst)| sst.size_bytes()).sum()
    }

    /// Returns the SSTs of `level`, in key order, whose ranges meet that of any of `ssts`' hull.
    ///
    /// # Panics
    /// For level 0, whose SSTs are in the order of their age.
    #[must_use]
    pub fn overlapping(&self, level: usize, ssts: &[SstMeta]) -> Vec<SstMeta> {
        assert!(level > 0, "SSTs of level 0 are in no order of keys");
        let first = ssts.iter().map(|sst| sst.first).min();
        let last = ssts.iter().map(|sst| sst.last).max();
        let Some((first, last)) = first.zip(last) else { return Vec::new() };
        let meets = |sst: &&SstMeta| sst.first <= last && first <= sst.last;
        self.level(level).iter().filter(meets).copied().collect()
    }

    /// Returns the version after `edit`.
    ///
    /// # Errors
    /// As [`new`](Self::new); an edit of ours never makes one, so it says that memory was bad.
    ///
    /// # Panics
    /// When the edit removes an SST that is not live, or adds to a level that is none.
    pub fn edited(&self, edit: &VersionEdit) -> Result<Arc<Self>> {
        let mut levels = self.levels.clone();
        let count = |levels: &[Vec<SstMeta>]| levels.iter().map(Vec::len).sum::<usize>();
        let before = count(&levels);
        for ssts in &mut levels {
            ssts.retain(|sst| !edit.removed.contains(&sst.id));
        }
        let removed = before - count(&levels);
        assert_eq!(removed, edit.removed.len(), "an edit removes SSTs that are live");
        for (level, sst) in &edit.added {
            assert!(*level < LEVELS_MAX, "an edit adds to a level of the tree");
            levels[*level].push(*sst);
        }
        for ssts in levels.iter_mut().skip(1) {
            ssts.sort_unstable_by_key(|sst| sst.first);
        }
        Ok(Arc::new(Self::new(levels)?))
    }
}

/// What changes from one version to the next.
#[derive(Debug, Clone, Default)]
pub struct VersionEdit {
    /// SSTs that are no longer live.
    pub removed: BTreeSet<SstId>,
    /// SSTs that are, with their levels.
    pub added: Vec<(usize, SstMeta)>,
}
