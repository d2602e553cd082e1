//! Errors of a full disk: a tmpfs of 1 MiB; needs the right to mount.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use tierbed_core::ErrorKind;
use tierbed_io::{
    open_engine, EngineChoice, EngineOptions, FileDevice, Folder, FsFolder, Op, OpenMode, Request,
};

/// A mounted tmpfs, unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().expect("scratch folder");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tierbed-test"])
            .arg(folder.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(folder)),
            Ok(output) => {
                println!("skipped: mount: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: mount: {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, so that a file still open somewhere does not keep the mount.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

const CHUNK_BYTES: usize = 64 << 10;

#[test]
fn a_full_disk_is_no_space_with_every_engine() {
    for choice in [EngineChoice::Uring, EngineChoice::Pread, EngineChoice::Inline] {
        let Some(disk) = SmallDisk::mount() else { return };
        let options = EngineOptions { choice, queue_depth: 4, buf_bytes: CHUNK_BYTES };
        let Ok(mut engine) = open_engine(&options) else { continue };
        let file = FileDevice::open(disk.path().join("file"), OpenMode::Create).expect("open");
        let device = engine.attach(Arc::new(file));
        let mut done = Vec::new();
        for tag in 0..32 {
            let buf = engine.acquire().expect("buffer");
            engine.bytes_mut(buf).fill(1);
            let (offset_bytes, len_bytes) = (tag * CHUNK_BYTES as u64, CHUNK_BYTES as u32);
            engine.submit(Request { device, op: Op::Write, offset_bytes, len_bytes, buf, tag });
            engine.wait(&mut done).expect("the engine itself is fine");
            engine.release(buf);
        }
        let good_count = done.iter().filter(|completion| completion.result.is_ok()).count();
        assert!((1..32).contains(&good_count), "{choice}: {good_count} of 32 fit 1 MiB");
        let error = done.pop().expect("one a request").result.expect_err("full");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{choice}: {error}");
        assert!(error.to_string().contains("free disk space"), "{choice}: {error}");
    }
}

#[test]
fn a_failed_replacement_leaves_the_old_file_and_no_rubbish() {
    let Some(disk) = SmallDisk::mount() else { return };
    let folder = FsFolder::open(disk.path()).expect("open");
    folder.write_atomic("manifest", b"old").expect("fits");
    let error = folder.write_atomic("manifest", &vec![1; 4 << 20]).expect_err("does not fit");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert_eq!(folder.read("manifest").expect("read").as_deref(), Some(&b"old"[..]));
    let file = folder.open("rows", OpenMode::Create).expect("open");
    file.write_at(0, &vec![1; 512 << 10]).expect("the space was given back");
}
