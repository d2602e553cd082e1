#![expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]

use crate::{MemoryFolder, OpenMode};
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
