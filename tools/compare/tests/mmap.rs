//! What only a mapped store does: undo pages, the boot id, space taken ahead.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::scratch;
use tierbed_compare::{MmapOptions, MmapStore};
use tierbed_core::{Budget, ErrorKind, Result, RowStore, TrainStore};
use tierbed_io::{FsFolder, MemoryFolder};
use tierbed_sim::rows::{row, table, versions, write_version};

fn open(path: &Path, boot_id: &str) -> Result<MmapStore> {
    let options =
        MmapOptions { boot_id: boot_id.into(), ..MmapOptions::new(Budget::new(1 << 20))? };
    MmapStore::open(Arc::new(FsFolder::create(path)?), options)
}

fn started(path: &Path) -> MmapStore {
    let mut store = open(path, "monday").unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    write_version(&mut store, &[row(0, 5)], 1).unwrap();
    store.commit("one", &[]).unwrap();
    store
}

#[test]
fn after_a_power_loss_it_opens_only_if_nothing_had_changed() {
    let scratch = scratch();
    drop(started(scratch.path()));
    let mut store = open(scratch.path(), "tuesday").unwrap();
    write_version(&mut store, &[row(0, 5), row(0, 6)], 2).unwrap();
    drop(store);
    // The same start of the machine: a killed process. Another: power was lost.
    let error = open(scratch.path(), "wednesday").err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(error.to_string().contains("between two commits"), "{error}");
    let mut store = open(scratch.path(), "tuesday").unwrap();
    assert_eq!(versions(&mut store, &[row(0, 5), row(0, 6)]).unwrap(), [Some(1), None]);
    drop(store);
    open(scratch.path(), "wednesday").unwrap();
}

#[test]
fn a_killed_recovery_is_done_again() {
    let scratch = scratch();
    let mut store = started(scratch.path());
    write_version(&mut store, &[row(0, 5)], 2).unwrap();
    drop(store);
    let undo = |name: &str| std::fs::read(scratch.path().join(name)).unwrap();
    let (pages, boot) = (undo("pages.undo"), undo("boot.undo"));
    drop(open(scratch.path(), "monday").unwrap());
    // As if it had been killed before it forgot the undo file.
    common::write_file(&scratch.path().join("pages.undo"), &pages);
    common::write_file(&scratch.path().join("boot.undo"), &boot);
    let mut store = open(scratch.path(), "monday").unwrap();
    assert_eq!(versions(&mut store, &[row(0, 5)]).unwrap(), [Some(1)]);
}

#[test]
fn an_undo_file_of_an_older_commit_is_not_applied() {
    let scratch = scratch();
    let mut store = started(scratch.path());
    write_version(&mut store, &[row(0, 5)], 2).unwrap();
    let pages = std::fs::read(scratch.path().join("pages.undo")).unwrap();
    let boot = std::fs::read(scratch.path().join("boot.undo")).unwrap();
    store.commit("two", &[]).unwrap();
    drop(store);
    // As if it had been killed after the switch and before it forgot the undo file.
    common::write_file(&scratch.path().join("pages.undo"), &pages);
    common::write_file(&scratch.path().join("boot.undo"), &boot);
    let mut store = open(scratch.path(), "monday").unwrap();
    assert_eq!(versions(&mut store, &[row(0, 5)]).unwrap(), [Some(2)]);
}

#[test]
fn damaged_notes_and_bits_are_corruption() {
    let scratch = scratch();
    drop(started(scratch.path()));
    common::write_file(&scratch.path().join("boot.undo"), b"something else");
    assert_eq!(open(scratch.path(), "monday").err().unwrap().kind(), ErrorKind::Corruption);
    std::fs::remove_file(scratch.path().join("boot.undo")).unwrap();
    let path = scratch.path().join("t.dense");
    let whole = std::fs::read(&path).unwrap();
    for bit in [0, 5, 999, 1003] {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        common::write_file(&path, &bytes);
        let error = open(scratch.path(), "monday").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corruption, "bit {bit}");
    }
}

#[test]
fn rows_never_written_take_no_space_and_a_folder_without_a_path_is_refused() {
    let scratch = scratch();
    let mut store = open(scratch.path(), "monday").unwrap();
    store.add_table(table("huge", 64, 1 << 20)).unwrap();
    assert!(store.stats().disk_bytes < 1 << 20);
    write_version(&mut store, &[row(0, 1 << 19)], 1).unwrap();
    let disk_bytes = store.stats().disk_bytes;
    assert!((4096..1 << 20).contains(&disk_bytes), "{disk_bytes}");
    let options = MmapOptions::new(Budget::new(1 << 20)).unwrap();
    let error = MmapStore::open(Arc::new(MemoryFolder::new()), options).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
