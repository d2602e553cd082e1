//! Do the baselines keep the waist's promise, also when they are killed?

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::sync::Arc;

use common::{has_rocksdb, scratch, stores, Open};
use tierbed_compare::{HashDb, HashDbOptions};
use tierbed_core::conformance::check_row_store;
use tierbed_core::store::Attachment;
use tierbed_core::{Budget, ErrorKind, RowStore, TableId, TrainStore};
use tierbed_io::{Folder, FsFolder};
use tierbed_sim::rows::{row, table, versions, write_version};

#[test]
fn all_keep_the_waists_promise_over_crashes() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut reopen = |old, _| {
            drop(old);
            open(scratch.path(), None)
        };
        let store = open(scratch.path(), None).unwrap();
        let checked = check_row_store(store, Some(&mut reopen), 1, 120);
        checked.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn all_reopen_at_the_last_commit_with_its_attachments() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut store = open(scratch.path(), None).unwrap();
        store.add_table(table("t", 16, 1000)).unwrap();
        write_version(store.as_mut(), &[row(0, 5)], 1).unwrap();
        store.commit("one", &[Attachment { name: "dense", bytes: b"abc" }]).unwrap();
        for version in 2..40 {
            let rows: Vec<_> = (0..300).map(|at| row(0, at * 3)).collect();
            write_version(store.as_mut(), &rows, version).unwrap();
        }
        drop(store);
        for _ in 0..2 {
            let mut store = open(scratch.path(), None).unwrap();
            assert_eq!(store.last_commit().unwrap().name, "one", "{name}");
            let found = versions(store.as_mut(), &[row(0, 3), row(0, 5)]).unwrap();
            assert_eq!(found, [None, Some(1)], "{name}");
            assert_eq!(store.attachment("dense").unwrap().as_deref(), Some(&b"abc"[..]), "{name}");
            store.verify().unwrap();
        }
    }
}

#[test]
fn no_row_is_stale_while_rows_are_written_again_and_again() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut store = open(scratch.path(), None).unwrap();
        store.add_table(table("t", 8, 20_000)).unwrap();
        let mut rng = tierbed_core::env::SplitMix64::new(3);
        let mut model = vec![None; 20_000];
        for step in 1..=40u32 {
            let skew = |rng: &mut tierbed_core::env::SplitMix64| {
                (rng.unit_f64() * rng.unit_f64() * 20_000.0) as u64
            };
            let mut rows: Vec<_> = (0..300).map(|_| skew(&mut rng)).collect();
            rows.sort_unstable();
            rows.dedup();
            let keys: Vec<_> = rows.iter().map(|at| row(0, *at)).collect();
            let expected: Vec<_> = rows.iter().map(|at| model[*at as usize]).collect();
            assert_eq!(versions(store.as_mut(), &keys).unwrap(), expected, "{name}, {step}");
            write_version(store.as_mut(), &keys, step).unwrap();
            rows.iter().for_each(|at| model[*at as usize] = Some(step));
            if step % 20 == 0 {
                store.commit("step", &[]).unwrap();
                drop(store);
                store = open(scratch.path(), None).unwrap();
            }
        }
        let mut found = vec![None; 20_000];
        store
            .scan(TableId(0), &mut |row, record| {
                found[row.0 as usize] = Some(u32::from_le_bytes(record[..4].try_into().unwrap()));
                Ok(())
            })
            .unwrap();
        assert!(found == model, "{name}");
    }
}

#[test]
fn the_quota_stops_growth_and_loses_nothing_committed() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut store = open(scratch.path(), Some(3 << 20)).unwrap();
        store.add_table(table("t", 64, 100_000)).unwrap();
        write_version(store.as_mut(), &[row(0, 0)], 1).unwrap();
        store.commit("one", &[]).unwrap();
        let full = (0..400).find_map(|at| {
            let rows: Vec<_> = (0..100).map(|row_at| row(0, at * 100 + row_at)).collect();
            let written = write_version(store.as_mut(), &rows, 2);
            written.and_then(|()| store.commit("more", &[])).err()
        });
        assert_eq!(full.unwrap().kind(), ErrorKind::NoSpace, "{name}");
        // RocksDB compacts in the background: the checkpoint keeps the inputs beside the outputs
        // until the next commit, so its files may reach twice the quota.
        let disk_bytes_max = if name.starts_with("rocksdb") { 6 << 20 } else { 4 << 20 };
        let disk_bytes = store.stats().disk_bytes;
        assert!(disk_bytes <= disk_bytes_max, "{name}: {disk_bytes}");
        // Whatever was committed last is there, and the store goes on reading.
        versions(store.as_mut(), &[row(0, 0)]).unwrap();
        drop(store);
        let mut store = open(scratch.path(), Some(8 << 20)).unwrap();
        assert_ne!(versions(store.as_mut(), &[row(0, 0)]).unwrap(), [None], "{name}");
        write_version(store.as_mut(), &[row(0, 9)], 7).unwrap();
        store.commit("after", &[]).unwrap();
    }
}

#[test]
fn a_folder_of_another_backend_or_owner_is_refused() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut first = open(scratch.path(), None).unwrap();
        first.commit("empty", &[]).unwrap();
        assert_eq!(open(scratch.path(), None).err().unwrap().kind(), ErrorKind::Closed, "{name}");
        drop(first);
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
        let other = tierbed_store::MemoryStore::open(folder, Budget::unlimited());
        assert_eq!(other.err().unwrap().kind(), ErrorKind::Invalid, "{name}");
        open(scratch.path(), None).unwrap();
    }
}

#[test]
fn missing_or_cut_files_are_corruption() {
    for (name, open) in stores() {
        let scratch = scratch();
        let mut store = open(scratch.path(), None).unwrap();
        store.add_table(table("t", 16, 1000)).unwrap();
        let rows: Vec<_> = (0..1000).map(|at| row(0, at)).collect();
        write_version(store.as_mut(), &rows, 1).unwrap();
        store.commit("one", &[]).unwrap();
        drop(store);
        let files = common::committed_files(scratch.path());
        assert!(!files.is_empty(), "{name}");
        for path in files {
            let whole = std::fs::read(&path).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(whole.len() as u64 / 2).unwrap();
            let error = open(scratch.path(), None).err();
            let kind = error.map(|error| error.kind());
            assert_eq!(kind, Some(ErrorKind::Corruption), "{name}: {}", path.display());
            common::write_file(&path, &whole);
            open(scratch.path(), None).unwrap().verify().unwrap();
        }
    }
}

#[test]
fn rocksdb_with_checksums_finds_a_flipped_byte() {
    let Some((_, open)) = stores().into_iter().find(|(name, _)| *name == "rocksdb universal")
    else {
        println!("skipped: RocksDB is not installed");
        return;
    };
    let scratch = scratch();
    let mut store = open(scratch.path(), None).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    let rows: Vec<_> = (0..1000).map(|at| row(0, at)).collect();
    write_version(store.as_mut(), &rows, 1).unwrap();
    store.commit("one", &[]).unwrap();
    drop(store);
    let is_sst = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "sst");
    let sst = common::committed_files(scratch.path()).into_iter().find(is_sst).unwrap();
    let mut bytes = std::fs::read(&sst).unwrap();
    bytes[5000] ^= 1;
    common::write_file(&sst, &bytes);
    let mut store = open(scratch.path(), None).unwrap();
    let error = versions(store.as_mut(), &rows).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
    assert_eq!(store.commit("two", &[]).unwrap_err().kind(), ErrorKind::Poisoned);
    drop(store);
    let error = open(scratch.path(), None).unwrap().verify().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
}

/// The other tests run without RocksDB where it is not installed; this one says so.
#[test]
fn rocksdb_is_here_or_says_how_to_get_it() {
    if !has_rocksdb() {
        let error = tierbed_compare::is_rocksdb_available().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("apt install librocksdb"), "{error}");
        println!("skipped: RocksDB is not installed: {error}");
    }
    let names: Vec<_> = stores().into_iter().map(|(name, _): (_, Open)| name).collect();
    assert_eq!(names.len(), if has_rocksdb() { 6 } else { 4 }, "{names:?}");
}

// A store that trained for long could not be published: its scan asked for memory only then.
#[test]
fn a_hash_store_that_opened_can_be_scanned_without_any_more_memory() {
    let scratch = scratch();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let budget = Budget::new(16 << 20);
    let options = HashDbOptions::within(8 << 20, budget.clone());
    let mut store = HashDb::open(folder, options).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    let rows: Vec<_> = (0..1000).map(|at| row(0, at)).collect();
    write_version(&mut store, &rows, 1).unwrap();
    let _rest = budget.reserve("row buffer", budget.free_bytes()).unwrap();
    let mut found = 0;
    let mut count = |_, _: &[u8]| {
        found += 1;
        Ok(())
    };
    store.scan(TableId(0), &mut count).unwrap();
    assert_eq!(found, 1000);
}
