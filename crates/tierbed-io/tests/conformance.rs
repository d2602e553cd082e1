//! Conformance of every device with every engine, and of every folder.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;

use tierbed_core::ErrorKind;
use tierbed_io::{
    open_engine, Device, EngineChoice, EngineOptions, FileDevice, Folder, FsFolder, IoEngine,
    MemoryDevice, MemoryFolder, MmapDevice, Op, OpenMode, Request, PAGE_BYTES,
};
use tierbed_sim::conformance::{check_device, check_folder};

const ENGINES: [EngineChoice; 3] = [EngineChoice::Uring, EngineChoice::Pread, EngineChoice::Inline];

/// Opens an engine, or says why this machine has none of the kind.
fn engine(choice: EngineChoice, queue_depth: u32, buf_bytes: usize) -> Option<Box<dyn IoEngine>> {
    match open_engine(&EngineOptions { choice, queue_depth, buf_bytes }) {
        Ok(engine) => Some(engine),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            println!("skipped {choice}: {error}");
            None
        }
        Err(error) => panic!("{choice}: {error}"),
    }
}

/// A file on the file system of the checkout's target folder, where `O_DIRECT` usually works,
/// and one on tmpfs.
fn scratch_folders() -> Vec<tempfile::TempDir> {
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("scratch folder");
    let in_shm = tempfile::tempdir_in("/dev/shm").inspect_err(|error| {
        println!("skipped tmpfs: {error}");
    });
    std::iter::once(on_disk).chain(in_shm).collect()
}

fn devices(folder: &Path) -> Vec<Arc<dyn Device>> {
    let direct = FileDevice::open(folder.join("direct"), OpenMode::Create).expect("open");
    println!("{}: direct {}, {:?}", direct.name(), direct.is_direct(), direct.buffered_reason());
    let buffered = FileDevice::open_buffered(folder.join("buffered"), OpenMode::Create);
    vec![Arc::new(direct), Arc::new(buffered.expect("open")), Arc::new(MemoryDevice::new("memory"))]
}

#[test]
fn every_device_works_with_every_engine() {
    for folder in scratch_folders() {
        for choice in ENGINES {
            for (queue_depth, buf_bytes) in [(1, PAGE_BYTES), (7, 3 * PAGE_BYTES), (64, 1)] {
                let Some(mut engine) = engine(choice, queue_depth, buf_bytes) else { continue };
                for device in devices(folder.path()) {
                    device.set_len(0).expect("set_len");
                    check_device(engine.as_mut(), device, 0x5EED + u64::from(queue_depth), 500);
                }
                let stats = engine.stats();
                assert!(stats.read_count > 300 && stats.write_count > 300, "{stats:?}");
                assert!(engine.memory_bytes() >= u64::from(queue_depth) * PAGE_BYTES as u64);
            }
        }
    }
}

#[test]
fn every_folder_keeps_its_promises() {
    check_folder(&MemoryFolder::new());
    for scratch in scratch_folders() {
        let folder = FsFolder::create(scratch.path().join("made/with/parents")).expect("create");
        check_folder(&folder);
        let error = FsFolder::open(scratch.path().join("missing")).expect_err("no folder");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn the_second_opener_is_told_who_has_the_folder() {
    let scratch = &scratch_folders()[0];
    let (first, second) = (FsFolder::open(scratch.path()), FsFolder::open(scratch.path()));
    let _lock = first.expect("open").lock().expect("first lock");
    let error = second.expect("open").lock().expect_err("second lock");
    assert_eq!(error.kind(), ErrorKind::Closed);
    let text = error.to_string();
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    assert!(text.contains(&scratch.path().display().to_string()), "{text}");
}

#[test]
fn space_that_is_discarded_is_given_back_and_the_rest_stays() {
    let part = 64 * PAGE_BYTES;
    let bytes: Vec<u8> = (0..3 * part).map(|at| (at % 251) as u8).collect();
    let scratch = scratch_folders();
    let mut given_bytes = 0;
    for device in scratch.iter().flat_map(|folder| devices(folder.path())) {
        device.write_at(0, &bytes).expect("write");
        device.sync().expect("sync");
        let before = device.allocated_bytes().expect("size");
        let is_given = device.discard(part as u64, part as u64);
        let after = device.allocated_bytes().expect("size");
        let given = if is_given { part as u64 } else { 0 };
        assert_eq!(before - after, given, "{}", device.name());
        given_bytes += given;
        assert_eq!(device.len_bytes().expect("length"), bytes.len() as u64);
        for range in [0..part, 2 * part..3 * part] {
            let mut found = vec![0; part];
            device.read_at(range.start as u64, &mut found).expect("read");
            assert!(found == bytes[range], "{} beside the hole", device.name());
        }
    }
    assert!(given_bytes > 0, "no file system here frees parts of files");
}

#[test]
fn a_mapped_file_reads_like_the_file_and_refuses_writes() {
    let scratch = &scratch_folders()[0];
    let path = scratch.path().join("file");
    let file = FileDevice::open(&path, OpenMode::Create).expect("open");
    assert_eq!(MmapDevice::open(&path).expect("map of nothing").len_bytes().expect("len"), 0);
    let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
    file.write_at(0, &bytes).expect("write");
    let map: Arc<dyn Device> = Arc::new(MmapDevice::open(&path).expect("map"));
    for choice in ENGINES {
        let Some(mut engine) = engine(choice, 2, PAGE_BYTES) else { continue };
        let device = engine.attach(Arc::clone(&map));
        let buf = engine.acquire().expect("buffer");
        let op = Op::Read;
        engine.submit(Request { device, op, offset_bytes: 4097, len_bytes: 4000, buf, tag: 9 });
        let mut done = Vec::new();
        engine.wait(&mut done).expect("wait");
        assert!(done[0].result.is_ok() && done[0].tag == 9);
        assert_eq!(engine.bytes(buf)[..4000], bytes[4097..8097]);
    }
    let error = map.read_at(9_999, &mut [0; 2]).expect_err("past the end");
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(map.read_at(u64::MAX, &mut [0; 2]).is_err());
    assert_eq!(map.write_at(0, b"x").expect_err("read-only").kind(), ErrorKind::Unsupported);
    assert_eq!(map.set_len(1).expect_err("read-only").kind(), ErrorKind::Unsupported);
}

#[test]
fn a_file_opened_for_reading_refuses_writes() {
    let scratch = &scratch_folders()[0];
    let path = scratch.path().join("file");
    FileDevice::open(&path, OpenMode::Create).expect("open").write_at(0, b"abc").expect("write");
    let device = FileDevice::open(&path, OpenMode::ReadOnly).expect("open");
    assert_eq!(device.write_at(0, &[0; 4096]).expect_err("read-only").kind(), ErrorKind::Io);
    assert_eq!(device.set_len(0).expect_err("read-only").kind(), ErrorKind::Io);
}

#[test]
fn sparse_files_occupy_only_what_was_written() {
    let scratch = &scratch_folders()[0];
    let device = FileDevice::open(scratch.path().join("file"), OpenMode::Create).expect("open");
    device.set_len(1 << 30).expect("set_len");
    device.write_at(1 << 20, &[1; PAGE_BYTES]).expect("write");
    device.sync().expect("sync");
    let allocated_bytes = device.allocated_bytes().expect("occupied bytes");
    assert!((4096..1 << 20).contains(&allocated_bytes), "{allocated_bytes}");
}

#[test]
fn space_taken_in_advance_is_zeros_and_needs_no_more() {
    for scratch in scratch_folders() {
        let path = scratch.path().join("file");
        let device = FileDevice::open(&path, OpenMode::Create).expect("open");
        device.write_at(0, &[1; PAGE_BYTES]).expect("write");
        if !device.preallocate(0, 1 << 20) {
            println!("skipped: {} takes no space in advance", path.display());
            continue;
        }
        let taken_bytes = device.allocated_bytes().expect("occupied bytes");
        assert!(taken_bytes >= 1 << 20, "{taken_bytes}");
        assert_eq!(device.len_bytes().expect("length"), 1 << 20);
        let mut page = [9; PAGE_BYTES];
        device.read_at(0, &mut page).expect("read");
        assert_eq!(page, [1; PAGE_BYTES]);
        device.read_at((1 << 20) - PAGE_BYTES as u64, &mut page).expect("read");
        assert_eq!(page, [0; PAGE_BYTES]);
        device.write_at(1 << 19, &[2; PAGE_BYTES]).expect("write");
        assert_eq!(device.len_bytes().expect("length"), 1 << 20);
    }
    let read_only = &scratch_folders()[0];
    let path = read_only.path().join("file");
    FileDevice::open(&path, OpenMode::Create).expect("open").write_at(0, b"abc").expect("write");
    let device = FileDevice::open(&path, OpenMode::ReadOnly).expect("open");
    assert!(!device.preallocate(0, 4096), "not through a file opened for reading");
}

/// Dropping an engine with everything in flight must wait: the kernel would otherwise write into
/// freed memory. Nothing can be asserted but that the writes land or not, whole, and that no
/// memory checker complains.
#[test]
fn dropping_an_engine_waits_for_what_is_in_flight() {
    for choice in ENGINES {
        let scratch = &scratch_folders()[0];
        let file = FileDevice::open(scratch.path().join("file"), OpenMode::Create).expect("open");
        let file: Arc<dyn Device> = Arc::new(file);
        let Some(mut engine) = engine(choice, 32, PAGE_BYTES) else { continue };
        let device = engine.attach(Arc::clone(&file));
        for tag in 0..32 {
            let buf = engine.acquire().expect("buffer");
            engine.bytes_mut(buf).fill(7);
            let (op, offset_bytes) = (Op::Write, tag * PAGE_BYTES as u64);
            engine.submit(Request { device, op, offset_bytes, len_bytes: 4096, buf, tag });
        }
        assert!(engine.acquire().is_none(), "all buffers are taken");
        engine.detach(device);
        assert_eq!(engine.in_flight_count(), 32);
        drop(engine);
        let mut bytes = vec![0; 32 * PAGE_BYTES];
        file.read_at(0, &mut bytes).expect("all writes were made");
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}

#[test]
fn one_system_call_brings_many_completions() {
    let scratch = &scratch_folders()[0];
    let file = FileDevice::open(scratch.path().join("file"), OpenMode::Create).expect("open");
    file.write_at(0, &vec![1; 64 * PAGE_BYTES]).expect("write");
    file.sync().expect("sync");
    let Some(mut engine) = engine(EngineChoice::Uring, 64, PAGE_BYTES) else { return };
    let device = engine.attach(Arc::new(file));
    for tag in 0..64 {
        let buf = engine.acquire().expect("buffer");
        let (op, offset_bytes) = (Op::Read, tag * PAGE_BYTES as u64);
        engine.submit(Request { device, op, offset_bytes, len_bytes: 4096, buf, tag });
    }
    let (mut done, mut wait_count) = (Vec::new(), 0);
    while engine.in_flight_count() > 0 {
        engine.wait(&mut done).expect("wait");
        wait_count += 1;
    }
    assert_eq!(done.len(), 64);
    let stats = engine.stats();
    // An interrupted or early wake-up may need one more call; never one for each transfer.
    assert!(stats.submit_count <= 2 * wait_count, "{stats:?}, {wait_count} waits");
    assert_eq!((stats.read_count, stats.read_bytes), (64, 64 * 4096));
}

/// The kernel cancels what a thread had handed over when the thread ends; an engine that moved on
/// to another thread must not lose its transfers.
#[test]
fn an_engine_outlives_the_thread_that_submitted() {
    for choice in ENGINES {
        let scratch = &scratch_folders()[0];
        let file = FileDevice::open_buffered(scratch.path().join("file"), OpenMode::Create);
        let file: Arc<dyn Device> = Arc::new(file.expect("open"));
        let Some(mut engine) = engine(choice, 64, 16 * PAGE_BYTES) else { continue };
        let to = Arc::clone(&file);
        let first_thread = std::thread::spawn(move || {
            let device = engine.attach(to);
            for tag in 0..64 {
                let buf = engine.acquire().expect("buffer");
                engine.bytes_mut(buf).fill(7);
                let (op, offset_bytes) = (Op::Write, tag * 16 * PAGE_BYTES as u64);
                engine.submit(Request { device, op, offset_bytes, len_bytes: 65536, buf, tag });
            }
            let mut done = Vec::new();
            engine.wait(&mut done).expect("wait");
            (engine, done)
        });
        let (mut engine, mut done) = first_thread.join().expect("thread");
        while engine.in_flight_count() > 0 {
            engine.wait(&mut done).expect("wait");
        }
        assert_eq!(done.len(), 64);
        assert!(done.iter().all(|completion| completion.result.is_ok()), "{choice}: {done:?}");
        let mut bytes = vec![0; 64 * 16 * PAGE_BYTES];
        file.read_at(0, &mut bytes).expect("all writes were made");
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}

#[test]
#[should_panic(expected = "read of a buffer the caller does not have")]
fn a_buffer_in_flight_cannot_be_read() {
    let mut engine = engine(EngineChoice::Pread, 1, PAGE_BYTES).expect("the pool always opens");
    let device = engine.attach(Arc::new(MemoryDevice::new("memory")));
    let buf = engine.acquire().expect("buffer");
    engine.submit(Request { device, op: Op::Write, offset_bytes: 0, len_bytes: 1, buf, tag: 0 });
    let _bytes = engine.bytes(buf);
}

#[test]
fn options_out_of_range_are_refused() {
    for (queue_depth, buf_bytes) in [(0, 4096), (4097, 4096), (1, 0), (1, usize::MAX)] {
        let options = EngineOptions { choice: EngineChoice::Inline, queue_depth, buf_bytes };
        let error = open_engine(&options).err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    for choice in ["auto", "io_uring", "pread", "inline"] {
        assert_eq!(choice.parse::<EngineChoice>().expect("known").to_string(), choice);
    }
    assert_eq!("aio".parse::<EngineChoice>().expect_err("unknown").kind(), ErrorKind::Invalid);
}
