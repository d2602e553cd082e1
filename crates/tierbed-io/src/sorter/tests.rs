#![expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Device, FolderLock, MemoryFolder, OpenMode};
use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use super::*;

type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

fn options(key_bytes: usize, payload_bytes: usize) -> SorterOptions {
    let scratch_name = "sort".to_owned();
    SorterOptions { key_bytes, payload_bytes, memory_bytes: MEMORY_BYTES_MIN, scratch_name }
}

fn sort(options: &SorterOptions, pairs: &[(Vec<u8>, Vec<u8>)]) -> (Pairs, SortStats) {
    let folder = MemoryFolder::new();
    let budget = Budget::new(options.memory_bytes);
    let mut sorter = ExternalSorter::new(Arc::new(folder.clone()), options, &budget).unwrap();
    for (key, payload) in pairs {
        sorter.push(key, payload).unwrap();
    }
    let mut sorted = sorter.finish().unwrap();
    let mut out = Vec::new();
    while let Some(record) = sorted.next().unwrap() {
        out.push((record.key.to_vec(), record.payload.to_vec()));
    }
    assert!(sorted.next().unwrap().is_none());
    let stats = sorted.stats();
    drop(sorted);
    assert!(folder.list().unwrap().is_empty(), "scratch files are removed");
    assert_eq!(budget.report().used_bytes, 0);
    (out, stats)
}

fn random_pairs(count: u32, span: u64, payload_bytes: usize) -> Pairs {
    let mut rng = SplitMix64::new(u64::from(count));
    let pair = |at: u32| {
        let mut payload = at.to_le_bytes().to_vec();
        payload.resize(payload_bytes, at as u8);
        (rng.below(span).to_be_bytes()[3..].to_vec(), payload)
    };
    (0..count).map(pair).collect()
}

#[test]
fn sorts_in_memory_through_runs_and_through_passes() {
    // (records, payload bytes, runs are made, passes are made)
    for (count, payload_bytes, runs, passes) in [
        (0, 4, false, false),
        (1, 4, false, false),
        (1000, 4, false, false),
        (20_000, 4, true, false),
        (3_000, 1000, true, true),
    ] {
        let pairs = random_pairs(count, 5000, payload_bytes);
        let (sorted, stats) = sort(&options(5, payload_bytes), &pairs);
        let mut expected = pairs;
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        assert!(sorted == expected, "{count} records in order, equal keys in push order");
        assert_eq!((stats.run_count > 0, stats.merge_pass_count > 0), (runs, passes), "{stats:?}");
    }
    let (none, _) = sort(&options(12, 4), &[]);
    assert!(none.is_empty(), "no records of keys that are longer than their heads");
}

#[test]
fn a_changed_run_is_noticed() {
    let folder = MemoryFolder::new();
    let budget = Budget::unlimited();
    let shared: Arc<dyn Folder> = Arc::new(folder.clone());
    let mut sorter = ExternalSorter::new(shared, &options(5, 4), &budget).unwrap();
    for (key, payload) in random_pairs(20_000, 1 << 30, 4) {
        sorter.push(&key, &payload).unwrap();
    }
    let device = folder.open("sort.0", OpenMode::ReadWrite).unwrap();
    let mut byte = [0];
    device.read_at(20_001, &mut byte).unwrap();
    device.write_at(20_001, &[byte[0] ^ 4]).unwrap();
    let mut result = Ok(());
    let mut sorted = sorter.finish().unwrap();
    loop {
        match sorted.next() {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Corruption);
}

#[test]
fn too_little_memory_is_refused() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let budget = Budget::new(1000);
    let error = ExternalSorter::new(Arc::clone(&folder), &options(4, 4), &budget).unwrap_err();
    assert!(error.to_string().contains("at least 65536 bytes"), "{error}");
    let tiny = SorterOptions { memory_bytes: 10, ..options(4, 4) };
    assert!(ExternalSorter::new(folder, &tiny, &Budget::unlimited()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn equals_a_stable_sort(keys in proptest::collection::vec(0u16..300, 0..400), wide: bool) {
        let payload_bytes = if wide { 3000 } else { 4 };
        let pairs: Vec<_> = keys.iter().enumerate().map(|(at, key)| {
            let mut payload = (at as u32).to_le_bytes().to_vec();
            payload.resize(payload_bytes, 7);
            (key.to_be_bytes().to_vec(), payload)
        }).collect();
        let (sorted, _) = sort(&options(2, payload_bytes), &pairs);
        let mut expected = pairs;
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        prop_assert_eq!(sorted, expected);
    }
}

/// Counts what is written to a folder's one scratch file, and what of it takes space.
#[derive(Debug, Clone, Default)]
struct CountingFolder {
    files: MemoryFolder,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    written_bytes: AtomicU64,
    held_bytes: AtomicU64,
    peak_bytes: AtomicU64,
}

#[derive(Debug)]
struct CountingDevice {
    device: Arc<dyn Device>,
    counts: Arc<Counts>,
}

impl Folder for CountingFolder {
    fn path(&self) -> Option<&Path> {
        None
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        let device = self.files.open(name, mode)?;
        Ok(Arc::new(CountingDevice { device, counts: Arc::clone(&self.counts) }))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.files.read(name)
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.files.write_atomic(name, bytes)
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.files.write_durable(name, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.files.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.files.rename(from, to)
    }

    fn list(&self) -> Result<Vec<String>> {
        self.files.list()
    }

    fn sync(&self) -> Result<()> {
        self.files.sync()
    }

    fn lock(&self) -> Result<FolderLock> {
        self.files.lock()
    }
}

impl Device for CountingDevice {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.device.len_bytes()
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.device.set_len(len_bytes)
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.device.read_at(offset_bytes, out)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let len_bytes = bytes.len() as u64;
        self.counts.written_bytes.fetch_add(len_bytes, Relaxed);
        let held_bytes = self.counts.held_bytes.fetch_add(len_bytes, Relaxed) + len_bytes;
        self.counts.peak_bytes.fetch_max(held_bytes, Relaxed);
        self.device.write_at(offset_bytes, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.device.sync()
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        self.counts.held_bytes.fetch_sub(len_bytes, Relaxed);
        // A record read once more from there is noticed.
        self.device.write_at(offset_bytes, &vec![0xEE; len_bytes as usize]).unwrap();
        true
    }

    fn allocated_bytes(&self) -> Result<u64> {
        Ok(self.counts.held_bytes.load(Relaxed))
    }
}

/// Of three lengths: the first byte of the key says which.
fn mixed_pairs(count: u32) -> Pairs {
    let lengths = [4, 700, 40];
    let mut pairs = random_pairs(count, 1 << 40, 4);
    for (key, payload) in &mut pairs {
        key[0] %= 3;
        payload.resize(lengths[key[0] as usize], key[4]);
    }
    pairs
}

fn mixed_sorter(folder: &CountingFolder, memory_bytes: u64, budget: &Budget) -> ExternalSorter {
    let options = SorterOptions { memory_bytes, ..options(5, 700) };
    let classes = PayloadClasses { class_bytes: 1, payload_bytes: vec![4, 700, 40] };
    ExternalSorter::of_classes(Arc::new(folder.clone()), &options, &classes, budget).unwrap()
}

fn take_all(mut sorted: SortedRecords, mut each: impl FnMut(&[u8], &[u8])) {
    while let Some(record) = sorted.next().unwrap() {
        each(record.key, record.payload);
    }
}

#[test]
fn records_of_several_lengths_are_written_once_and_give_their_space_back() {
    let pairs = mixed_pairs(20_000);
    let record_bytes: usize = pairs.iter().map(|(key, payload)| key.len() + payload.len()).sum();
    let (folder, budget) = (CountingFolder::default(), Budget::new(512 << 10));
    let mut sorter = mixed_sorter(&folder, 256 << 10, &budget);
    for (key, payload) in &pairs {
        sorter.push(key, payload).unwrap();
    }
    let sorted = sorter.finish().unwrap();
    let stats = sorted.stats();
    assert!(stats.run_count > 15 && stats.merge_pass_count == 0, "{stats:?}");
    let mut expected = pairs;
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    let mut expected = expected.iter();
    let (mut taken_bytes, mut most_bytes) = (0, 0);
    take_all(sorted, |key, payload| {
        let (wanted_key, wanted) = expected.next().unwrap();
        assert!(key == wanted_key && payload == wanted, "a record in its place");
        taken_bytes += (key.len() + payload.len()) as u64;
        most_bytes = most_bytes.max(taken_bytes + folder.counts.held_bytes.load(Relaxed));
    });
    assert!(expected.next().is_none());
    let written = folder.counts.written_bytes.load(Relaxed) as f64 / record_bytes as f64;
    assert!(written <= 1.05, "{written} times the records were written");
    let most = most_bytes as f64 / record_bytes as f64;
    assert!(most <= 1.10, "records taken and scratch together held {most} times the records");
    assert_eq!(folder.counts.held_bytes.load(Relaxed), 0, "all space is given back");
    assert_eq!(stats.spilled_bytes, folder.counts.written_bytes.load(Relaxed));
}

#[test]
fn more_memory_saves_a_merge_and_less_merges_as_little_as_it_must() {
    let pairs = random_pairs(4000, 1 << 40, 600);
    let record_bytes = (pairs.len() * 605) as u64;
    // (bytes the budget has besides, merges before the last one, written per byte of records)
    for (more_bytes, pass_count, written_max) in [(4 << 20, 0, 1.1), (0, 1, 2.0)] {
        let folder = CountingFolder::default();
        let budget = Budget::new(MEMORY_BYTES_MIN + more_bytes);
        let shared: Arc<dyn Folder> = Arc::new(folder.clone());
        let mut sorter = ExternalSorter::new(shared, &options(5, 600), &budget).unwrap();
        for (key, payload) in &pairs {
            sorter.push(key, payload).unwrap();
        }
        let sorted = sorter.finish_with(u64::MAX).unwrap();
        assert!(budget.report().peak_bytes <= MEMORY_BYTES_MIN + more_bytes);
        assert_eq!(sorted.stats().merge_pass_count, pass_count, "{:?}", sorted.stats());
        let mut expected = pairs.clone();
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        let mut expected = expected.iter();
        take_all(sorted, |key, payload| {
            assert!(expected.next().is_some_and(|(k, p)| key == k && payload == p));
        });
        let written = folder.counts.written_bytes.load(Relaxed) as f64 / record_bytes as f64;
        assert!(written <= written_max, "{written} times the records were written");
        let peak = folder.counts.peak_bytes.load(Relaxed) as f64 / record_bytes as f64;
        assert!(peak <= 1.2, "{peak} times the records were held");
    }
}

#[test]
fn so_many_rows_as_a_disk_holds_are_merged_twice_at_most() {
    // Rows of 64 weights in what a budget of 512 MiB leaves to a publish: half of it makes runs,
    // three quarters of the other half are free when they are merged.
    let aside_bytes: u64 = (512 << 20) / 12;
    let sort_bytes = aside_bytes / 2;
    let merge_bytes = sort_bytes + sort_bytes / 4 / 4 * 3;
    let record_bytes = 264;
    let held = sort_bytes as usize - write_bytes(sort_bytes);
    let run_bytes = held / (record_bytes + size_of::<Place>()) * record_bytes;
    let at_once = merge::fan_in(merge_bytes as usize, record_bytes);
    // (bytes of rows, merges of a row)
    for (bytes, merges) in [(15_000_000_000usize, 1), (1_000_000_000_000, 2)] {
        let run_count = bytes.div_ceil(run_bytes);
        assert!(run_count <= at_once.pow(merges), "{run_count} runs, {at_once} at once");
    }
}
