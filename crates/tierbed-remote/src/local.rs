//! Versions in a folder of this machine: those that its server has, and may serve.
//!
//! ```text
//! <local>/000057/  whole   000058.incoming/  on its way   000051.leaving/  being removed
//! <local>/HEAD.<channel>.json  what was served last   <local>/server/LOCK  its one server
//! ```
//!
//! A folder is renamed before anything in it is removed, so that a version under its own name is
//! whole wherever its server is killed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};
use tierbed_io::{Folder, FolderLock, FsFolder};

use crate::head::{Head, Link};
use crate::names::{head_name, Seq, PARTS_NAME};
use crate::parts::Parts;
use crate::pull::{holds, INCOMING};

/// Ending of the folder of a version that is being removed.
const LEAVING: &str = ".leaving";

/// A folder of versions, and the right to remove some.
#[derive(Debug)]
pub struct Local {
    folder: FsFolder,
    path: PathBuf,
    _lock: FolderLock,
}

impl Local {
    /// Opens the folder at `path`, or makes it, for one server.
    ///
    /// # Errors
    /// `Closed` while another server has it; `Io` from the disk.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = FsFolder::create(path)?;
        let lock = FsFolder::create(path.join("server"))?.lock().map_err(|error| {
            error.with("versions", path.display()).with("remedy", "give each server its own folder")
        })?;
        Ok(Self { folder, path: path.to_owned(), _lock: lock })
    }

    /// Returns the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of a version.
    #[must_use]
    pub fn version(&self, seq: Seq) -> PathBuf {
        self.path.join(seq.folder_name())
    }

    /// Notes where `channel` is served from, for [`newest`](Self::newest).
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the disk.
    pub fn note(&self, channel: &str, head: &Head) -> Result<()> {
        let (name, bytes) = (head_name(channel)?, head.encode()?);
        if self.folder.read(&name)?.is_some_and(|noted| noted == bytes) {
            return Ok(());
        }
        self.folder.write_atomic(&name, &bytes)
    }

    /// Returns the versions that `channel` can be served from without its store: those noted last
    /// where they are whole, else the newest whole ones.
    ///
    /// # Errors
    /// `Io` from the disk.
    pub fn newest(&self, channel: &str) -> Result<Option<Vec<Link>>> {
        let noted = self.folder.read(&head_name(channel)?)?;
        if let Some(head) = noted.and_then(|bytes| Head::decode(&bytes).ok()) {
            if self.has(&head.chain)? {
                return Ok(Some(head.chain));
            }
        }
        for seq in self.versions()?.into_iter().rev() {
            let Some(encoded) = FsFolder::open(self.version(seq))?.read(PARTS_NAME)? else {
                continue;
            };
            let Ok(parts) = Parts::decode(&encoded) else { continue };
            let chain = parts.chain(&encoded);
            if parts.seq == seq && self.has(&chain)? {
                return Ok(Some(chain));
            }
        }
        Ok(None)
    }

    /// Whether all versions of a chain are here.
    fn has(&self, chain: &[Link]) -> Result<bool> {
        for link in chain {
            let path = self.version(link.seq);
            if !path.is_dir() || !holds(&path, link)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the versions under their own names, oldest first.
    fn versions(&self) -> Result<BTreeSet<Seq>> {
        let names = self.names()?;
        Ok(names.iter().filter_map(|name| Seq::of_folder(name)).collect())
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |cause| {
            Error::os("cannot list the folder of versions", cause).with("path", self.path.display())
        };
        let entries = fs::read_dir(&self.path).map_err(failed)?;
        let names = entries.map(|entry| Ok(entry.map_err(failed)?.file_name().into_string().ok()));
        Ok(names.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Removes all versions but `kept`, oldest first, and what is left of such removed before or on
    /// their way; returns them.
    ///
    /// # Errors
    /// `Io` from the disk.
    pub fn keep_only(&self, kept: &BTreeSet<Seq>) -> Result<Vec<Seq>> {
        let leaving: Vec<Seq> =
            self.versions()?.into_iter().filter(|seq| !kept.contains(seq)).collect();
        leaving.iter().try_for_each(|seq| self.remove(*seq))?;
        for name in self.names()? {
            let seq = |ending| name.strip_suffix(ending).and_then(Seq::of_folder);
            let is_unwanted = seq(INCOMING).is_some_and(|seq| !kept.contains(&seq));
            if is_unwanted || seq(LEAVING).is_some() {
                self.remove_folder(&name)?;
            }
        }
        Ok(leaving)
    }

    /// Removes what lies in the place of versions of a chain and is something else: damaged copies,
    /// and versions of these numbers that were pushed anew.
    ///
    /// # Errors
    /// `Io` from the disk.
    pub fn make_way(&self, chain: &[Link]) -> Result<()> {
        for link in chain {
            let path = self.version(link.seq);
            if path.exists() && !holds(&path, link)? {
                self.remove(link.seq)?;
            }
        }
        Ok(())
    }

    /// Removes one version: a damaged copy, or one that nobody needs.
    ///
    /// # Errors
    /// `Io` from the disk.
    pub fn remove(&self, seq: Seq) -> Result<()> {
        let leaving = format!("{}{LEAVING}", seq.folder_name());
        if self.path.join(&leaving).exists() {
            self.remove_folder(&leaving)?;
        }
        if self.version(seq).exists() {
            self.folder.rename(&seq.folder_name(), &leaving)?;
            self.folder.sync()?;
            self.remove_folder(&leaving)?;
        }
        Ok(())
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        fs::remove_dir_all(&path).map_err(|cause| {
            Error::os("cannot remove a version", cause).with("path", path.display())
        })
    }
}
