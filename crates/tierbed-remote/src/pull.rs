//! Versions come to a folder of this machine: fetched in parts, verified, then renamed.
//!
//! ```text
//! <to>/000057.incoming/  files, parts.done  ─ all parts verified and synced ─▶  <to>/000057/
//! ```
//!
//! What was fetched before a kill is gone on with. The folder under its final name is whole.

mod download;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Folder, FsFolder};

use crate::bandwidth::Bandwidth;
use crate::digest::Digest;
use crate::head::{check_chain, Link};
use crate::location::Location;
use crate::names::{Seq, MARKS, PARTS_NAME};
use crate::parts::Parts;
use crate::retry::Retry;
use crate::Progress;
use download::Download;

/// Parts that are fetched at the same time.
const THREADS: usize = 8;
/// Ending of the folder of a version that is on its way.
pub(crate) const INCOMING: &str = ".incoming";

/// Which versions to pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Want {
    /// Those that serve a channel.
    Channel(String),
    /// This one, and what it is a delta on.
    Version(Seq),
    /// These, of a HEAD that was read.
    Chain(Vec<Link>),
}

/// How to pull.
#[derive(Debug, Clone)]
pub struct Pull {
    /// Parts fetched at the same time.
    pub thread_count: usize,
    /// How often a part is asked for.
    pub retry: Retry,
    /// Bytes per second.
    pub bandwidth: Arc<Bandwidth>,
    /// Set by who waits no longer: nothing is asked again then.
    pub stop: Arc<AtomicBool>,
}

impl Default for Pull {
    fn default() -> Self {
        let bandwidth = Arc::new(Bandwidth::default());
        let stop = Arc::default();
        Self { thread_count: THREADS, retry: Retry::default(), bandwidth, stop }
    }
}

/// Versions that are here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pulled {
    /// The folder of the version that was wanted, and before it those that it is a delta on.
    pub folders: Vec<PathBuf>,
    /// Parts that were fetched now.
    pub parts_fetched: u64,
    /// Bytes that were fetched now.
    pub bytes_fetched: u64,
}

/// A version that is not here yet.
struct Missing {
    link: Link,
    parts: Parts,
    encoded: Vec<u8>,
}

impl Location {
    /// Brings versions into folders of `to` that are named after them; what is there already stays.
    ///
    /// # Errors
    /// `Corruption` when a part is not what was published, however often it is fetched; `NoSpace`
    /// before anything is fetched that does not fit; `Closed` while another one pulls into `to`;
    /// `Io` from both sides; what `progress` returns.
    pub fn pull(
        &self,
        want: &Want,
        to: &Path,
        how: &Pull,
        progress: &mut Progress<'_>,
    ) -> Result<Pulled> {
        let place = FsFolder::create(to)?;
        let _lock = place.lock()?;
        let pulling = Pulling { location: self, to, place: &place, how };
        let chain = how.retry.run(&how.stop, || self.chain_of(want))?;
        let mut missing = Vec::new();
        for link in &chain {
            if !pulling.is_here(link)? {
                let (parts, encoded) = how.retry.run(&how.stop, || self.parts_of(link))?;
                missing.push(Missing { link: link.clone(), parts, encoded });
            }
        }
        let total: u64 = missing.iter().map(|version| version.parts.bytes()).sum();
        let folders = chain.iter().map(|link| to.join(link.seq.folder_name())).collect();
        let mut pulled = Pulled { folders, parts_fetched: 0, bytes_fetched: 0 };
        let downloads = missing.iter().map(|version| pulling.begin(version));
        let downloads = downloads.collect::<Result<Vec<_>>>()?;
        for download in &downloads {
            pulled.parts_fetched += download.part_count();
            pulled.bytes_fetched += download.bytes_left();
        }
        check_space(to, pulled.bytes_fetched)?;
        // What an earlier pull fetched is here: who counts bytes begins behind it.
        let mut done = total - pulled.bytes_fetched;
        if !missing.is_empty() {
            progress(done, total)?;
        }
        for (version, download) in missing.iter().zip(downloads) {
            let bytes = download.bytes_left();
            download.run(&mut |fetched| progress(done + fetched, total))?;
            pulling.finish(version)?;
            done += bytes;
        }
        Ok(pulled)
    }

    fn chain_of(&self, want: &Want) -> Result<Vec<Link>> {
        match want {
            Want::Channel(channel) => Ok(self.some_head(channel)?.chain),
            Want::Chain(chain) => check_chain(chain).map(|()| chain.clone()),
            Want::Version(seq) => {
                self.check_whole([*seq])?;
                let (parts, encoded) = self.parts_at(*seq)?;
                Ok(parts.chain(&encoded))
            }
        }
    }
}

/// Versions on their way into one folder.
struct Pulling<'a> {
    location: &'a Location,
    to: &'a Path,
    place: &'a FsFolder,
    how: &'a Pull,
}

impl<'a> Pulling<'a> {
    /// Whether the version that `link` names is whole here.
    fn is_here(&self, link: &Link) -> Result<bool> {
        let path = self.to.join(link.seq.folder_name());
        if !path.exists() {
            return Ok(false);
        }
        if holds(&path, link)? {
            return Ok(true);
        }
        Err(Error::invalid("folder has another version of this number")
            .with("path", path.display())
            .with("remedy", "choose a new or empty folder"))
    }

    fn incoming_name(seq: Seq) -> String {
        format!("{}{INCOMING}", seq.folder_name())
    }

    fn incoming(&self, seq: Seq) -> Result<FsFolder> {
        FsFolder::create(self.to.join(Self::incoming_name(seq)))
    }

    fn begin(&self, version: &'a Missing) -> Result<Download<'a>> {
        let incoming = self.incoming(version.link.seq)?;
        Download::begin(self.location, &incoming, version, self.how)
    }

    /// Gives a version whose parts are all here its name.
    fn finish(&self, version: &Missing) -> Result<()> {
        let seq = version.link.seq;
        let incoming = self.incoming(seq)?;
        incoming.write_atomic(PARTS_NAME, &version.encoded)?;
        self.place.rename(&Self::incoming_name(seq), &seq.folder_name())?;
        self.place.sync()?;
        // Last, so that a kill before it costs no part. What is left of it means nothing.
        FsFolder::open(self.to.join(seq.folder_name()))?.remove(MARKS)
    }
}

/// Whether the folder at `path` is the version that `link` names.
pub(crate) fn holds(path: &Path, link: &Link) -> Result<bool> {
    let here = FsFolder::open(path)?.read(PARTS_NAME)?;
    Ok(here.is_some_and(|bytes| Digest::of(&bytes) == link.parts_sha256))
}

fn check_space(path: &Path, bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(path)
        .map_err(|cause| Error::os("cannot ask for free space", cause.into()))?;
    let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    if bytes <= free_bytes {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NoSpace, "versions do not fit the disk")
        .with("path", path.display())
        .with("needed_bytes", bytes)
        .with("free_bytes", free_bytes))
}
