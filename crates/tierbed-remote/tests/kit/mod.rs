//! What tests of versions share: published folders, places to push to, a store that fails.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses some of it")]

mod faulty;
#[cfg(feature = "s3")]
mod proxy;
#[cfg(feature = "s3")]
mod server;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tierbed_core::env::SplitMix64;
use tierbed_core::Result;
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{
    FolderObjects, Location, Objects, Prune, Pruned, Pull, Pulled, Push, Pushed, Retry, Want,
};

pub use faulty::{Answer, Call, Faulty};
#[cfg(feature = "s3")]
pub use proxy::{Line, Proxy};
#[cfg(feature = "s3")]
pub use server::{server, settings, Server, BUCKET, READER, WRITER};

/// Bytes of a part in tests.
pub const PART_BYTES: u64 = 1024;
/// A second in 2026: what is written now is younger than a day after it, and older than a year.
pub const NOW_S: u64 = 4_000_000_000;

/// Makes the published folder of `seed`: its identity is `id<seed>`.
pub fn publish(at: &Path, seed: u64) {
    let folder = FsFolder::create(at).unwrap();
    let mut rng = SplitMix64::new(seed);
    for (name, bytes) in [("rows.pages", 7000), ("rows.index", 1024), ("att.none", 0)] {
        let bytes: Vec<u8> = (0..bytes).map(|_| rng.next_u64() as u8).collect();
        folder.write_durable(name, &bytes).unwrap();
    }
    folder.write_durable("snapshot.json", format!("manifest {seed}").as_bytes()).unwrap();
}

/// A published folder that lives as long as this.
pub fn published(seed: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    publish(folder.path(), seed);
    folder
}

/// Returns the files of a folder, without what pulling adds.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let opened = FsFolder::open(folder).unwrap();
    let names = opened.list().unwrap().into_iter().filter(|name| !name.starts_with("parts."));
    names.map(|name| (name.clone(), opened.read(&name).unwrap().unwrap())).collect()
}

/// A place for versions, and what holds it.
pub struct Place {
    pub name: &'static str,
    /// Bucket and prefix, where it is one.
    pub address: String,
    pub objects: Arc<dyn Objects>,
    _folder: Option<TempDir>,
}

/// Returns what makes an empty place of each kind that there is here.
pub fn kinds() -> Vec<fn() -> Place> {
    #[cfg(feature = "s3")]
    if server().is_some() {
        return vec![folder_place, bucket_place];
    }
    vec![folder_place]
}

/// Returns an empty place of each kind that there is here.
pub fn places() -> Vec<Place> {
    kinds().iter().map(|make| make()).collect()
}

pub fn folder_place() -> Place {
    let folder = tempfile::tempdir().unwrap();
    let objects = Arc::new(FolderObjects::new(folder.path()));
    Place { name: "folder", address: String::new(), objects, _folder: Some(folder) }
}

/// Each has a prefix of its own in one bucket.
#[cfg(feature = "s3")]
pub fn bucket_place() -> Place {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let prefix = format!("place{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let objects = Arc::new(server().unwrap().objects(&prefix));
    Place { name: "bucket", address: format!("{BUCKET}/{prefix}"), objects, _folder: None }
}

impl Place {
    /// Opens it as one publisher or server does.
    pub fn open(&self) -> Location {
        Location::of(Arc::clone(&self.objects), "models/ads")
    }

    /// Opens it over a store that may fail.
    pub fn faulty(&self, answer: impl Fn(&Call<'_>) -> Answer + Send + Sync + 'static) -> Location {
        Location::of(self.faulty_objects(answer), "models/ads")
    }

    pub fn faulty_objects(
        &self,
        answer: impl Fn(&Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Arc<Faulty> {
        Arc::new(Faulty::new(Arc::clone(&self.objects), answer))
    }
}

/// What a test does with a location, in few words.
pub trait Does {
    fn push_whole(&self, seed: u64, channel: &str) -> Result<Pushed>;
    fn push_delta(&self, seed: u64, base: u64, channel: &str) -> Result<Pushed>;
    fn pull_into(&self, channel: &str, to: &Path) -> Result<Pulled>;
    fn prune_old(&self) -> Result<Pruned>;
    /// Pulls a channel anew, and says which folders came, by seed.
    fn served(&self, channel: &str) -> Result<Vec<u64>>;
}

/// One thread, and no pauses: what happens is counted.
pub fn at_once() -> Pull {
    let retry = Retry { try_count: 5, pause: Duration::ZERO };
    Pull { thread_count: 1, retry, ..Pull::default() }
}

impl Does for Location {
    fn push_whole(&self, seed: u64, channel: &str) -> Result<Pushed> {
        let (folder, identity) = (published(seed), format!("id{seed}"));
        let push = Push::new(folder.path(), &identity, channel, NOW_S);
        self.push(&Push { part_bytes: PART_BYTES, ..push }, &mut |_, _| Ok(()))
    }

    fn push_delta(&self, seed: u64, base: u64, channel: &str) -> Result<Pushed> {
        let (folder, identity, base) = (published(seed), format!("id{seed}"), format!("id{base}"));
        let push = Push::new(folder.path(), &identity, channel, NOW_S);
        let push = Push { base: Some(&base), part_bytes: PART_BYTES, ..push };
        self.push(&push, &mut |_, _| Ok(()))
    }

    fn pull_into(&self, channel: &str, to: &Path) -> Result<Pulled> {
        self.pull(&Want::Channel(channel.into()), to, &at_once(), &mut |_, _| Ok(()))
    }

    fn prune_old(&self) -> Result<Pruned> {
        self.prune(Prune { keep_s: 3600, now_s: NOW_S }, &mut |_, _| Ok(()))
    }

    fn served(&self, channel: &str) -> Result<Vec<u64>> {
        let to = tempfile::tempdir().unwrap();
        let pulled = self.pull_into(channel, to.path())?;
        Ok(pulled.folders.iter().map(|folder| seed_of(folder)).collect())
    }
}

/// Returns the seed of a folder, all of whose bytes are those that were published.
pub fn seed_of(folder: &Path) -> u64 {
    let found = files(folder);
    let manifest = String::from_utf8(found["snapshot.json"].clone()).unwrap();
    let seed = manifest.strip_prefix("manifest ").unwrap().parse().unwrap();
    assert_eq!(found, files(published(seed).path()), "{}", folder.display());
    seed
}
