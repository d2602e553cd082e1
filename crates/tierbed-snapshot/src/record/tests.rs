use tierbed_core::{Budget, Schema, TableSchema};
use tierbed_io::MemoryFolder;

use super::*;
use crate::{Pooling, SnapshotOptions, SnapshotWriter};

fn snapshot() -> Snapshot {
    let tables = [("a", 40, 4), ("b", 30, 4), ("wide", 20, 8)];
    let schema = Schema::new(
        tables.map(|(name, rows, dim)| TableSchema::plain(name, rows, dim)).into_iter().collect(),
    )
    .unwrap();
    let folder = memory();
    let writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &Budget::unlimited());
    writer.unwrap().finish().unwrap();
    Snapshot::open(folder, &SnapshotOptions::default()).unwrap()
}

fn memory() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::new())
}

fn group(tables: &[u32], folder: &Arc<dyn Folder>) -> Recorded {
    let tables = tables.iter().map(|&id| TableId(id)).collect();
    Recorded { tables, folder: Arc::clone(folder) }
}

/// Looks up two samples over `b`, `a`, `a` and `wide`.
fn look_up(snapshot: &Snapshot) {
    let features = [(1, Pooling::Sum), (0, Pooling::Mean), (0, Pooling::Sum), (2, Pooling::Sum)];
    let features = features.map(|(id, pooling)| (TableId(id), pooling));
    let plan = FeatureLayout::new(snapshot.schema(), &features).unwrap();
    let bags = Bags::new(&[7, 8, 9, 1, 2, 3], &[0, 1, 3, 4, 4, 5, 5, 5, 6], None, 4).unwrap();
    let mut out = vec![0.0; plan.output_len(&bags)];
    snapshot.lookup(&plan, &bags, &mut out).unwrap();
}

fn read(folder: &Arc<dyn Folder>) -> Vec<String> {
    let names = folder.list().unwrap();
    let texts = names.iter().map(|name| folder.read(name).unwrap().unwrap());
    texts.map(|text| String::from_utf8(text).unwrap()).collect()
}

#[test]
fn a_sample_is_a_query_numbered_through_its_tables() {
    let snapshot = snapshot();
    let (pair, alone) = (memory(), memory());
    let groups = vec![group(&[0, 1], &pair), group(&[2], &alone)];
    snapshot.record(groups, &RecordOptions::default()).unwrap();
    look_up(&snapshot);
    look_up(&snapshot);
    assert_eq!(snapshot.record_stats().unwrap().queries_recorded, 6);
    assert_eq!(read(&pair), [""; 0], "files appear whole");
    drop(snapshot);
    // Sample 0: b 7, a 1 and 2; sample 1: b 8 and 9, wide 3. Rows of b follow the 40 of a.
    assert_eq!(read(&pair), ["47 1 2\n48 49\n47 1 2\n48 49\n"]);
    assert_eq!(read(&alone), ["3\n3\n"]);
}

#[test]
fn files_are_bounded_and_the_oldest_leave() {
    let folder = memory();
    folder.write_atomic("queries-00000006.txt", &[b'1'; 30]).unwrap();
    folder.write_atomic("other", b"stays").unwrap();
    let options = RecordOptions { file_bytes: 10, bytes_max: 40, ..RecordOptions::default() };
    for round in 0..2 {
        let snapshot = snapshot();
        snapshot.record(vec![group(&[0, 1], &folder)], &options).unwrap();
        for _ in 0..10 {
            look_up(&snapshot);
            // The queue may be full: then queries are dropped, and counted.
            let stats = snapshot.record_stats().unwrap();
            assert_eq!(stats.error, None);
        }
        drop(snapshot);
        let names = folder.list().unwrap();
        assert!(names.contains(&"other".to_owned()) && !names.contains(&name_of(6)), "{names:?}");
        let bytes: usize = read(&folder).iter().map(String::len).sum::<usize>() - "stays".len();
        assert!(bytes <= 40 && names.len() > 2, "round {round}: {bytes} bytes, {names:?}");
    }
}

#[test]
fn a_share_of_the_samples_is_drawn_and_the_same_again() {
    let recorded = || {
        let (snapshot, folder) = (snapshot(), memory());
        let options = RecordOptions { sample: 0.3, seed: 5, ..RecordOptions::default() };
        snapshot.record(vec![group(&[1], &folder)], &options).unwrap();
        for _ in 0..500 {
            look_up(&snapshot);
        }
        let count = snapshot.record_stats().unwrap().queries_recorded;
        drop(snapshot);
        (count, read(&folder))
    };
    let (count, text) = recorded();
    assert!((250..350).contains(&count), "{count} of 1000");
    assert_eq!((count, text), recorded());
}

#[test]
fn a_disk_that_fails_stops_the_recording_and_no_lookup() {
    let root = tempfile::tempdir().unwrap();
    let gone = root.path().join("gone");
    let folder: Arc<dyn Folder> = Arc::new(tierbed_io::FsFolder::create(&gone).unwrap());
    let snapshot = snapshot();
    let options = RecordOptions { file_bytes: 1, ..RecordOptions::default() };
    snapshot.record(vec![group(&[1], &folder)], &options).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    let has_failed = || snapshot.record_stats().unwrap().error.is_some();
    for _ in 0..10_000 {
        look_up(&snapshot);
        if has_failed() {
            break;
        }
        std::thread::yield_now();
    }
    let stats = snapshot.record_stats().unwrap();
    assert!(stats.error.is_some() && stats.files_written == 0, "{stats:?}");
    look_up(&snapshot);
}

#[test]
fn what_cannot_be_recorded_is_refused() {
    let snapshot = snapshot();
    let folder = memory();
    let options = RecordOptions::default();
    for tables in [&[][..], &[0, 2], &[0, 0], &[9]] {
        assert!(snapshot.record(vec![group(tables, &folder)], &options).is_err(), "{tables:?}");
    }
    assert!(snapshot.record(Vec::new(), &options).is_err());
    let wrong = RecordOptions { sample: 1.5, ..options.clone() };
    assert!(snapshot.record(vec![group(&[0], &folder)], &wrong).is_err());
    snapshot.record(vec![group(&[0], &folder)], &options).unwrap();
    let error = snapshot.record(vec![group(&[0], &folder)], &options).unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
}
