//! The symmetric heap: regions of all ranks in shared memory.
//!
//! ```text
//! | header, 4096 bytes | region of rank 0 | region of rank 1 | ...
//! ```
//!
//! Every region has the same length and layout, so a place in one is a place in all.

#![expect(clippy::indexing_slicing, reason = "a header that was read has the length asked for")]

use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};

use crate::memory::{Map, Region};

/// Bytes before the first region.
const HEADER_BYTES: usize = 4096;
const PAGE_BYTES: usize = 4096;
/// Where the token of a heap lies.
const TOKEN_AT: usize = 8;
/// First word of a heap: "TBEX".
const MAGIC: u32 = 0x5845_4254;
/// Most ranks of a heap: those of one machine.
pub const RANKS_MAX: usize = 64;

/// As many regions of one layout as there are ranks, each writable by all of them.
pub trait SymmetricHeap: Send + Sync + std::fmt::Debug {
    /// Returns the number of ranks.
    fn rank_count(&self) -> usize;

    /// Returns the region of `rank`.
    ///
    /// # Panics
    /// When there is no such rank.
    fn region(&self, rank: usize) -> Region<'_>;
}

/// Regions of one process, whose ranks are threads.
#[derive(Debug)]
pub struct LocalHeap {
    map: Map,
    rank_count: usize,
}

impl LocalHeap {
    /// Makes a heap of zeros with `region_bytes` for each rank, rounded up to pages.
    ///
    /// # Errors
    /// `Invalid` for no rank or too many, `Io` when the kernel refuses the memory.
    pub fn new(rank_count: usize, region_bytes: usize) -> Result<Self> {
        let len_bytes = heap_bytes(rank_count, region_bytes)?;
        let map = Map::anonymous(len_bytes).map_err(|cause| not_mapped(len_bytes, cause))?;
        Ok(Self { map, rank_count })
    }
}

impl SymmetricHeap for LocalHeap {
    fn rank_count(&self) -> usize {
        self.rank_count
    }

    fn region(&self, rank: usize) -> Region<'_> {
        region_of(&self.map, self.rank_count, rank)
    }
}

/// Regions that several processes of one machine share.
#[derive(Debug)]
pub struct ShmHeap {
    map: Map,
    rank_count: usize,
}

impl ShmHeap {
    /// Makes a heap of zeros with `region_bytes` for each rank; others open it by its
    /// [`path`](Self::path) and `token`, a number that no other heap has.
    ///
    /// # Errors
    /// `Invalid` for no rank or too many, `Io` when the kernel refuses the memory.
    pub fn create(rank_count: usize, region_bytes: usize, token: u64) -> Result<Self> {
        let len_bytes = heap_bytes(rank_count, region_bytes)?;
        let map = Map::create(len_bytes).map_err(|cause| not_mapped(len_bytes, cause))?;
        let header = [MAGIC, rank_count as u32];
        let mut writer = Region::new(&map, 0, HEADER_BYTES).writer();
        writer.values(0, 2).copy_from_slice(&header);
        writer.values(TOKEN_AT, 1).fill(token);
        Ok(Self { map, rank_count })
    }

    /// Opens the heap that another process made.
    ///
    /// # Errors
    /// `Unsupported` when it cannot be opened (other machine, container or user), or another
    /// process has this path there; `Invalid` when it is no heap of `rank_count` ranks.
    pub fn open(path: &Path, rank_count: usize, token: u64) -> Result<Self> {
        let map = Map::open(path).map_err(|cause| {
            Error::unsupported("cannot open the shared memory of rank 0")
                .with("path", path.display())
                .with("cause", cause)
                .with("remedy", "ranks on several machines exchange by \"auto\"")
        })?;
        let (found, found_token) = if map.len_bytes() < HEADER_BYTES {
            ([0, 0], None)
        } else {
            let region = Region::new(&map, 0, HEADER_BYTES);
            let header = region.read::<u32>(0, 2);
            ([header[0], header[1]], region.read::<u64>(TOKEN_AT, 1).first().copied())
        };
        if found[0] != MAGIC || found_token != Some(token) {
            // Containers number processes each from 1: the path may be that of another process.
            return Err(Error::unsupported("another process has the path of the shared memory")
                .with("path", path.display())
                .with("remedy", "ranks on several machines exchange by \"auto\""));
        }
        let rest = map.len_bytes().saturating_sub(HEADER_BYTES);
        let is_whole = rank_count > 0 && rest.is_multiple_of(rank_count * PAGE_BYTES);
        if found != [MAGIC, rank_count as u32] || !is_whole {
            return Err(Error::invalid("the file is no heap of this many ranks")
                .with("path", path.display())
                .with("expected_ranks", rank_count)
                .with("found_ranks", found[1]));
        }
        Ok(Self { map, rank_count })
    }

    /// Returns where processes of the same user find the heap while this process holds it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        let descriptor = self.map.descriptor().unwrap_or(-1);
        PathBuf::from(format!("/proc/{}/fd/{descriptor}", std::process::id()))
    }
}

impl SymmetricHeap for ShmHeap {
    fn rank_count(&self) -> usize {
        self.rank_count
    }

    fn region(&self, rank: usize) -> Region<'_> {
        region_of(&self.map, self.rank_count, rank)
    }
}

fn heap_bytes(rank_count: usize, region_bytes: usize) -> Result<usize> {
    if rank_count == 0 || rank_count > RANKS_MAX {
        return Err(Error::invalid("a heap has 1 to 64 ranks").with("ranks", rank_count));
    }
    let too_long = || Error::invalid("a heap is too long").with("region_bytes", region_bytes);
    let region_bytes = region_bytes.checked_next_multiple_of(PAGE_BYTES).ok_or_else(too_long)?;
    region_bytes
        .checked_mul(rank_count)
        .and_then(|bytes| bytes.checked_add(HEADER_BYTES))
        .ok_or_else(too_long)
}

fn region_of(map: &Map, rank_count: usize, rank: usize) -> Region<'_> {
    assert!(rank < rank_count, "no such rank");
    let region_bytes = (map.len_bytes() - HEADER_BYTES) / rank_count;
    Region::new(map, HEADER_BYTES + rank * region_bytes, region_bytes)
}

fn not_mapped(len_bytes: usize, cause: std::io::Error) -> Error {
    Error::os("cannot map the heap of the ranks", cause).with("heap_bytes", len_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_process_writes_another_map_of_it_reads() {
        let made = ShmHeap::create(2, 100, 7).unwrap();
        let opened = ShmHeap::open(&made.path(), 2, 7).unwrap();
        opened.region(1).writer().values(64, 3).copy_from_slice(&[1.0f32, 2.0, 3.0]);
        assert_eq!(made.region(1).read::<f32>(64, 3), [1.0, 2.0, 3.0]);
        assert_eq!(made.region(0).read::<f32>(64, 3), [0.0; 3]);
        assert_eq!(made.region(0).len_bytes(), PAGE_BYTES);
    }

    #[test]
    fn a_heap_of_others_is_refused() {
        let made = ShmHeap::create(2, 100, 7).unwrap();
        assert!(ShmHeap::open(&made.path(), 3, 7).is_err());
        let error = ShmHeap::open(Path::new("/proc/self/fd/no"), 2, 7).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Unsupported);
        assert!(ShmHeap::open(Path::new("/dev/null"), 2, 7).is_err());
        // What another process has at this path, in a namespace of its own.
        let error = ShmHeap::open(&made.path(), 2, 8).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Unsupported);
        assert!(LocalHeap::new(0, 100).is_err());
        assert!(LocalHeap::new(RANKS_MAX + 1, 100).is_err());
        assert!(LocalHeap::new(2, usize::MAX - 1).is_err());
    }

    #[test]
    #[should_panic(expected = "inside its region")]
    fn a_view_past_a_region_panics() {
        let heap = LocalHeap::new(2, PAGE_BYTES).unwrap();
        let _ = heap.region(0).read::<u64>(PAGE_BYTES - 4, 1);
    }
}
