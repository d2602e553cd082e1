//! The directory of an index: hash prefixes to buckets, wholly in memory.
//!
//! `2^depth` bucket numbers, found by the first `depth` bits of the hash. A bucket whose ids
//! share fewer bits owns a run of neighbouring slots; splitting it halves the run.
//!
//! Its file (an attachment of every commit; `docs/reference/formats/open-vocabulary.md`): magic
//! `TBid`,
//! version u32, depth u32, run count u32, then per run the bucket u32 and its depth u8, in hash
//! order.

#![expect(
    clippy::indexing_slicing,
    reason = "there are 2^depth slots, and a hash's first bits are below that"
)]

use tierbed_core::{Error, Result};

use crate::bucket::{long, put, word};

const MAGIC: [u8; 4] = *b"TBid";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 16;
const RUN_BYTES: usize = 5;
/// 2^32 slots: 700 billion ids.
const DEPTH_MAX: u32 = 32;

/// The directory. See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Directory {
    depth: u32,
    slots: Vec<u32>,
    bucket_count: u32,
}

impl Directory {
    /// Builds a directory of one bucket, number 0.
    pub(crate) fn new() -> Self {
        Self { depth: 0, slots: vec![0], bucket_count: 1 }
    }

    /// Returns the bytes of the slots.
    pub(crate) fn memory_bytes(&self) -> u64 {
        4 * self.slots.len() as u64
    }

    pub(crate) fn bucket_count(&self) -> u32 {
        self.bucket_count
    }

    /// Returns the bucket of `hash`.
    pub(crate) fn bucket(&self, hash: u64) -> u32 {
        self.slots[self.slot(hash)]
    }

    fn slot(&self, hash: u64) -> usize {
        if self.depth == 0 {
            return 0;
        }
        (hash >> (64 - self.depth)) as usize
    }

    /// Returns whether splitting a bucket of `depth` doubles the slots.
    pub(crate) fn must_double(&self, depth: u32) -> bool {
        depth >= self.depth
    }

    /// Splits the bucket of `hash`, whose ids share `depth` bits; returns the new bucket, which
    /// gets the ids whose next bit is one.
    ///
    /// # Errors
    /// `Invalid` when there are too many ids, `Corruption` when `depth` is not the bucket's.
    pub(crate) fn split(&mut self, hash: u64, depth: u32) -> Result<u32> {
        if self.must_double(depth) {
            if self.depth == DEPTH_MAX || depth > self.depth {
                return Err(Error::invalid("vocabulary is full")
                    .with("directory_depth", self.depth)
                    .with("bucket_depth", depth));
            }
            self.double();
        }
        let old = self.bucket(hash);
        let new = self.bucket_count;
        let run = 1usize << (self.depth - depth);
        let first = self.slot(hash) & !(run - 1);
        let beside = [first.checked_sub(1), Some(first + run)];
        let is_longer = beside.into_iter().flatten().any(|slot| self.slots.get(slot) == Some(&old));
        let slots = &mut self.slots[first..first + run];
        if slots.iter().any(|&bucket| bucket != old) || is_longer {
            return Err(Error::corruption("bucket and directory of a vocabulary disagree")
                .with("bucket", old)
                .with("depth", depth));
        }
        assert!(run >= 2, "the slots were doubled for this bucket");
        slots[run / 2..].fill(new);
        self.bucket_count += 1;
        assert!(self.bucket_count as usize <= self.slots.len(), "a bucket has a slot of its own");
        Ok(new)
    }

    // In place: beside the slots there is no memory for their copy.
    fn double(&mut self) {
        let count = self.slots.len();
        self.slots.reserve_exact(count);
        self.slots.resize(2 * count, 0);
        for at in (0..count).rev() {
            let bucket = self.slots[at];
            self.slots[2 * at..2 * at + 2].fill(bucket);
        }
        self.depth += 1;
        assert!(self.slots.len() == 1 << self.depth, "2^depth slots");
    }

    /// Returns the bucket of slot `slot` and moves `slot` behind its run; `None` at the end.
    pub(crate) fn next_bucket(&self, slot: &mut usize) -> Option<u32> {
        let bucket = *self.slots.get(*slot)?;
        *slot += self.slots[*slot..].iter().take_while(|other| **other == bucket).count();
        Some(bucket)
    }

    /// Returns the buckets in hash order, each with its depth.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let runs = self.slots.chunk_by(|a, b| a == b);
        runs.map(|run| (run[0], self.depth - run.len().trailing_zeros()))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let runs: Vec<(u32, u32)> = self.runs().collect();
        let mut bytes = vec![0; HEAD_BYTES + RUN_BYTES * runs.len()];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 4, &VERSION.to_le_bytes());
        put(&mut bytes, 8, &self.depth.to_le_bytes());
        put(&mut bytes, 12, &(runs.len() as u32).to_le_bytes());
        for (at, (bucket, depth)) in runs.into_iter().enumerate() {
            let start = HEAD_BYTES + RUN_BYTES * at;
            put(&mut bytes, start, &bucket.to_le_bytes());
            put(&mut bytes, start + 4, &[depth as u8]);
        }
        bytes
    }

    /// Returns the memory the directory in `bytes` will take.
    ///
    /// # Errors
    /// `Corruption` for bytes that are none.
    pub(crate) fn decoded_bytes(bytes: &[u8]) -> Result<u64> {
        Ok(4 << head(bytes)?.0)
    }

    /// Reads a directory.
    ///
    /// # Errors
    /// `Corruption` unless the runs fill the slots and name every bucket once.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let (depth, run_count) = head(bytes)?;
        let mut slots = Vec::with_capacity(1 << depth);
        let mut is_named = vec![false; run_count];
        for run in bytes[HEAD_BYTES..].chunks_exact(RUN_BYTES) {
            let (bucket, own_depth) = (word(run, 0), u32::from(run[4]));
            let wrong = || damaged().with("bucket", bucket);
            if bucket as usize >= run_count || own_depth > depth {
                return Err(wrong());
            }
            let was_named = std::mem::replace(&mut is_named[bucket as usize], true);
            let len = 1usize << (depth - own_depth);
            if was_named || !slots.len().is_multiple_of(len) || slots.len() + len > 1 << depth {
                return Err(wrong());
            }
            slots.resize(slots.len() + len, bucket);
        }
        if slots.len() != 1 << depth {
            return Err(damaged().with("slots", slots.len()));
        }
        Ok(Self { depth, slots, bucket_count: run_count as u32 })
    }
}

// Depth and number of runs; the bytes are as long as they say.
fn head(bytes: &[u8]) -> Result<(u32, usize)> {
    if !bytes.starts_with(&MAGIC) || bytes.len() < HEAD_BYTES {
        return Err(damaged());
    }
    let (depth, run_count) = (word(bytes, 8), word(bytes, 12) as usize);
    if word(bytes, 4) != VERSION {
        return Err(Error::invalid("vocabulary has another format version")
            .with("supported", VERSION)
            .with("found", word(bytes, 4)));
    }
    let is_whole = long(bytes, 8) != 0 && bytes.len() == HEAD_BYTES + RUN_BYTES * run_count;
    if !is_whole || depth > DEPTH_MAX || run_count as u64 > 1 << depth {
        return Err(damaged());
    }
    Ok((depth, run_count))
}

fn damaged() -> Error {
    Error::corruption("directory of a vocabulary is damaged")
        .with("remedy", "restore the store's folder from a copy")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grown(hashes: &[u64]) -> Directory {
        let mut directory = Directory::new();
        let mut depths = vec![0u32];
        for &hash in hashes {
            let bucket = directory.bucket(hash) as usize;
            if depths[bucket] < 12 {
                directory.split(hash, depths[bucket]).unwrap();
                depths[bucket] += 1;
                depths.push(depths[bucket]);
            }
        }
        let runs: Vec<(u32, u32)> = directory.runs().collect();
        assert_eq!(runs.len(), depths.len());
        assert!(runs.iter().all(|&(bucket, depth)| depths[bucket as usize] == depth));
        directory
    }

    proptest! {
        #[test]
        fn comes_back_as_written(hashes in proptest::collection::vec(any::<u64>(), 0..60)) {
            let directory = grown(&hashes);
            let bytes = directory.encode();
            prop_assert_eq!(Directory::decoded_bytes(&bytes).unwrap(), directory.memory_bytes());
            prop_assert_eq!(Directory::decode(&bytes).unwrap(), directory);
        }

        #[test]
        fn damaged_bytes_never_panic(
            hashes in proptest::collection::vec(any::<u64>(), 0..20),
            at: usize,
            byte: u8,
        ) {
            let mut bytes = grown(&hashes).encode();
            let at = at % bytes.len();
            // A depth of 32 would be honestly 16 GiB; callers reserve before they decode.
            prop_assume!(!(8..12).contains(&at));
            bytes[at] = byte;
            let _ = Directory::decode(&bytes);
            let _ = Directory::decode(&bytes[..at]);
        }
    }

    #[test]
    fn a_split_moves_the_upper_half() {
        let mut directory = Directory::new();
        assert_eq!(directory.split(0, 0).unwrap(), 1);
        assert_eq!((directory.bucket(0), directory.bucket(u64::MAX)), (0, 1));
        assert_eq!(directory.split(u64::MAX, 1).unwrap(), 2);
        assert_eq!(directory.bucket(0b10 << 62), 1);
        assert_eq!(directory.bucket(0b11 << 62), 2);
        assert_eq!(directory.bucket(0b01 << 62), 0);
        assert!(directory.split(0, 2).is_err(), "bucket 0 has depth 1");
    }
}
