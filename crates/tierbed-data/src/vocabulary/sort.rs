//! External merge sort of fixed-size records.
//!
//! Sorted runs are spilled to a scratch folder and merged, `fan_in` at a time, so neither records
//! nor open files nor read buffers grow with the input. Runs carry a checksum: what comes back is
//! what was written, or an error.
//!
//! Source: Knuth, The Art of Computer Programming 3, §5.4 (external sorting, balanced merging).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Result};

/// Bytes of a record, in memory and in a run.
pub(crate) const RECORD_BYTES: usize = 24;
const FEATURE_SHIFT: u32 = 48;

/// A token's record. `tagged` holds the feature in the upper 16 bits and a number (count or id)
/// in the lower 48.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Record {
    pub(crate) fingerprint: u64,
    pub(crate) first: u64,
    pub(crate) tagged: u64,
}

impl Record {
    pub(crate) fn new(feature: u16, fingerprint: u64, first: u64, number: u64) -> Self {
        Self { fingerprint, first, tagged: (u64::from(feature) << FEATURE_SHIFT) | number }
    }

    pub(crate) fn feature(self) -> u16 {
        (self.tagged >> FEATURE_SHIFT) as u16
    }

    pub(crate) fn number(self) -> u64 {
        self.tagged & ((1 << FEATURE_SHIFT) - 1)
    }

    fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let words = [self.fingerprint, self.first, self.tagged];
        for (target, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *target = word.to_le_bytes();
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Self {
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut next = || words.next().unwrap_or(0);
        Self { fingerprint: next(), first: next(), tagged: next() }
    }
}

/// What records are sorted by, after the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Fingerprint,
    First,
}

impl Order {
    fn key(self, record: &Record) -> (u16, u64) {
        match self {
            Self::Fingerprint => (record.feature(), record.fingerprint),
            Self::First => (record.feature(), record.first),
        }
    }

    pub(crate) fn sort(self, records: &mut [Record]) {
        records.sort_unstable_by_key(|record| self.key(record));
    }
}

/// A folder of its own for runs, removed with everything in it when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: PathBuf,
    run_count: u64,
}

impl Scratch {
    /// Makes a new folder inside `parent`.
    pub(crate) fn create(parent: &Path) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("tierbed-vocabulary-{}-{number}", std::process::id());
            let folder = parent.join(name);
            match std::fs::create_dir(&folder) {
                Ok(()) => return Ok(Self { folder, run_count: 0 }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(Error::os("cannot make a scratch folder", error)
                        .with("path", folder.display())
                        .with("remedy", "name a writable scratch_folder"))
                }
            }
        }
    }

    pub(crate) fn run_count(&self) -> u64 {
        self.run_count
    }

    fn next_path(&mut self) -> PathBuf {
        self.run_count += 1;
        self.folder.join(format!("run-{:06}", self.run_count))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing in it is needed; a folder that cannot be removed is left to the operator.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Sorted runs waiting to be merged.
#[derive(Debug)]
pub(crate) struct Runs {
    order: Order,
    budget_bytes: usize,
    paths: Vec<PathBuf>,
}

impl Runs {
    /// `budget_bytes`: for the read buffers of a merge.
    pub(crate) fn new(order: Order, budget_bytes: usize) -> Self {
        Self { order, budget_bytes, paths: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Sorts `records` and writes them as one run.
    pub(crate) fn spill(&mut self, scratch: &mut Scratch, records: &mut [Record]) -> Result<()> {
        self.order.sort(records);
        let mut run = RunWriter::create(scratch.next_path(), self.buffer_bytes())?;
        for record in records.iter() {
            run.push(*record)?;
        }
        self.paths.push(run.finish()?);
        Ok(())
    }

    fn buffer_bytes(&self) -> usize {
        (self.budget_bytes / 64).clamp(4 << 10, 256 << 10)
    }

    /// Merges all runs. Several passes when there are more than the budget has buffers for.
    pub(crate) fn merge(mut self, scratch: &mut Scratch) -> Result<Merge> {
        let fan_in = (self.budget_bytes / self.buffer_bytes()).clamp(2, 256);
        while self.paths.len() > fan_in {
            let rest = self.paths.split_off(fan_in);
            let mut merge = self.open(&self.paths)?;
            let mut run = RunWriter::create(scratch.next_path(), self.buffer_bytes())?;
            while let Some(record) = merge.next()? {
                run.push(record)?;
            }
            for path in &self.paths {
                std::fs::remove_file(path).map_err(|error| {
                    Error::os("cannot remove scratch file", error).with("path", path.display())
                })?;
            }
            self.paths = rest;
            self.paths.push(run.finish()?);
        }
        self.open(&self.paths)
    }

    fn open(&self, paths: &[PathBuf]) -> Result<Merge> {
        let buffer_bytes = self.buffer_bytes();
        let open = |path: &PathBuf| RunReader::open(path, buffer_bytes).map(Source::File);
        Merge::new(self.order, paths.iter().map(open).collect::<Result<_>>()?)
    }
}

/// Sorts a stream of records within a budget: half for records, half for merging.
#[derive(Debug)]
pub(crate) struct Sorter {
    runs: Runs,
    held: Vec<Record>,
    held_max: usize,
}

impl Sorter {
    pub(crate) fn new(order: Order, budget_bytes: usize) -> Self {
        let held_max = (budget_bytes / 2 / RECORD_BYTES).max(16);
        Self { runs: Runs::new(order, budget_bytes / 2), held: Vec::new(), held_max }
    }

    pub(crate) fn push(&mut self, scratch: &mut Scratch, record: Record) -> Result<()> {
        if self.held.len() == self.held_max {
            self.runs.spill(scratch, &mut self.held)?;
            self.held.clear();
        }
        if self.held.len() == self.held.capacity() {
            // Doubling, but never beyond the most that is held. While it grows, old and new copy
            // together take 1.5 times the half of the budget meant for records.
            let step = self.held.len().max(1 << 10).min(self.held_max - self.held.len());
            self.held.reserve_exact(step);
        }
        self.held.push(record);
        Ok(())
    }

    pub(crate) fn finish(mut self, scratch: &mut Scratch) -> Result<Merge> {
        if self.runs.is_empty() {
            self.runs.order.sort(&mut self.held);
            return Merge::new(self.runs.order, vec![Source::Memory(self.held.into_iter())]);
        }
        self.runs.spill(scratch, &mut self.held)?;
        drop(self.held);
        self.runs.merge(scratch)
    }
}

#[derive(Debug)]
enum Source {
    Memory(std::vec::IntoIter<Record>),
    File(RunReader),
}

impl Source {
    fn next(&mut self) -> Result<Option<Record>> {
        match self {
            Self::Memory(records) => Ok(records.next()),
            Self::File(run) => run.next(),
        }
    }
}

/// Hands out the records of several sorted sources in order.
#[derive(Debug)]
pub(crate) struct Merge {
    order: Order,
    sources: Vec<Source>,
    heads: BinaryHeap<Reverse<Head>>,
}

/// Key, then source (so that ties come in a fixed order), then the record itself.
type Head = ((u16, u64), usize, Record);

impl Merge {
    fn new(order: Order, sources: Vec<Source>) -> Result<Self> {
        let heads = BinaryHeap::with_capacity(sources.len());
        let mut merge = Self { order, sources, heads };
        for at in 0..merge.sources.len() {
            merge.advance(at)?;
        }
        Ok(merge)
    }

    /// Merges records already sorted, in memory.
    pub(crate) fn of_sorted(order: Order, records: Vec<Record>) -> Result<Self> {
        Self::new(order, vec![Source::Memory(records.into_iter())])
    }

    fn advance(&mut self, at: usize) -> Result<()> {
        if let Some(source) = self.sources.get_mut(at) {
            if let Some(record) = source.next()? {
                self.heads.push(Reverse((self.order.key(&record), at, record)));
            }
        }
        Ok(())
    }

    pub(crate) fn next(&mut self) -> Result<Option<Record>> {
        let Some(Reverse((_, at, record))) = self.heads.pop() else {
            return Ok(None);
        };
        self.advance(at)?;
        Ok(Some(record))
    }
}

/// A run: records, then the CRC32C of their bytes.
#[derive(Debug)]
struct RunWriter {
    path: PathBuf,
    file: BufWriter<File>,
    crc: u32,
}

impl RunWriter {
    fn create(path: PathBuf, buffer_bytes: usize) -> Result<Self> {
        let file = File::create(&path).map_err(|error| unwritable(error, &path))?;
        Ok(Self { path, file: BufWriter::with_capacity(buffer_bytes, file), crc: 0 })
    }

    fn push(&mut self, record: Record) -> Result<()> {
        let bytes = record.to_bytes();
        self.crc = crc32c_append(self.crc, &bytes);
        self.file.write_all(&bytes).map_err(|error| unwritable(error, &self.path))
    }

    fn finish(mut self) -> Result<PathBuf> {
        let end = self.file.write_all(&self.crc.to_le_bytes()).and_then(|()| self.file.flush());
        end.map_err(|error| unwritable(error, &self.path))?;
        Ok(self.path)
    }
}

fn unwritable(error: std::io::Error, path: &Path) -> Error {
    Error::os("cannot write scratch file", error).with("path", path.display())
}

#[derive(Debug)]
struct RunReader {
    path: PathBuf,
    file: BufReader<File>,
    left: u64,
    crc: u32,
}

impl RunReader {
    fn open(path: &Path, buffer_bytes: usize) -> Result<Self> {
        let unreadable =
            |error| Error::os("cannot read scratch file", error).with("path", path.display());
        let file = File::open(path).map_err(unreadable)?;
        let size_bytes = file.metadata().map_err(unreadable)?.len();
        let left = size_bytes.saturating_sub(4) / RECORD_BYTES as u64;
        let file = BufReader::with_capacity(buffer_bytes, file);
        Ok(Self { path: path.to_path_buf(), file, left, crc: 0 })
    }

    fn next(&mut self) -> Result<Option<Record>> {
        if self.left == 0 {
            return Ok(None);
        }
        let mut bytes = [0; RECORD_BYTES];
        self.read(&mut bytes)?;
        self.crc = crc32c_append(self.crc, &bytes);
        self.left -= 1;
        if self.left == 0 {
            let mut crc = [0; 4];
            self.read(&mut crc)?;
            if u32::from_le_bytes(crc) != self.crc {
                return Err(Error::corruption("scratch file checksum mismatch")
                    .with("path", self.path.display())
                    .with("remedy", "build the vocabulary again on a healthy disk"));
            }
        }
        Ok(Some(Record::from_bytes(&bytes)))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact(bytes).map_err(|error| {
            Error::os("cannot read scratch file", error).with("path", self.path.display())
        })
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    fn drain(mut merge: Merge) -> Vec<Record> {
        let mut records = Vec::new();
        while let Some(record) = merge.next().unwrap() {
            records.push(record);
        }
        records
    }

    #[test]
    fn many_passes_sort_like_memory_does() {
        let folder = tempfile::tempdir().unwrap();
        let mut rng = SplitMix64::new(3);
        let mut records: Vec<_> = (0..50_000)
            .map(|at| Record::new(rng.below(3) as u16, rng.next_u64(), at, rng.below(9)))
            .collect();
        for order in [Order::Fingerprint, Order::First] {
            let mut scratch = Scratch::create(folder.path()).unwrap();
            let mut sorter = Sorter::new(order, 32 << 10);
            for record in &records {
                sorter.push(&mut scratch, *record).unwrap();
            }
            let sorted = drain(sorter.finish(&mut scratch).unwrap());
            // 682 records a run make 74 runs; more were written, so runs were merged in passes.
            assert!(scratch.run_count() > 74, "{}", scratch.run_count());
            order.sort(&mut records);
            assert_eq!(sorted, records);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "scratch is removed");
    }

    #[test]
    fn a_damaged_run_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::create(folder.path()).unwrap();
        let mut runs = Runs::new(Order::First, 64 << 10);
        let mut records: Vec<_> = (0..100).map(|at| Record::new(0, at, at, 1)).collect();
        runs.spill(&mut scratch, &mut records).unwrap();
        let mut bytes = std::fs::read(&runs.paths[0]).unwrap();
        bytes[777] ^= 1;
        File::create(&runs.paths[0]).unwrap().write_all(&bytes).unwrap();
        let mut merge = runs.merge(&mut scratch).unwrap();
        let error = loop {
            match merge.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("damage went unnoticed"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption);
    }
}
