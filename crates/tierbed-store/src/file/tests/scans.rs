//! Scans of tables of many pages, which are read in runs.

use super::*;
use tierbed_core::store::ScanSink;
use tierbed_core::Error;

/// Scans the table; returns each row's number and first byte.
pub(super) fn scan_all(store: &mut FileStore) -> Result<Vec<(u64, u8)>> {
    let mut found = Vec::new();
    store.scan(TableId(0), &mut |row, record| {
        assert!(record.iter().all(|byte| Some(byte) == record.first()), "row {row:?} is whole");
        found.push((row.0, record.first().copied().unwrap_or_default()));
        Ok(())
    })?;
    Ok(found)
}

struct Counted {
    pages: u64,
    reads: u64,
    bytes: u64,
}

fn counted(store: &mut FileStore, scan: impl FnOnce(&mut FileStore)) -> Counted {
    let before = store.stats();
    scan(store);
    let after = store.stats();
    assert!(after.io.submit_count > before.io.submit_count, "reads are handed over");
    Counted {
        pages: after.pages_read - before.pages_read,
        reads: after.io.read_count - before.io.read_count,
        bytes: after.io.read_bytes - before.io.read_bytes,
    }
}

fn byte(row: u64, round: u64) -> u8 {
    (row % 50 + 100 * round) as u8 + 1
}

/// A table that grew twice, with pages in either slot and pages that were never written.
fn mixed(store: &mut FileStore) -> Vec<(u64, u8)> {
    let id = store.add_table(table("t", 16, 30_000)).unwrap();
    let mut held = std::collections::BTreeMap::new();
    for (round, row_count) in [(0, 30_000), (1, 30_900), (2, 70_000)] {
        store.grow_table(id, row_count).unwrap();
        // From 50,000 on few pages are written, and far apart.
        let is_written = |row: &u64| match *row {
            row if row >= 50_000 => row / 1000 % 2 == 0 && row % 1000 < 3,
            row if row / 600 % 7 == 3 => false,
            row => round == 0 || row / 170 % 3 == round,
        };
        let rows: Vec<u64> = (0..row_count).filter(is_written).collect();
        write_many(store, &rows, |row| byte(row, round)).unwrap();
        held.extend(rows.into_iter().map(|row| (row, byte(row, round))));
        store.commit("c", &[]).unwrap();
    }
    held.into_iter().collect()
}

#[test]
fn runs_of_both_slots_give_rows_in_order() {
    for choice in [EngineChoice::Auto, EngineChoice::Pread, EngineChoice::Inline] {
        let scratch = tempfile::tempdir().unwrap();
        let folder = Arc::new(FsFolder::create(scratch.path()).unwrap());
        let mut store = FileStore::open(folder, options(choice, 64)).unwrap();
        let wanted = mixed(&mut store);
        let first = store.tables.first().unwrap();
        let words = (0..first.layout.page_count).map(|page| first.map.get(page));
        let slots: Vec<u64> =
            words.filter(|word| word.is_written()).map(|word| word.slot()).collect();
        assert!(slots.contains(&0) && slots.contains(&1), "pages lie in both slots");
        let free_bytes = store.options.budget.free_bytes();
        let scan = counted(&mut store, |store| assert!(scan_all(store).unwrap() == wanted));
        assert_eq!(scan.pages, slots.len() as u64);
        assert!(scan.reads * 5 < scan.pages, "{} reads of {} pages", scan.reads, scan.pages);
        assert!(scan.bytes < 3 * 4096 * scan.pages, "{} bytes", scan.bytes);
        assert_eq!(store.verify().unwrap(), scan.pages);
        assert_eq!(store.options.budget.free_bytes(), free_bytes, "nothing is left in memory");
    }
}

#[test]
fn a_full_table_is_read_in_few_runs() {
    let mut store = memory_store(&(Arc::new(MemoryFolder::default()) as Arc<dyn Folder>)).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    let rows: Vec<u64> = (0..60_000).collect();
    write_many(&mut store, &rows, |row| byte(row, 0)).unwrap();
    let scan = counted(&mut store, |store| assert_eq!(scan_all(store).unwrap().len(), 60_000));
    assert!(scan.pages > 1000 && scan.reads * 30 < scan.pages, "{} reads", scan.reads);
    assert_eq!(scan.bytes, 4096 * scan.pages, "nothing else is read");
}

#[test]
fn a_scan_without_memory_for_runs_reads_page_by_page() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let budget = Budget::new(1 << 20);
    let small = FileStoreOptions { budget, ..options(EngineChoice::Inline, 4) };
    let mut store = FileStore::open(folder.clone(), small).unwrap();
    let wanted = mixed(&mut store);
    let scan = counted(&mut store, |store| assert!(scan_all(store).unwrap() == wanted));
    assert_eq!(scan.reads, scan.pages);
    drop(store);
    // A table of few pages is not worth the memory.
    let mut store = memory_store(&(Arc::new(MemoryFolder::default()) as Arc<dyn Folder>)).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    write_many(&mut store, &(0..1000).collect::<Vec<_>>(), |row| byte(row, 0)).unwrap();
    let scan = counted(&mut store, |store| assert_eq!(scan_all(store).unwrap().len(), 1000));
    assert_eq!(scan.reads, scan.pages);
}

#[test]
fn a_damaged_page_of_a_run_is_named_and_ends_the_scan() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut store = memory_store(&folder).unwrap();
    store.add_table(table("t", 16, 60_000)).unwrap();
    let rows: Vec<u64> = (0..60_000).collect();
    write_many(&mut store, &rows, |row| byte(row, 0)).unwrap();
    store.commit("c", &[]).unwrap();
    let device = folder.open("t.rows", OpenMode::ReadWrite).unwrap();
    let mut page = tierbed_io::AlignedBuf::new(4096);
    let rows_per_page = store.tables.first().unwrap().layout.rows_per_page;
    // A flipped bit, and another page in its place.
    for source in [100, 101] {
        device.read_at(100 * 4096, &mut page).unwrap();
        let kept = page.to_vec();
        device.read_at(source * 4096, &mut page).unwrap();
        page[700] ^= u8::from(source == 100);
        device.write_at(100 * 4096, &page).unwrap();
        let mut seen = 0;
        let sink: &mut ScanSink<'_> = &mut |row, _| {
            assert_eq!(row.0, seen);
            seen += 1;
            Ok(())
        };
        let error = store.scan(TableId(0), sink).unwrap_err();
        assert_eq!(seen, 100 * rows_per_page, "all rows before it were visited");
        for error in [error, store.verify().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Corruption);
            let text = error.to_string();
            assert!(text.contains("t.rows") && text.contains("page: 100"), "{text}");
        }
        page.copy_from_slice(&kept);
        device.write_at(100 * 4096, &page).unwrap();
        assert_eq!(scan_all(&mut store).unwrap().len(), 60_000, "the store goes on");
    }
}

#[test]
fn an_error_of_the_sink_ends_the_scan_with_nothing_in_flight() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let mut store = FileStore::open(folder, options(EngineChoice::Auto, 64)).unwrap();
    let wanted = mixed(&mut store);
    let free_bytes = store.options.budget.free_bytes();
    for last in [0, 20_000, 49_000, 60_001] {
        let sink: &mut ScanSink<'_> = &mut |row, _| match row.0 >= last {
            true => Err(Error::invalid("enough")),
            false => Ok(()),
        };
        assert_eq!(store.scan(TableId(0), sink).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(store.engine.in_flight_count(), 0);
        assert_eq!(store.options.budget.free_bytes(), free_bytes);
    }
    assert!(scan_all(&mut store).unwrap() == wanted);
}
