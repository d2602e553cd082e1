//! Conformance of the tree with every part on or off.
//!
//! Memtables of a few rows and levels of a few SSTs, so that every step flushes, compacts, moves
//! and rewrites.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    unreachable_pub,
    dead_code,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{announce, tiny, tiny_plain, versions};
use tierbed_core::conformance::check_row_store;
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{Budget, ErrorKind, Result, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, Folder, FsFolder, MemoryFolder, OpenMode};
use tierbed_lsm::{
    Durability, HotRule, LsmOptions, LsmStore, Picker, Scheduling, Work, WorkerChoice,
};
use tierbed_sim::rows::{row, table, write_version};

/// Memtables that hold one of the kit's longest records (4,404 bytes) or a few.
const MEMTABLE_BYTES: usize = 12 * 1024;

fn option_sets() -> Vec<(&'static str, LsmOptions)> {
    let step = LsmOptions { durability: Durability::Step, ..tiny(MEMTABLE_BYTES) };
    let mut bare = tiny_plain(MEMTABLE_BYTES);
    bare.sst.filter_bits_per_row = 0;
    bare.memory.block_cache_bytes = 0;
    bare.memory.monitored_reads_max = 0;
    let silk = Scheduling::SilkLike { device_bytes_per_s: 1e6 };
    vec![
        ("recdb", tiny(MEMTABLE_BYTES)),
        ("plain", tiny_plain(MEMTABLE_BYTES)),
        ("bare", bare),
        ("step", step),
        ("look-ahead", LsmOptions { scheduling: Scheduling::LookAhead, ..tiny(MEMTABLE_BYTES) }),
        ("silk", LsmOptions { scheduling: silk, ..tiny(MEMTABLE_BYTES) }),
        ("beside", LsmOptions { worker: WorkerChoice::Thread, ..tiny(MEMTABLE_BYTES) }),
        ("stepped by hand", LsmOptions { works_on_write: false, ..tiny(MEMTABLE_BYTES) }),
    ]
}

fn with_budget(options: &LsmOptions) -> LsmOptions {
    LsmOptions { budget: Budget::new(8 << 20), ..options.clone() }
}

#[test]
fn keeps_the_waists_promise_in_memory_with_every_set_of_options() {
    for (name, options) in option_sets() {
        for seed in 0..2 {
            let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
            let open = || -> Result<Box<dyn TrainStore>> {
                Ok(Box::new(LsmStore::open(folder.clone(), with_budget(&options))?))
            };
            let mut reopen = |old, _| {
                drop(old);
                open()
            };
            check_row_store(open().unwrap(), Some(&mut reopen), seed, 120)
                .unwrap_or_else(|error| panic!("{name}, seed {seed}: {error}"));
        }
    }
}

#[test]
fn keeps_the_waists_promise_on_a_file_system_with_every_engine() {
    for (choice, queue_depth) in
        [(EngineChoice::Auto, 8), (EngineChoice::Pread, 2), (EngineChoice::Inline, 1)]
    {
        for durability in [Durability::Commit, Durability::Step] {
            let scratch = tempfile::tempdir().unwrap();
            let open = || -> Result<Box<dyn TrainStore>> {
                let folder = Arc::new(FsFolder::create(scratch.path())?);
                let engine = EngineOptions { choice, queue_depth, buf_bytes: 4096 };
                let options = LsmOptions { engine, durability, ..tiny(MEMTABLE_BYTES) };
                Ok(Box::new(LsmStore::open(folder, options)?))
            };
            let mut reopen = |old, _| {
                drop(old);
                open()
            };
            check_row_store(open().unwrap(), Some(&mut reopen), 7, 40).unwrap();
        }
    }
}

fn memory_folder() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::default())
}

/// Skewed rows of two tables: low ids often, high ones seldom.
fn skewed_rows(rng: &mut SplitMix64, count: usize) -> Vec<RowKey> {
    let mut rows: Vec<RowKey> = (0..count)
        .map(|_| {
            let skew = rng.unit_f64() * rng.unit_f64() * rng.unit_f64();
            row(rng.below(2) as u32, (skew * 3000.0) as u64)
        })
        .collect();
    rows.sort_unstable();
    rows
}

/// Most milliseconds that one job of a few SSTs may take, whatever else the machine does.
const JOB_MS_MAX: u32 = 120_000;

/// Works until nothing is due. The background thread finishes its job first, so that levels grow
/// as they do without one.
fn work_until_rest(store: &mut LsmStore) {
    let mut waited_ms = 0;
    loop {
        match store.step().unwrap() {
            Work::Idle | Work::Deferred => return,
            Work::Running => {
                assert!(waited_ms < JOB_MS_MAX, "the background thread does not finish");
                std::thread::sleep(std::time::Duration::from_millis(1));
                waited_ms += 1;
            }
            Work::Flushed | Work::Moved | Work::Compacted | Work::Started => waited_ms = 0,
        }
    }
}

#[test]
fn version_numbers_are_never_stale_while_rows_turn_hot_and_cold() {
    for (name, options) in option_sets() {
        let rule = HotRule { frequency_min: 0.015, frequency_keep: 0.01, hot_ratio: 0.05 };
        let options = LsmOptions { hot_rule: options.hot_rule.map(|_| rule), ..options };
        let folder = memory_folder();
        let mut store = LsmStore::open(folder.clone(), with_budget(&options)).unwrap();
        store.add_table(table("a", 8, 3000)).unwrap();
        store.add_table(table("b", 3, 3000)).unwrap();
        let mut rng = SplitMix64::new(11);
        let mut model: BTreeMap<RowKey, u32> = BTreeMap::new();
        let (mut levels_seen, mut promoted, mut demoted) = (0, 0, 0);
        for step in 1..=240u32 {
            let mut window = skewed_rows(&mut rng, 200);
            // What is popular drifts, so that hot rows cool down again.
            for row in &mut window {
                row.row.0 = (row.row.0 + u64::from(step / 20) * 37) % 3000;
            }
            announce(&mut store, &window, 100).unwrap();
            let expected: Vec<_> = window.iter().map(|row| model.get(row).copied()).collect();
            assert_eq!(versions(&mut store, &window).unwrap(), expected, "{name}, step {step}");
            window.sort_unstable();
            window.dedup();
            write_version(&mut store, &window, step).unwrap();
            model.extend(window.into_iter().map(|row| (row, step)));
            if step % 5 == 0 {
                work_until_rest(&mut store);
            }
            if step % 40 == 0 {
                store.commit("step", &[]).unwrap();
                promoted += store.lsm_stats().rows_promoted;
                demoted += store.lsm_stats().rows_demoted;
                drop(store);
                store = LsmStore::open(folder.clone(), with_budget(&options)).unwrap();
            }
            let deepest = store.version().ssts().map(|(level, _)| level).max().unwrap_or(0);
            levels_seen = levels_seen.max(deepest);
        }
        store.verify().unwrap();
        for id in [TableId(0), TableId(1)] {
            let mut found = Vec::new();
            store
                .scan(id, &mut |row, record| {
                    let version = u32::from_le_bytes(record[..4].try_into().unwrap());
                    found.push((RowKey::new(id, row), version));
                    Ok(())
                })
                .unwrap();
            let rows = model.iter().filter(|(row, _)| row.table == id);
            let expected: Vec<_> = rows.map(|(row, version)| (*row, *version)).collect();
            assert_eq!(found, expected, "{name}");
        }
        assert!(levels_seen >= 2, "{name}: only {levels_seen} levels");
        let has_moved = promoted > 20 && demoted > 20;
        assert_eq!(has_moved, options.hot_rule.is_some(), "{name}: {promoted}, {demoted}");
        let report = store.budget().report();
        assert!(report.peak_bytes <= report.limit_bytes, "{name}");
    }
}

#[test]
fn reopens_at_the_last_commit_with_its_attachments() {
    for durability in [Durability::Commit, Durability::Step] {
        let folder = memory_folder();
        let open = || {
            let options = LsmOptions { durability, ..tiny(MEMTABLE_BYTES) };
            LsmStore::open(folder.clone(), options)
        };
        let mut store = open().unwrap();
        store.add_table(table("t", 16, 1000)).unwrap();
        write_version(&mut store, &[row(0, 5)], 1).unwrap();
        store.commit("one", &[Attachment { name: "dense", bytes: b"abc" }]).unwrap();
        write_version(&mut store, &[row(0, 5), row(0, 6)], 2).unwrap();
        assert_eq!(versions(&mut store, &[row(0, 5)]).unwrap(), [Some(2)]);
        drop(store);
        let mut store = open().unwrap();
        assert_eq!(store.last_commit().unwrap().name, "one");
        assert_eq!(versions(&mut store, &[row(0, 6), row(0, 5)]).unwrap(), [None, Some(1)]);
        assert_eq!(store.attachment("dense").unwrap().as_deref(), Some(&b"abc"[..]));
    }
}

/// Once every commit wrote a version, a manifest and `CURRENT`, whatever had changed.
#[test]
fn a_commit_per_step_is_one_entry_of_the_log_until_the_log_is_long() {
    let folder = memory_folder();
    let step = LsmOptions { durability: Durability::Step, ..tiny(MEMTABLE_BYTES) };
    let open = || {
        let mut store = LsmStore::open(folder.clone(), with_budget(&step)).unwrap();
        store.add_table(table("t", 16, 1000)).unwrap();
        store
    };
    let mut store = open();
    store.commit("tables", &[]).unwrap();
    let mut model = BTreeMap::new();
    let mut steps = 0;
    for at in 1..=200u32 {
        let rows: Vec<_> = (0..5).map(|add| row(0, u64::from(at * 7 % 60 + add))).collect();
        write_version(&mut store, &rows, at).unwrap();
        model.extend(rows.iter().map(|row| (*row, at)));
        let text = at.to_string();
        store.commit("s", &[Attachment { name: "at", bytes: text.as_bytes() }]).unwrap();
        let log_bytes: u64 = folder
            .list()
            .unwrap()
            .iter()
            .filter(|name| name.ends_with(".wal"))
            .map(|name| folder.open(name, OpenMode::ReadOnly).unwrap().len_bytes().unwrap())
            .sum();
        assert!(log_bytes <= MEMTABLE_BYTES as u64 + 1000, "{log_bytes}");
        if at % 30 == 0 {
            steps += store.lsm_stats().step_commit_count;
            // Rows behind the last step are lost, and do not come back with a later one.
            write_version(&mut store, &[row(0, 999)], 1).unwrap();
            drop(store);
            store = open();
            assert_eq!(u64::from(at) + 1, store.last_commit().unwrap().number);
            let found = store.attachment("at").unwrap().unwrap();
            assert_eq!(found, at.to_string().as_bytes());
            let rows: Vec<_> = model.keys().copied().collect();
            let expected: Vec<_> = model.values().map(|version| Some(*version)).collect();
            assert_eq!(versions(&mut store, &rows).unwrap(), expected);
            assert_eq!(versions(&mut store, &[row(0, 999)]).unwrap(), [None]);
            store.verify().unwrap();
        }
    }
    assert!((150..200).contains(&steps), "{steps} of 180 commits were steps");
    let long = vec![0; 300 << 10];
    let before = store.lsm_stats().step_commit_count;
    store.commit("long", &[Attachment { name: "dense", bytes: &long }]).unwrap();
    assert_eq!(store.lsm_stats().step_commit_count, before, "a full one");
    assert_eq!(store.attachment("at").unwrap(), None, "attachments are the last commit's");
    assert_eq!(store.attachment("dense").unwrap().unwrap().len(), long.len());
    store.commit("short", &[]).unwrap();
    let twice = [Attachment { name: "a", bytes: b"" }, Attachment { name: "a", bytes: b"" }];
    assert_eq!(store.commit("twice", &twice).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.last_commit().unwrap().name, "short");
}

#[test]
fn a_log_of_one_durability_is_read_by_the_other() {
    let folder = memory_folder();
    let step = LsmOptions { durability: Durability::Step, ..tiny(MEMTABLE_BYTES) };
    let mut store = LsmStore::open(folder.clone(), step).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    write_version(&mut store, &[row(0, 5)], 1).unwrap();
    store.commit("logged", &[]).unwrap();
    assert_eq!(store.version().ssts().count(), 0, "the commit flushed nothing");
    drop(store);
    let mut store = LsmStore::open(folder.clone(), tiny(MEMTABLE_BYTES)).unwrap();
    assert_eq!(versions(&mut store, &[row(0, 5)]).unwrap(), [Some(1)]);
    store.commit("flushed", &[]).unwrap();
    assert_eq!(store.version().ssts().count(), 1);
    assert!(folder.list().unwrap().iter().all(|name| !name.ends_with(".wal")), "log removed");
}

#[test]
fn every_damaged_block_is_found_by_verify_and_by_the_read_that_needs_it() {
    let folder = memory_folder();
    let mut store = LsmStore::open(folder.clone(), tiny(MEMTABLE_BYTES)).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    let rows: Vec<_> = (0..150).map(|at| row(0, at)).collect();
    write_version(&mut store, &rows, 1).unwrap();
    store.commit("one", &[]).unwrap();
    let name = folder.list().unwrap().into_iter().find(|name| name.ends_with(".sst")).unwrap();
    let device = folder.open(&name, OpenMode::ReadWrite).unwrap();
    let mut byte = [0];
    device.read_at(700, &mut byte).unwrap();
    device.write_at(700, &[byte[0] ^ 1]).unwrap();
    for error in [store.verify().unwrap_err(), versions(&mut store, &rows).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert!(error.to_string().contains("sst_id"), "{error}");
    }
    device.set_len(device.len_bytes().unwrap() - 4096).unwrap();
    drop(store);
    let error = LsmStore::open(folder.clone(), tiny(MEMTABLE_BYTES)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    folder.remove(&name).unwrap();
    let error = LsmStore::open(folder, tiny(MEMTABLE_BYTES)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corruption);
}

#[test]
fn no_damaged_byte_of_any_file_panics_or_passes() {
    let folder = memory_folder();
    let options = LsmOptions { durability: Durability::Step, ..tiny(8 * 1024) };
    let mut store = LsmStore::open(folder.clone(), options.clone()).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    for version in 1..4 {
        let rows: Vec<_> = (0..150).map(|at| row(0, at * 6)).collect();
        write_version(&mut store, &rows, version).unwrap();
    }
    store.commit("full", &[]).unwrap();
    for name in ["one", "two"] {
        let rows: Vec<_> = (0..20).map(|at| row(0, at * 11)).collect();
        write_version(&mut store, &rows, 9).unwrap();
        store.commit(name, &[Attachment { name: "dense", bytes: b"abc" }]).unwrap();
    }
    assert_eq!(store.lsm_stats().step_commit_count, 2);
    drop(store);
    let names = folder.list().unwrap();
    for ending in [".sst", ".wal", ".version", ".manifest"] {
        assert!(names.iter().any(|name| name.ends_with(ending)), "{names:?}");
    }
    let check = || -> Result<String> {
        let budget = Budget::new(8 << 20);
        let mut store = LsmStore::open(folder.clone(), LsmOptions { budget, ..options.clone() })?;
        store.verify()?;
        Ok(store.last_commit().unwrap().name.clone())
    };
    assert_eq!(check().unwrap(), "two");
    for name in names.iter().filter(|name| *name != "CURRENT") {
        let device = folder.open(name, OpenMode::ReadWrite).unwrap();
        // Odd steps, so that every field of headers and entries is met somewhere.
        let step = (device.len_bytes().unwrap() / 150).max(1) | 1;
        let mut bytes = vec![0; device.len_bytes().unwrap() as usize];
        device.read_at(0, &mut bytes).unwrap();
        for at in (0..bytes.len()).step_by(step as usize) {
            device.write_at(at as u64, &[bytes[at] ^ 0x41]).unwrap();
            // Also the last entries of the log: they were acknowledged.
            let error = check().err().unwrap_or_else(|| panic!("{name} at {at} passes"));
            assert_eq!(error.kind(), ErrorKind::Corruption, "{name} at {at}: {error}");
            device.write_at(0, &bytes).unwrap();
        }
    }
    assert_eq!(check().unwrap(), "two");
}

#[test]
fn the_quota_stops_growth_and_loses_nothing_committed() {
    for durability in [Durability::Commit, Durability::Step] {
        let folder = memory_folder();
        let options =
            LsmOptions { durability, disk_quota_bytes: Some(200_000), ..tiny(MEMTABLE_BYTES) };
        let mut store = LsmStore::open(folder.clone(), with_budget(&options)).unwrap();
        store.add_table(table("t", 16, 10_000)).unwrap();
        write_version(&mut store, &[row(0, 0)], 1).unwrap();
        store.commit("one", &[]).unwrap();
        let full = (0..10_000).find_map(|at| write_version(&mut store, &[row(0, at)], 2).err());
        assert_eq!(full.unwrap().kind(), ErrorKind::NoSpace);
        assert!(store.stats().disk_bytes <= 220_000, "{}", store.stats().disk_bytes);
        drop(store);
        let mut store = LsmStore::open(folder, options).unwrap();
        assert_eq!(versions(&mut store, &[row(0, 0), row(0, 60)]).unwrap(), [Some(1), None]);
    }
}

#[test]
fn too_small_a_budget_names_the_minimum() {
    let small = LsmOptions { budget: Budget::new(20_000), ..tiny(MEMTABLE_BYTES) };
    let error = LsmStore::open(memory_folder(), small).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("at least"), "{error}");
    let mut store = LsmStore::open(memory_folder(), tiny(2048)).unwrap();
    let error = store.add_table(table("long", 600, 10)).unwrap_err();
    assert!(error.to_string().contains("memtable"), "{error}");
    store.add_table(table("short", 16, 10)).unwrap();
}

#[test]
fn a_request_larger_than_the_memory_left_is_read_in_parts() {
    for (name, options) in option_sets() {
        let mut store = LsmStore::open(memory_folder(), with_budget(&options)).unwrap();
        store.add_table(table("t", 8, 3000)).unwrap();
        let rows: Vec<_> = (0..3000).map(|at| row(0, (at * 7) % 3000)).collect();
        for (step, part) in (1..).zip(rows.chunks(500).take(4)) {
            let mut part = part.to_vec();
            part.sort_unstable();
            write_version(&mut store, &part, step).unwrap();
        }
        let expected = versions(&mut store, &rows).unwrap();
        assert!(expected.contains(&Some(4)) && expected.contains(&None), "{name}");
        let free_bytes = store.budget().free_bytes();
        let others = store.budget().reserve("others", free_bytes - 50_000).unwrap();
        assert_eq!(versions(&mut store, &rows).unwrap(), expected, "{name}");
        drop(others);
    }
}

#[test]
fn a_folder_of_another_backend_or_owner_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let open = || LsmStore::open(Arc::new(FsFolder::create(scratch.path())?), tiny(MEMTABLE_BYTES));
    let mut first = open().unwrap();
    first.commit("empty", &[]).unwrap();
    assert_eq!(open().err().unwrap().kind(), ErrorKind::Closed);
    drop(first);
    let folder = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let error = tierbed_store::MemoryStore::open(folder, Budget::unlimited()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    open().unwrap();
}

#[test]
fn steps_flush_then_compact_then_rest() {
    let options = LsmOptions { works_on_write: false, picker: Picker::Largest, ..tiny(4096) };
    let mut store = LsmStore::open(memory_folder(), options).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    let rows: Vec<_> = (0..100).map(|at| row(0, at)).collect();
    write_version(&mut store, &rows, 1).unwrap();
    let mut done = Vec::new();
    loop {
        let work = store.step().unwrap();
        done.push(work);
        if work == Work::Idle {
            break;
        }
    }
    assert_eq!(done.first(), Some(&Work::Flushed));
    assert!(done.contains(&Work::Compacted), "{done:?}");
    assert_eq!(versions(&mut store, &rows).unwrap(), vec![Some(1); 100]);
}

/// The waist's statistics once left out what does not pass through the I/O engine, and a
/// benchmark reported a store that writes nothing.
#[test]
fn statistics_count_what_flushes_and_merges_move() {
    let mut store = LsmStore::open(memory_folder(), tiny(4096)).unwrap();
    store.add_table(table("t", 16, 1000)).unwrap();
    let rows: Vec<_> = (0..400).map(|at| row(0, at)).collect();
    for version in 0..6 {
        write_version(&mut store, &rows, version).unwrap();
    }
    let (lsm, io) = (store.lsm_stats(), store.stats().io);
    assert!(lsm.flush_bytes > 0 && lsm.compaction_write_bytes > 0, "{lsm:?}");
    assert!(io.write_bytes >= lsm.flush_bytes + lsm.compaction_write_bytes, "{io:?}");
    assert!(io.read_bytes >= lsm.compaction_read_bytes, "{io:?}");
}
