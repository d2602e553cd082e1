//! Logs with several step commits: cut anywhere, damaged anywhere.

use super::*;
use crate::key::Key;
use crate::wal::Segment;
use proptest::prelude::*;
use tierbed_core::{ErrorKind, RowId, RowKey, TableId};
use tierbed_io::{MemoryFolder, OpenMode};

const BASE_NUMBER: u64 = 7;

fn key(row: u64) -> Key {
    Key::cold(RowKey::new(TableId(0), RowId(row)))
}

fn commit(segment: &mut Segment, number: u64) {
    let mut entry = Entry::default();
    let name = format!("step-{number}");
    let bytes = number.to_le_bytes();
    let attachments = [Attachment { name: "position", bytes: &bytes }];
    let info = CommitInfo { number, name };
    StepCommit::encode(&mut entry, &info, &attachments);
    segment.append_commit(&mut entry).unwrap();
    segment.sync().unwrap();
}

fn rows(segment: &mut Segment, row: u64) {
    let mut entry = Entry::default();
    entry.clear();
    entry.push(key(row), &[1; 8]);
    segment.append(&mut entry).unwrap();
}

/// The full commit ends in segment 3; steps 8 and 9 follow there, step 10 in segment 4; then
/// rows that no step commits. Returns the base and the ends of the steps.
fn written(folder: &MemoryFolder) -> (SegmentMeta, Vec<(SegmentId, u64)>) {
    let mut ends = Vec::new();
    let mut segment = Segment::create(folder, SegmentId(3)).unwrap();
    rows(&mut segment, 1);
    let base = segment.meta;
    for number in [8, 9] {
        rows(&mut segment, number);
        rows(&mut segment, number + 50);
        commit(&mut segment, number);
        ends.push((segment.meta.id, segment.meta.len_bytes));
    }
    let mut segment = Segment::create(folder, SegmentId(4)).unwrap();
    rows(&mut segment, 10);
    commit(&mut segment, 10);
    ends.push((segment.meta.id, segment.meta.len_bytes));
    rows(&mut segment, 99);
    (base, ends)
}

fn found(folder: &MemoryFolder, base: SegmentMeta) -> Result<Tail> {
    find_tail(folder, &[base], 4, BASE_NUMBER, &Budget::unlimited())
}

#[test]
fn the_tail_ends_with_the_last_whole_step() {
    let folder = MemoryFolder::default();
    let (base, ends) = written(&folder);
    let tail = found(&folder, base).unwrap();
    let step = tail.commit.unwrap();
    assert_eq!((step.info.number, step.info.name.as_str()), (10, "step-10"));
    assert_eq!(step.attachments, [("position".to_owned(), 10u64.to_le_bytes().to_vec())]);
    let reached: Vec<_> = tail.segments.iter().map(|segment| segment.len_bytes).collect();
    assert_eq!(reached, [ends[1].1, ends[2].1]);
    assert_eq!(tail.next_segment, 5);
    assert_eq!(tail.len_bytes, ends[1].1 - base.len_bytes + ends[2].1);
}

#[test]
fn a_log_cut_anywhere_ends_with_the_last_step_before_the_cut() {
    let whole = MemoryFolder::default();
    let (base, ends) = written(&whole);
    for (id, number_before) in [(SegmentId(3), BASE_NUMBER), (SegmentId(4), 9)] {
        let bytes = whole.read(&id.file_name()).unwrap().unwrap();
        let first = if id == SegmentId(3) { base.len_bytes } else { 0 };
        for cut in first..=bytes.len() as u64 {
            let folder = MemoryFolder::default();
            let (base, _) = written(&folder);
            folder.open(&id.file_name(), OpenMode::ReadWrite).unwrap().set_len(cut).unwrap();
            if id == SegmentId(3) {
                folder.remove("000004.wal").unwrap();
            }
            let steps = ends.iter().filter(|(at, end)| *at == id && *end <= cut).count() as u64;
            let tail = found(&folder, base).unwrap();
            assert_eq!(tail.number(BASE_NUMBER), number_before + steps, "{id:?} cut at {cut}");
        }
    }
}

/// A log as long as a write buffer was once read whole at opening: a store that was killed could
/// not be opened with the budget it had been trained with.
#[test]
fn a_long_log_needs_the_memory_of_its_longest_entry() {
    let folder = MemoryFolder::default();
    let mut segment = Segment::create(&folder, SegmentId(3)).unwrap();
    let base = segment.meta;
    let mut entry_bytes = 0;
    for number in 8..200 {
        let before = segment.meta.len_bytes;
        rows(&mut segment, number);
        commit(&mut segment, number);
        entry_bytes = segment.meta.len_bytes - before;
    }
    assert!(segment.meta.len_bytes > 100 * entry_bytes);
    let budget = Budget::new(entry_bytes);
    let tail = find_tail(&folder, &[base], 4, BASE_NUMBER, &budget).unwrap();
    assert_eq!(tail.number(BASE_NUMBER), 199);
    let schema = tierbed_core::Schema::new(vec![tierbed_core::TableSchema::plain("t", 200, 1)]);
    let mut seen = 0;
    crate::wal::replay(&folder, &schema.unwrap(), tail.segments[0], &budget, &mut |_, _| {
        seen += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!(seen, 192);
}

/// What looks like a header is searched in pieces: one that lies across two of them is found.
#[test]
fn an_entry_far_behind_a_broken_one_is_found() {
    for gap in 0..60 {
        let folder = MemoryFolder::default();
        let mut segment = Segment::create(&folder, SegmentId(3)).unwrap();
        let base = segment.meta;
        commit(&mut segment, 8);
        let broken_at = segment.meta.len_bytes;
        let mut entry = Entry::default();
        entry.clear();
        entry.extend(&vec![7; 16_370 - gap]);
        segment.append(&mut entry).unwrap();
        commit(&mut segment, 9);
        commit(&mut segment, 10);
        let device = folder.open("000003.wal", OpenMode::ReadWrite).unwrap();
        device.write_at(broken_at + 30, &[1]).unwrap();
        let error = find_tail(&folder, &[base], 4, BASE_NUMBER, &Budget::unlimited()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "gap {gap}");
    }
}

#[test]
fn a_log_without_steps_is_the_full_commits_alone() {
    let folder = MemoryFolder::default();
    let (base, _) = written(&folder);
    let none = find_tail(&folder, &[], 9, BASE_NUMBER, &Budget::unlimited()).unwrap();
    let expected = Tail { segments: vec![], commit: None, next_segment: 9, len_bytes: 0 };
    assert_eq!(none, expected);
    let error = find_tail(&folder, &[base], 4, BASE_NUMBER, &Budget::new(10)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    // Steps of another history do not follow commit 20.
    let error = find_tail(&folder, &[base], 4, 20, &Budget::unlimited()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
}

proptest! {
    /// A flipped bit before the last step's own entries is damage; in the last step it may pass
    /// for a step that never finished, never for anything else.
    #[test]
    fn a_damaged_step_is_noticed_or_taken_for_unfinished(position in any::<u64>()) {
        let folder = MemoryFolder::default();
        let (base, ends) = written(&folder);
        let lengths = [ends[1].1 - base.len_bytes, ends[2].1];
        let bit = position % ((lengths[0] + lengths[1]) * 8);
        let (file, at) = match (bit / 8).checked_sub(lengths[0]) {
            None => ("000003.wal", base.len_bytes + bit / 8),
            Some(at) => ("000004.wal", at),
        };
        let device = folder.open(file, OpenMode::ReadWrite).unwrap();
        let mut byte = [0];
        device.read_at(at, &mut byte).unwrap();
        device.write_at(at, &[byte[0] ^ 1 << (bit % 8)]).unwrap();
        match found(&folder, base) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corruption),
            Ok(tail) => {
                prop_assert_eq!(file, "000004.wal");
                prop_assert_eq!(tail.number(BASE_NUMBER), 9);
            }
        }
    }

    #[test]
    fn random_payloads_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = StepCommit::decode(&bytes);
    }
}
