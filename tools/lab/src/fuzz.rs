//! Entries for `tools/fuzz/`, not an interface: any bytes given to the readers of this crate.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! reads them as training would. Damage is an error, which is fine; anything else is a bug.

use std::os::unix::fs::FileExt;

use rustix::fs::{memfd_create, MemfdFlags};

use crate::trace::{mend, TraceReader};

const PAGE_BYTES: usize = 4096;
/// The part of a header that says something.
const HEADER_BYTES: usize = 456;
/// A header and a page for each column.
const FILE_BYTES_MIN: u64 = 27 * PAGE_BYTES as u64;

/// A trace: the beginning of its header, then what lies behind the first page.
pub fn trace(bytes: &[u8]) {
    let (header, columns) = bytes.split_at(bytes.len().min(HEADER_BYTES));
    let mut page = header.to_vec();
    page.resize(PAGE_BYTES, 0);
    mend(&mut page);
    let Ok(memory) = memfd_create("trace", MemfdFlags::CLOEXEC) else { return };
    let file = std::fs::File::from(memory);
    let is_written = file.set_len(FILE_BYTES_MIN).is_ok()
        && file.write_all_at(&page, 0).is_ok()
        && file.write_all_at(columns, PAGE_BYTES as u64).is_ok();
    let Ok(mut reader) = TraceReader::of(file) else { return };
    assert!(is_written, "memory takes what it is given");
    let row_counts = reader.row_counts();
    let mut ids = Vec::new();
    let last = reader.sample_count().saturating_sub(1);
    for (first, count) in [(0, 1), (0, 5), (last, 1), (last, 2), (u64::MAX, 1)] {
        if reader.read(first, count, &mut ids).is_err() {
            continue;
        }
        assert_eq!(ids.len(), 26 * count, "every feature of every sample");
        for (ids, row_count) in ids.chunks(count).zip(row_counts) {
            assert!(ids.iter().all(|id| (*id as u64) < row_count), "ids are rows");
        }
    }
}
