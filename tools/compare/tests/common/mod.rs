//! Every baseline, as small as it gets, behind one way to open it.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_compare::{
    is_rocksdb_available, HashDb, HashDbOptions, MmapOptions, MmapStore, RocksMode, RocksOptions,
    RocksStore,
};
use tierbed_core::{Budget, Result, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, Folder, FsFolder};

/// A folder in memory where there is room, so that syncs cost nothing; else on disk.
pub fn scratch() -> tempfile::TempDir {
    let in_memory = Path::new("/dev/shm");
    let free_bytes = rustix::fs::statvfs(in_memory).map_or(0, |stat| stat.f_bavail * stat.f_bsize);
    if free_bytes > 1 << 30 {
        if let Ok(folder) = tempfile::tempdir_in(in_memory) {
            return folder;
        }
    }
    tempfile::tempdir().unwrap()
}

/// Opens a store in a folder with a quota.
pub type Open = Box<dyn Fn(&Path, Option<u64>) -> Result<Box<dyn TrainStore>>>;

fn folder(path: &Path) -> Result<Arc<dyn Folder>> {
    Ok(Arc::new(FsFolder::create(path)?))
}

/// A hash store with room for a few hundred rows.
pub fn hash_options(cache_bytes: u64, choice: EngineChoice) -> HashDbOptions {
    HashDbOptions {
        engine: EngineOptions { choice, queue_depth: 4, buf_bytes: 4096 },
        cache_bytes,
        file_bytes: 256 << 10,
        ..HashDbOptions::within(4 << 20, Budget::new(32 << 20))
    }
}

fn hash(cache_bytes: u64, index_bytes_max: u64, choice: EngineChoice) -> Open {
    Box::new(move |path, disk_quota_bytes| {
        let options = HashDbOptions {
            disk_quota_bytes,
            index_bytes_max,
            ..hash_options(cache_bytes, choice)
        };
        Ok(Box::new(HashDb::open(folder(path)?, options)?))
    })
}

fn rocks(mode: RocksMode) -> Open {
    Box::new(move |path, disk_quota_bytes| {
        let options = RocksOptions {
            disk_quota_bytes,
            has_checksums: mode == RocksMode::Universal,
            read_threads: 3,
            // Folders in memory have no direct I/O; the engine's tests open it as it is.
            is_direct: false,
            ..RocksOptions::within(1 << 20, mode, Budget::new(8 << 20))
        };
        Ok(Box::new(RocksStore::open(folder(path)?, options)?))
    })
}

pub fn has_rocksdb() -> bool {
    is_rocksdb_available().is_ok()
}

/// Every store by name.
pub fn stores() -> Vec<(&'static str, Open)> {
    let mmap: Open = Box::new(|path, disk_quota_bytes| {
        let options = MmapOptions { disk_quota_bytes, ..MmapOptions::new(Budget::new(1 << 20))? };
        Ok(Box::new(MmapStore::open(folder(path)?, options)?))
    });
    let mut stores = vec![
        ("hashdb", hash(256 << 10, 1 << 20, EngineChoice::Auto)),
        // A cache of a few rows: every call writes buckets. Then an index of a few entries.
        ("hashdb, small cache", hash(24 << 10, 1 << 20, EngineChoice::Inline)),
        ("hashdb, long buckets", hash(64 << 10, 64, EngineChoice::Pread)),
        ("mmap", mmap),
    ];
    if has_rocksdb() {
        stores.push(("rocksdb", rocks(RocksMode::Levelled)));
        stores.push(("rocksdb universal", rocks(RocksMode::Universal)));
    }
    stores
}

/// The large files of the commit in force.
pub fn committed_files(folder: &Path) -> Vec<PathBuf> {
    let is_data = |path: &PathBuf| {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or("");
        matches!(ending, "bucket" | "dense" | "index" | "sst")
    };
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_live = path.ends_with("rocks-live");
            if path.is_dir() && !is_live {
                folders.push(path);
            } else if is_data(&path) {
                files.push(path);
            }
        }
    }
    files
}

#[allow(clippy::disallowed_methods, reason = "tests damage and repair files directly")]
pub fn write_file(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
