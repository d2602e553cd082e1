//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! decodes them. Damage is an error, which is fine; anything else that goes wrong is a bug.

use std::sync::Arc;

use tierbed_core::{Budget, RowStore, TableId, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, Folder, MemoryFolder, PAGE_BYTES};

use crate::commit::{current_of, MANIFEST, MANIFEST_VERSION};
use crate::{shards, FileStore, FileStoreOptions};

/// `CURRENT`, then a manifest that it names, in a store that is opened, read whole and verified;
/// or what several shards have in force.
pub fn commit(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let folder = Arc::new(MemoryFolder::default());
    if kind % 3 == 2 {
        let mended = shards::mended(rest);
        if folder.write_atomic(shards::SHARDS_FILE, &mended).is_ok() {
            let _ = shards::read_file(&*folder);
        }
        return;
    }
    let is_written = if kind % 3 == 0 {
        folder.write_atomic("CURRENT", rest).is_ok()
    } else {
        let manifest = MANIFEST.encode(MANIFEST_VERSION, rest);
        folder.write_durable("commit-000001.manifest", &manifest).is_ok()
            && folder.write_atomic("CURRENT", current_of(1, &manifest).as_bytes()).is_ok()
    };
    let options = FileStoreOptions {
        budget: Budget::new(8 << 20),
        engine: EngineOptions {
            choice: EngineChoice::Inline,
            queue_depth: 2,
            buf_bytes: PAGE_BYTES,
        },
        disk_quota_bytes: None,
    };
    if !is_written {
        return;
    }
    let Ok(mut store) = FileStore::open(folder, options) else { return };
    let _ = store.verify();
    for table in (0..store.schema().tables().len() as u32).map(TableId) {
        let _ = store.scan(table, &mut |_, _| Ok(()));
    }
}

pub use crate::file::fuzz::{map, page};

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("store_commit", super::commit);
    }
}
