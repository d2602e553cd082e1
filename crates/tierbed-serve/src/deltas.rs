//! A folder of deltas that a server follows: each is a folder in it.
//!
//! ```text
//! names ─▶ manifests of what is whole ─▶ the newest that can answer ─▶ those below it, then it
//! ```
//!
//! Names say which is newer. Numbers in them count by value: `delta-10` comes behind `delta-9`.
//! Manifests say what each was made against. One without a manifest is still being written. One
//! that was refused is told of, and read again when its files change; what answered goes on.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::FsFolder;
use tierbed_snapshot::manifest::{Manifest, MANIFEST_NAME};

use crate::routes::Service;
use crate::stamp::Stamp;

/// Time after which a delta is read again that its disk refused to give.
const AGAIN_US: u64 = 10_000_000;

/// A name of a delta, ordered as people number them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    parts: Vec<Part>,
    text: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// A number without zeros before it: the longer one is greater.
    Number {
        length: usize,
        digits: String,
    },
    Text(String),
}

impl Name {
    fn new(text: String) -> Self {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            let is_number = first.is_ascii_digit();
            let end = rest.find(|c: char| c.is_ascii_digit() != is_number).unwrap_or(rest.len());
            let (part, behind) = rest.split_at(end);
            rest = behind;
            parts.push(if is_number {
                let digits = part.trim_start_matches('0').to_owned();
                Part::Number { length: digits.len(), digits }
            } else {
                Part::Text(part.to_owned())
            });
        }
        Self { parts, text }
    }
}

/// What the manifest of a delta says.
#[derive(Debug)]
struct Made {
    identity: String,
    /// The delta that it was made against; none: a snapshot.
    after: Option<String>,
}

/// A folder that was found.
#[derive(Debug)]
struct Known {
    files: BTreeMap<OsString, Stamp>,
    /// Of a whole delta that was not refused.
    made: Option<Made>,
    /// When to read it again though nothing changed.
    again_us: Option<u64>,
    is_told: bool,
}

/// Looks for deltas and applies them. See the module documentation.
#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    known: BTreeMap<Name, Known>,
    /// The newest that answers, or did: nothing goes back behind it.
    newest: Option<Name>,
}

impl Follower {
    /// Follows the folder at `path`, and applies what is there: nobody is answered from less.
    ///
    /// # Errors
    /// `Invalid` when there is no such folder.
    pub(crate) fn begin(path: &Path, service: &Service) -> Result<Self> {
        if !path.is_dir() {
            return Err(Error::invalid("no such folder of deltas")
                .with("path", path.display())
                .with("remedy", "make it, or name the folder that deltas are published into"));
        }
        let mut follower = Self { path: path.to_owned(), known: BTreeMap::new(), newest: None };
        follower.look(service);
        Ok(follower)
    }

    /// Applies what has come.
    pub(crate) fn look(&mut self, service: &Service) {
        if let Err(error) = self.read(service) {
            service.log.deltas_not_read(&error);
            return;
        }
        let mut waiting = 0;
        for name in self.newer() {
            let answering = service.snapshot().generation().identity;
            let Some(chain) = self.chain(&name, &answering) else {
                waiting += 1;
                self.tell_of_wait(service, &name);
                continue;
            };
            if self.apply(service, &chain) {
                self.newest = Some(name);
                break;
            }
        }
        service.metrics.deltas_waiting.set(waiting);
    }

    /// Finds the folders that there are, and reads manifests of those that changed.
    fn read(&mut self, service: &Service) -> Result<()> {
        let failed = |cause| {
            let error = Error::os("cannot list the folder of deltas", cause);
            error.with("path", self.path.display())
        };
        let now_us = service.clock.now_us();
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(text) = entry.file_name().into_string() else { continue };
            if text.starts_with('.') || !entry.path().is_dir() {
                continue;
            }
            let name = Name::new(text);
            let known = self.known.remove(&name);
            let is_past = self.newest.as_ref().is_some_and(|newest| name <= *newest);
            let known = match known {
                Some(known) if is_past => known,
                known => {
                    let files = files_of(&entry.path());
                    let is_due = |known: &Known| known.again_us.is_some_and(|us| us <= now_us);
                    let same = known.filter(|known| known.files == files && !is_due(known));
                    same.unwrap_or_else(|| read(service, &entry.path(), files))
                }
            };
            found.insert(name, known);
        }
        self.known = found;
        Ok(())
    }

    /// Returns the whole deltas behind the newest that answered, newest first.
    fn newer(&self) -> Vec<Name> {
        let newer = self.known.iter().rev().filter(|(_, known)| known.made.is_some());
        let newer = newer.map(|(name, _)| name);
        newer.take_while(|name| Some(*name) > self.newest.as_ref()).cloned().collect()
    }

    /// Returns what is to be applied so that `name` answers, oldest first; `None` while a delta
    /// that it was made against is missing, or lies behind what answers.
    fn chain(&self, name: &Name, answering: &str) -> Option<Vec<Name>> {
        let mut chain = Vec::new();
        let mut at = name;
        loop {
            let made = self.known.get(at)?.made.as_ref()?;
            if made.identity == answering {
                break;
            }
            // The second is a ring, which only a forger makes.
            if Some(at) <= self.newest.as_ref() || chain.len() > self.known.len() {
                return None;
            }
            chain.push(at.clone());
            let Some(after) = made.after.as_ref().filter(|after| *after != answering) else {
                break;
            };
            let is_after =
                |known: &Known| known.made.as_ref().is_some_and(|it| it.identity == *after);
            at = self.known.iter().find(|(_, known)| is_after(known))?.0;
        }
        chain.reverse();
        Some(chain)
    }

    /// Applies deltas one after the other; false when one was refused, or the server stops.
    fn apply(&mut self, service: &Service, chain: &[Name]) -> bool {
        for name in chain {
            if *service.stopping.borrow() {
                return false;
            }
            let path = self.path.join(&name.text);
            let opened = FsFolder::open(&path).inspect_err(|error| {
                service.delta_refused(&path.display().to_string(), error);
            });
            let Err(error) = opened.and_then(|folder| service.apply(Arc::new(folder))) else {
                continue;
            };
            if let Some(known) = self.known.get_mut(name) {
                known.made = None;
                known.again_us = again_us(service, &error);
            }
            return false;
        }
        true
    }

    fn tell_of_wait(&mut self, service: &Service, name: &Name) {
        let Some(known) = self.known.get_mut(name) else { return };
        if !std::mem::replace(&mut known.is_told, true) {
            service.log.delta_waits(&self.path.join(&name.text).display().to_string());
        }
    }
}

fn again_us(service: &Service, error: &Error) -> Option<u64> {
    let is_disk = error.kind() == ErrorKind::Io;
    is_disk.then(|| service.clock.now_us().saturating_add(AGAIN_US))
}

/// Reads what a folder says of itself.
fn read(service: &Service, path: &Path, files: BTreeMap<OsString, Stamp>) -> Known {
    let mut known = Known { files, made: None, again_us: None, is_told: false };
    if !known.files.contains_key(std::ffi::OsStr::new(MANIFEST_NAME)) {
        return known;
    }
    let made = FsFolder::open(path).and_then(|folder| {
        let manifest = Manifest::read(&folder)?;
        Ok(Made { identity: manifest.identity()?, after: manifest.base_delta })
    });
    match made {
        Ok(made) => known.made = Some(made),
        Err(error) => {
            service.delta_refused(&path.display().to_string(), &error);
            known.again_us = again_us(service, &error);
        }
    }
    known
}

/// Returns the files of a folder; what goes away meanwhile is left out, and found changed later.
fn files_of(path: &Path) -> BTreeMap<OsString, Stamp> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name(), Stamp::of(&entry.path())?))).collect()
}

#[cfg(test)]
mod tests {
    use super::Name;

    #[test]
    fn numbers_in_names_count_by_value() {
        let names = ["", "1", "01x", "2-9", "2-10", "10", "d-1", "d-9", "d-009a", "d-10", "d-10b"];
        let ordered: Vec<Name> = names.iter().map(|name| Name::new((*name).to_owned())).collect();
        assert!(ordered.is_sorted_by(|a, b| a < b), "{ordered:?}");
    }
}
