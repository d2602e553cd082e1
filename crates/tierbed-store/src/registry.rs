//! Registry of stores that other crates provide, by the name of their backend.
//!
//! The engine must not be linked with the stores it is compared with. A build that has them
//! registers how they are opened; a build without them refuses the name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tierbed_core::{Budget, Error, Result, TrainStore};
use tierbed_io::{EngineOptions, Folder};

/// What a registered store is opened with.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The account of all memory.
    pub budget: Budget,
    /// Bytes of it that the store may divide among parts of its own.
    pub memory_bytes: u64,
    /// How pages move.
    pub engine: EngineOptions,
    /// Most bytes on disk.
    pub disk_quota_bytes: Option<u64>,
}

/// Opens a store in a folder.
pub type OpenStore = fn(Arc<dyn Folder>, OpenOptions) -> Result<Box<dyn TrainStore>>;

static STORES: Mutex<BTreeMap<&'static str, OpenStore>> = Mutex::new(BTreeMap::new());

/// Lets [`open_registered`] open `backend` by `open`; the last call for a name counts.
pub fn register(backend: &'static str, open: OpenStore) {
    STORES.lock().unwrap_or_else(PoisonError::into_inner).insert(backend, open);
}

/// Opens the registered store of this name in `folder`.
///
/// # Errors
/// `Unsupported` when this build does not have it, otherwise as the store's own.
pub fn open_registered(
    backend: &str,
    folder: Arc<dyn Folder>,
    options: OpenOptions,
) -> Result<Box<dyn TrainStore>> {
    let stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let open = stores.get(backend).copied();
    drop(stores);
    let Some(open) = open else {
        return Err(Error::unsupported("backend is not part of this build")
            .with("backend", backend)
            .with("remedy", "it is for comparison: install tierbed-bench, as `make setup` does"));
    };
    open(folder, options)
}

#[cfg(test)]
mod tests {
    use tierbed_core::ErrorKind;
    use tierbed_io::{EngineChoice, MemoryFolder};

    use super::*;
    use crate::MemoryStore;

    fn open(backend: &str) -> Result<Box<dyn TrainStore>> {
        let options = OpenOptions {
            budget: Budget::unlimited(),
            memory_bytes: 1 << 20,
            engine: EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() },
            disk_quota_bytes: None,
        };
        open_registered(backend, Arc::new(MemoryFolder::new()), options)
    }

    #[test]
    fn a_backend_of_another_build_is_refused_and_what_has_it_is_named() {
        let refused = open("another").err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("tierbed-bench"), "{refused}");
        register("another", |folder, options| {
            Ok(Box::new(MemoryStore::open(folder, options.budget)?))
        });
        assert!(open("another").is_ok());
    }
}
