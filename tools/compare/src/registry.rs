//! Registration of the compared stores as backends of the engine.

use tierbed_store::registry::{register, OpenOptions};

use crate::{HashDb, HashDbOptions, MmapOptions, MmapStore, RocksMode, RocksOptions, RocksStore};

/// Lets the engine open the stores of this crate by the names of their backends.
pub fn register_stores() {
    register("hashdb", |folder, options| {
        let OpenOptions { engine, disk_quota_bytes, .. } = options;
        let preset = HashDbOptions::within(options.memory_bytes, options.budget);
        Ok(Box::new(HashDb::open(folder, HashDbOptions { engine, disk_quota_bytes, ..preset })?))
    });
    register("mmap", |folder, options| {
        let preset = MmapOptions::new(options.budget)?;
        let disk_quota_bytes = options.disk_quota_bytes;
        Ok(Box::new(MmapStore::open(folder, MmapOptions { disk_quota_bytes, ..preset })?))
    });
    register("rocksdb", |folder, options| {
        Ok(Box::new(RocksStore::open(folder, rocks(options, RocksMode::Levelled))?))
    });
    register("rocksdb_universal", |folder, options| {
        Ok(Box::new(RocksStore::open(folder, rocks(options, RocksMode::Universal))?))
    });
}

fn rocks(options: OpenOptions, mode: RocksMode) -> RocksOptions {
    let preset = RocksOptions::within(options.memory_bytes, mode, options.budget);
    RocksOptions { disk_quota_bytes: options.disk_quota_bytes, ..preset }
}
