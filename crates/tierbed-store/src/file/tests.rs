use std::sync::Arc;

use tierbed_core::conformance::check_row_store;
use tierbed_core::store::{Attachment, RowWrite};
use tierbed_core::{Budget, ErrorKind, Result, RowId, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, Folder, FsFolder, MemoryFolder, OpenMode};
use tierbed_sim::rows::table;

use super::{FileStore, FileStoreOptions};

mod scans;

fn options(choice: EngineChoice, queue_depth: u32) -> FileStoreOptions {
    FileStoreOptions {
        budget: Budget::new(16 << 20),
        engine: EngineOptions { choice, queue_depth, buf_bytes: 4096 },
        disk_quota_bytes: None,
    }
}

fn memory_store(folder: &Arc<dyn Folder>) -> Result<FileStore> {
    FileStore::open(folder.clone(), options(EngineChoice::Inline, 4))
}

fn write_one(store: &mut FileStore, row: u64, fill: u8) -> Result<()> {
    let record = vec![fill; store.schema().table(TableId(0))?.record_bytes()];
    let key = RowKey::new(TableId(0), RowId(row));
    store.write(&[RowWrite { key, record: &record }])
}

fn read_one(store: &mut FileStore, row: u64) -> Result<Option<u8>> {
    let mut found = None;
    store.read(&[RowKey::new(TableId(0), RowId(row))], &mut |_, record| {
        found = record.and_then(|record| record.first().copied());
        Ok(())
    })?;
    Ok(found)
}

#[test]
fn keeps_the_waists_promise_on_every_engine() {
    for choice in [EngineChoice::Auto, EngineChoice::Pread, EngineChoice::Inline] {
        for (seed, queue_depth) in [(1, 1), (2, 3), (3, 64)] {
            let scratch = tempfile::tempdir().unwrap();
            let open = || -> Result<Box<dyn TrainStore>> {
                let folder = Arc::new(FsFolder::create(scratch.path())?);
                Ok(Box::new(FileStore::open(folder, options(choice, queue_depth))?))
            };
            let store = open().unwrap();
            let mut reopen = |old, _| {
                drop(old);
                open()
            };
            check_row_store(store, Some(&mut reopen), seed, 120).unwrap();
        }
    }
}

/// Reads `rows` of a table of 16 numbers a row; returns the first byte of each.
fn read_many(store: &mut FileStore, rows: &[u64]) -> Result<Vec<Option<u8>>> {
    let keys: Vec<RowKey> = rows.iter().map(|row| RowKey::new(TableId(0), RowId(*row))).collect();
    let mut found = vec![Some(0); keys.len()];
    store.read(&keys, &mut |at, record| {
        assert_eq!(std::mem::take(&mut found[at]), Some(0), "row {at} comes twice");
        found[at] = record.and_then(|record| record.first().copied());
        Ok(())
    })?;
    Ok(found)
}

#[test]
fn pages_close_together_are_read_at_once_and_each_is_checked() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    let byte = |row: u64, after: u64| (row % 5 + after) as u8 + 1;
    for row in (0..50_000).filter(|row| row % 7 != 0) {
        write_one(&mut store, row, byte(row, 0)).unwrap();
    }
    store.commit("one", &[]).unwrap();
    // These pages are in their other slots now.
    for row in (0..50_000).step_by(150).filter(|row| row % 7 != 0) {
        write_one(&mut store, row, byte(row, 9)).unwrap();
    }
    let wanted = |row: u64| match row {
        row if row % 7 == 0 || row >= 50_000 => None,
        row if row % 150 == 0 => Some(byte(row, 9)),
        row => Some(byte(row, 0)),
    };
    // All pages, every third of them, and few that lie far apart.
    let pages_apart = |store: &mut FileStore, step: usize| {
        let rows: Vec<u64> = (0..60_000).step_by(step).collect();
        let before = store.stats();
        let found = read_many(store, &rows).unwrap();
        assert!(found.iter().zip(&rows).all(|(found, row)| *found == wanted(*row)), "{step}");
        let after = store.stats();
        assert_eq!(after.rows_read - before.rows_read, rows.len() as u64);
        let pages = after.pages_read - before.pages_read;
        (pages, after.io.read_count - before.io.read_count)
    };
    for step in [1, 40] {
        let (pages, reads) = pages_apart(&mut store, step);
        assert!(pages > 500 && reads * 20 < pages, "{reads} reads of {pages} pages");
    }
    let (pages, reads) = pages_apart(&mut store, 100);
    assert_eq!(pages, reads, "a request of few rows");
    // Nothing is left in memory.
    assert!(store.options.budget.report().peak_bytes > 1 << 20);
    assert!(store.options.budget.free_bytes() > 14 << 20);
    // A damaged page fails the rows on it, and no other ones.
    let device = folder.open("t.rows", OpenMode::ReadWrite).unwrap();
    let mut page = tierbed_io::AlignedBuf::new(4096);
    device.read_at(100 * 4096, &mut page).unwrap();
    page[700] ^= 1;
    device.write_at(100 * 4096, &page).unwrap();
    let rows_per_page = super::page_layout(store.schema().table(TableId(0)).unwrap()).rows_per_page;
    let outside: Vec<u64> = (0..60_000).filter(|row| row / rows_per_page != 100).collect();
    let found = read_many(&mut store, &outside).unwrap();
    assert!(found.iter().zip(&outside).all(|(found, row)| *found == wanted(*row)));
    let all: Vec<u64> = (0..60_000).collect();
    let error = read_many(&mut store, &all).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
}

#[test]
fn reopens_at_the_last_commit_and_finds_its_attachments() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    write_one(&mut store, 5, 1).unwrap();
    store.commit("one", &[Attachment { name: "dense", bytes: b"abc" }]).unwrap();
    write_one(&mut store, 5, 2).unwrap();
    write_one(&mut store, 6, 2).unwrap();
    assert_eq!(read_one(&mut store, 5).unwrap(), Some(2));
    drop(store);
    let mut store = memory_store(&folder).unwrap();
    assert_eq!(store.last_commit().unwrap().name, "one");
    assert_eq!(read_one(&mut store, 5).unwrap(), Some(1));
    assert_eq!(read_one(&mut store, 6).unwrap(), None);
    assert_eq!(store.attachment("dense").unwrap().as_deref(), Some(&b"abc"[..]));
    assert_eq!(store.attachment("other").unwrap(), None);
}

#[test]
fn a_second_opener_is_told_who_owns_the_store() {
    let scratch = tempfile::tempdir().unwrap();
    let open = || {
        let folder = Arc::new(FsFolder::create(scratch.path())?);
        FileStore::open(folder, options(EngineChoice::Auto, 4))
    };
    let first = open().unwrap();
    let error = open().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Closed);
    drop(first);
    open().unwrap();
}

#[test]
fn every_damaged_page_is_found_by_read_and_verify() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    write_one(&mut store, 5, 1).unwrap();
    store.commit("one", &[]).unwrap();
    let device = folder.open("t.rows", OpenMode::ReadWrite).unwrap();
    let mut page = tierbed_io::AlignedBuf::new(4096);
    device.read_at(0, &mut page).unwrap();
    page[700] ^= 1;
    device.write_at(0, &page).unwrap();
    for error in [read_one(&mut store, 5).unwrap_err(), store.verify().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert!(error.to_string().contains("t.rows"), "{error}");
    }
    assert_eq!(read_one(&mut store, 100).unwrap(), None, "other pages stay readable");
}

#[test]
fn a_truncated_or_missing_table_file_is_corruption_at_open() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    write_one(&mut store, 5, 1).unwrap();
    store.commit("one", &[]).unwrap();
    drop(store);
    let device = folder.open("t.rows", OpenMode::ReadWrite).unwrap();
    let len_bytes = device.len_bytes().unwrap();
    device.set_len(len_bytes - 4096).unwrap();
    assert_eq!(memory_store(&folder).err().unwrap().kind(), ErrorKind::Corruption);
    device.set_len(len_bytes).unwrap();
    memory_store(&folder).unwrap();
    folder.remove("t.rows").unwrap();
    assert_eq!(memory_store(&folder).err().unwrap().kind(), ErrorKind::Corruption);
}

#[test]
fn a_folder_of_something_else_is_refused() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    folder.write_atomic("holiday.jpg", b"x").unwrap();
    assert_eq!(memory_store(&folder).err().unwrap().kind(), ErrorKind::Invalid);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    folder.write_atomic("CURRENT", b"MANIFEST-000001\n").unwrap();
    assert_eq!(memory_store(&folder).err().unwrap().kind(), ErrorKind::Invalid);
}

#[test]
fn the_quota_stops_growth_and_loses_nothing_committed() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let quota =
        FileStoreOptions { disk_quota_bytes: Some(100_000), ..options(EngineChoice::Inline, 4) };
    let mut store = FileStore::open(folder.clone(), quota.clone()).unwrap();
    store.add_table(table("t", 16, 10_000)).unwrap();
    write_one(&mut store, 0, 1).unwrap();
    store.commit("one", &[]).unwrap();
    let full = (0..10_000).step_by(60).find_map(|row| write_one(&mut store, row, 2).err()).unwrap();
    assert_eq!(full.kind(), ErrorKind::NoSpace);
    assert!(store.stats().disk_bytes <= 100_000);
    drop(store);
    let mut store = FileStore::open(folder, quota).unwrap();
    assert_eq!(read_one(&mut store, 0).unwrap(), Some(1));
    assert_eq!(read_one(&mut store, 60).unwrap(), None);
}

#[test]
fn a_budget_below_the_page_maps_names_the_minimum() {
    let small =
        FileStoreOptions { budget: Budget::new(600_000), ..options(EngineChoice::Inline, 4) };
    let mut store = FileStore::open(Arc::new(MemoryFolder::default()), small).unwrap();
    let error = store.add_table(table("big", 16, 100_000_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("at least"), "{error}");
    store.add_table(table("small", 16, 1000)).unwrap();
}

#[test]
fn whole_pages_are_written_without_being_read() {
    let mut store = memory_store(&(Arc::new(MemoryFolder::default()) as Arc<dyn Folder>)).unwrap();
    let id = store.add_table(table("t", 16, 1000)).unwrap();
    let rows_per_page = super::page_layout(&table("t", 16, 1000)).rows_per_page;
    let record = vec![7u8; 68];
    let keys: Vec<_> = (0..rows_per_page).map(|row| RowKey::new(id, RowId(row))).collect();
    let rows: Vec<_> = keys.iter().map(|key| RowWrite { key: *key, record: &record }).collect();
    store.write(&rows).unwrap();
    store.write(&rows).unwrap();
    let stats = store.stats();
    assert_eq!((stats.pages_read, stats.pages_written), (0, 2));
    store.write(&rows[..1]).unwrap();
    assert_eq!(store.stats().pages_read, 1);
}

#[test]
fn a_new_or_longer_table_is_whole_after_power_loss_though_no_row_was_written() {
    let disk = tierbed_sim::SimFolder::default();
    let folder: Arc<dyn Folder> = Arc::new(disk.clone());
    let mut store = memory_store(&folder).unwrap();
    let id = store.add_table(table("t", 4, 300)).unwrap();
    store.commit("new", &[]).unwrap();
    let after_new: Arc<dyn Folder> = Arc::new(disk.crash_to_synced());
    assert_eq!(read_one(&mut memory_store(&after_new).unwrap(), 299).unwrap(), None);
    store.grow_table(id, 9_000).unwrap();
    store.commit("longer", &[]).unwrap();
    drop(store);
    let after_growth: Arc<dyn Folder> = Arc::new(disk.crash_to_synced());
    assert_eq!(read_one(&mut memory_store(&after_growth).unwrap(), 8_999).unwrap(), None);
}

#[test]
fn rows_stay_where_they_are_when_a_table_grows_and_growth_without_commit_is_forgotten() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let mut store = memory_store(&folder).unwrap();
    let id = store.add_table(table("t", 64, 40)).unwrap();
    for (step, row_count) in [(1, 100), (2, 101), (3, 5_000)] {
        write_one(&mut store, 39, step).unwrap();
        store.grow_table(id, row_count).unwrap();
        write_one(&mut store, row_count - 1, step).unwrap();
        store.commit("grown", &[]).unwrap();
    }
    store.grow_table(id, 90_000).unwrap();
    write_one(&mut store, 89_999, 9).unwrap();
    drop(store);
    let mut store = memory_store(&folder).unwrap();
    assert_eq!(store.schema().table(id).unwrap().row_count, 5_000);
    for (row, step) in [(39, 3), (99, 1), (100, 2), (4_999, 3)] {
        assert_eq!(read_one(&mut store, row).unwrap(), Some(step), "row {row}");
    }
    assert!(read_one(&mut store, 89_999).is_err());
    store.grow_table(id, 90_000).unwrap();
    assert_eq!(read_one(&mut store, 89_999).unwrap(), None, "no old bytes come back");
}

/// Writes rows of a table of 16 numbers a row at once, each filled with its byte.
fn write_many(store: &mut FileStore, rows: &[u64], byte: impl Fn(u64) -> u8) -> Result<()> {
    let len = store.schema().table(TableId(0))?.record_bytes();
    let records: Vec<Vec<u8>> = rows.iter().map(|row| vec![byte(*row); len]).collect();
    let writes: Vec<_> = rows
        .iter()
        .zip(&records)
        .map(|(row, record)| RowWrite { key: RowKey::new(TableId(0), RowId(*row)), record })
        .collect();
    store.write(&writes)
}

#[test]
fn whole_pages_side_by_side_are_written_at_once() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    let rows: Vec<u64> = (0..60_000).collect();
    for round in 0..3 {
        let before = store.stats();
        write_many(&mut store, &rows, |row| (row % 7) as u8 + round).unwrap();
        let after = store.stats();
        let pages = after.pages_written - before.pages_written;
        let writes = after.io.write_count - before.io.write_count;
        assert!(pages > 1000 && writes * 100 < pages, "{writes} writes of {pages} pages");
        // The last page may have fewer rows than fit.
        assert!(after.pages_read - before.pages_read <= 1, "whole pages need no read");
        assert_eq!(store.verify().unwrap(), pages);
        store.commit("c", &[]).unwrap();
    }
    assert!(store.options.budget.free_bytes() > 14 << 20, "nothing is left in memory");
    let found = read_many(&mut store, &rows).unwrap();
    assert!(found.iter().zip(&rows).all(|(found, row)| *found == Some((*row % 7) as u8 + 2)));
}

#[test]
fn runs_of_any_rows_hold_what_a_map_holds() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 20_000)).unwrap();
    let mut random = tierbed_core::env::SplitMix64::new(5);
    let (mut held, mut committed) = (vec![None; 20_000], vec![None; 20_000]);
    for round in 0..40u8 {
        let first = random.below(18_000);
        let last = first + 1 + random.below(20_000 - first);
        let step = 1 + random.below(3) * random.below(3);
        let rows: Vec<u64> = (first..last).filter(|row| step == 1 || row % 61 > step).collect();
        write_many(&mut store, &rows, |row| round.wrapping_add(row as u8)).unwrap();
        for row in rows {
            held[row as usize] = Some(round.wrapping_add(row as u8));
        }
        match random.below(5) {
            0 | 1 => {
                store.commit("c", &[]).unwrap();
                committed.clone_from(&held);
            }
            2 => {
                drop(store);
                store = memory_store(&folder).unwrap();
                held.clone_from(&committed);
                if store.schema().tables().is_empty() {
                    store.add_table(table("t", 16, 20_000)).unwrap();
                }
            }
            _ => {}
        }
        let all: Vec<u64> = (0..20_000).collect();
        assert!(read_many(&mut store, &all).unwrap() == held, "round {round}");
        let scanned: Vec<_> = scans::scan_all(&mut store).unwrap();
        let written = (0..).zip(&held).filter_map(|(row, byte)| byte.map(|byte| (row, byte)));
        assert!(written.eq(scanned), "round {round}");
    }
}

#[test]
fn a_run_beyond_the_quota_is_refused_and_loses_nothing() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let quota = Some(1 << 20);
    let options = FileStoreOptions { disk_quota_bytes: quota, ..options(EngineChoice::Inline, 4) };
    let mut store = FileStore::open(folder.clone(), options).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    let few: Vec<u64> = (0..2000).collect();
    write_many(&mut store, &few, |_| 3).unwrap();
    store.commit("few", &[]).unwrap();
    let all: Vec<u64> = (0..60_000).collect();
    let error = write_many(&mut store, &all, |_| 4).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    drop(store);
    let mut store = memory_store(&folder).unwrap();
    assert!(read_many(&mut store, &few).unwrap().iter().all(|found| *found == Some(3)));
}
