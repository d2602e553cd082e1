//! A published folder becomes the next version.
//!
//! ```text
//! claim, created ─▶ files ─▶ parts.json, created ─▶ manifest, created ─▶ HEAD, compare-and-swap
//! ```
//!
//! Each step makes the one before it visible to somebody. An error takes back what was written. A
//! kill in between leaves a version that no HEAD names, and pruning takes.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::{Error, Result};
use tierbed_io::{Device, Folder, FsFolder, OpenMode};

use crate::digest::{Digest, Hasher};
use crate::folder::read_range;
use crate::head::{Head, Link};
use crate::location::{draw_number, is_whole, FoundHead, Location};
use crate::names::{check_file, Seq, CLAIM, MARKS, PARTS_NAME};
use crate::objects::{no_conditions, Put, Tag, When};
use crate::parts::{manifest_of, FileParts, Parts, PARTS_BYTES_MAX, PART_BYTES};
use crate::Progress;

/// Bytes of a chunk: stores take at least 5 MiB, and at most 10,000 of them.
const CHUNK_BYTES: u64 = 16 << 20;
const CHUNKS_MAX: u64 = 10_000;
/// Numbers that are tried one by one before all that exist are listed.
const NEXT_TRIES: u64 = 4;

/// What to push, and where to.
#[derive(Debug, Clone)]
pub struct Push<'a> {
    /// The published folder.
    pub folder: &'a Path,
    /// What tells it from every other one.
    pub identity: &'a str,
    /// The identity that it is a delta on; `None` for a whole one.
    pub base: Option<&'a str>,
    /// The channel that moves to it.
    pub channel: &'a str,
    /// Where the channel is before.
    pub expected: Expected<'a>,
    /// Seconds since 1970.
    pub now_s: u64,
    /// Bytes of a part; [`PART_BYTES`] as a rule.
    pub part_bytes: u64,
}

impl<'a> Push<'a> {
    /// Returns what pushes the whole folder `folder` to `channel`.
    #[must_use]
    pub fn new(folder: &'a Path, identity: &'a str, channel: &'a str, now_s: u64) -> Self {
        let expected = Expected::Anything;
        Self { folder, identity, base: None, channel, expected, now_s, part_bytes: PART_BYTES }
    }
}

/// What a channel must be at for a push to move it. Whoever goes on pushing to a channel expects
/// what it left there, so that it learns of others between two pushes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expected<'a> {
    /// Whatever it is at.
    #[default]
    Anything,
    /// No version: nothing was ever pushed to it.
    Nothing,
    /// What this HEAD says, and it is that HEAD.
    Head(&'a Head),
}

impl Expected<'_> {
    /// Whether `found` is what is expected; a HEAD that cannot be read is nobody's.
    fn is(self, found: Option<&FoundHead>) -> bool {
        match (self, found.map(|found| &found.head)) {
            (Self::Anything, _) | (Self::Nothing, None) => true,
            (Self::Head(expected), Some(Ok(head))) => expected == head,
            _ => false,
        }
    }
}

/// A version that was pushed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pushed {
    /// Its number.
    pub seq: Seq,
    /// Bytes of its files.
    pub bytes: u64,
    /// All versions that serve the channel now, this one last.
    pub chain: Vec<Seq>,
    /// Where the channel is now.
    pub head: Head,
}

/// A push on its way.
struct Pushing<'a, 'b> {
    location: &'a Location,
    what: &'a Push<'a>,
    source: FsFolder,
    /// As it was before any file was read.
    manifest: Vec<u8>,
    claim: String,
    seq: Seq,
    bytes: u64,
    done: u64,
    progress: &'a mut Progress<'b>,
}

impl Location {
    /// Makes a published folder the next version, and moves a channel to it.
    ///
    /// # Errors
    /// `Invalid` when the folder has no manifest, is a delta on what the channel does not have, or
    /// another publisher moved the channel meanwhile, naming where to; `Io` and `NoSpace` from the
    /// store; what `progress` returns. The channel is then where it was.
    pub fn push(&self, what: &Push<'_>, progress: &mut Progress<'_>) -> Result<Pushed> {
        let source = FsFolder::open(what.folder)?;
        let mut names = source.list()?;
        // Of a folder that was pulled: this version has its own.
        names.retain(|name| !matches!(name.as_str(), PARTS_NAME | MARKS));
        let Some(manifest) = manifest_of(names.iter().map(String::as_str)) else {
            return Err(Error::invalid("not a published folder: it has no manifest")
                .with("path", what.folder.display())
                .with("remedy", "publish into it first; what was interrupted has no manifest"));
        };
        names.iter().try_for_each(|name| check_file(name))?;
        let found = self.found_head(what.channel)?;
        if !what.expected.is(found.as_ref()) {
            return Err(
                self.moved_by_another(what.channel, found.and_then(|found| found.head.ok()))
            );
        }
        let ancestors = self.ancestors(what, found.as_ref())?;
        let newest = found.iter().filter_map(|found| found.head.as_ref().ok()).map(Head::seq);
        let claim = draw_number();
        let of_manifest = manifest_bytes(&source, manifest)?;
        let lengths = names.iter().map(|name| open(&source, name)?.len_bytes());
        let bytes = lengths.sum::<Result<u64>>()?;
        let seq = self.claim(newest.max().map_or(1, |seq| seq.0 + 1), &claim)?;
        let mut pushing = Pushing {
            location: self,
            what,
            source,
            manifest: of_manifest,
            claim,
            seq,
            bytes,
            done: 0,
            progress,
        };
        let parts = pushing.put_files(&names, manifest, ancestors);
        let chain = parts.and_then(|parts| pushing.finish(&parts));
        let chain = chain.map_err(|error| self.without_rest(seq, &pushing.claim, error))?;
        let head = self.move_head(what.channel, found.as_ref(), chain, what.now_s)?;
        let chain = head.chain.iter().map(|link| link.seq).collect();
        Ok(Pushed { seq, bytes, chain, head })
    }

    /// Removes what was written of a version before `error`, as far as that can be done: a store
    /// that is full would otherwise have one more part of a version behind each try.
    fn without_rest(&self, seq: Seq, claim: &str, error: Error) -> Error {
        let removed = || -> Result<()> {
            let objects = self.objects_of(seq)?;
            if is_whole(&objects) || !self.is_claimed(seq, claim)? {
                return Ok(());
            }
            self.remove_version(seq, &objects)
        };
        match removed() {
            Ok(()) => error,
            Err(cause) => error.with("left_version", seq).with("left_because", cause),
        }
    }

    /// Returns the versions that `what` is a delta on.
    fn ancestors(&self, what: &Push<'_>, found: Option<&FoundHead>) -> Result<Vec<Link>> {
        let Some(base) = what.base else { return Ok(Vec::new()) };
        let chain = match found.map(|found| &found.head) {
            Some(Ok(head)) => head.chain.as_slice(),
            Some(Err(cause)) => return Err(self.damaged(what.channel, cause.clone())),
            None => &[],
        };
        let at = chain.iter().position(|link| link.identity == base);
        let ancestors = at.and_then(|at| chain.get(..=at)).ok_or_else(|| {
            Error::invalid("channel does not have what this is a delta on")
                .with("channel", self.named(what.channel))
                .with("delta_of", base)
                .with("remedy", "push the snapshot that it was made against first, or a whole one")
        })?;
        Ok(ancestors.to_vec())
    }

    /// Takes a number that nobody has, `first` if it is free.
    fn claim(&self, first: u64, claim: &str) -> Result<Seq> {
        let mut next = first;
        loop {
            let name = Seq(next).object(CLAIM);
            let put = self.objects.put(&name, claim.as_bytes(), &When::Absent)?;
            if put == Put::Done || self.is_claimed(Seq(next), claim)? {
                self.check_conditions(&name, claim)?;
                return Ok(Seq(next));
            }
            next += 1;
            if next == first + NEXT_TRIES {
                let listed = crate::listing::Names::read(self)?.versions;
                next = listed.keys().next_back().map_or(next, |seq| next.max(seq.0 + 1));
            }
        }
    }
}

impl Location {
    /// Fails when the store writes whatever the condition is, as some do that speak S3: of two
    /// publishers the later one would win unheard. The claim is ours, so it may be written again.
    fn check_conditions(&self, name: &str, claim: &str) -> Result<()> {
        let never = When::Unchanged(Tag("\"00000000000000000000000000000000\"".to_owned()));
        for when in [When::Absent, never] {
            if self.objects.put(name, claim.as_bytes(), &when)? == Put::Done {
                return Err(no_conditions());
            }
        }
        Ok(())
    }
}

fn open(source: &FsFolder, name: &str) -> Result<Arc<dyn Device>> {
    source.open(name, OpenMode::ReadOnly)
}

fn manifest_bytes(source: &FsFolder, name: &str) -> Result<Vec<u8>> {
    let device = open(source, name)?;
    let bytes = device.len_bytes()?;
    if bytes > PARTS_BYTES_MAX {
        return Err(Error::invalid("manifest is too long").with("bytes", bytes));
    }
    read_range(&*device, 0..bytes)
}

impl Pushing<'_, '_> {
    /// Writes all files but the manifest, and returns the parts of all.
    fn put_files(
        &mut self,
        names: &[String],
        manifest: &str,
        ancestors: Vec<Link>,
    ) -> Result<Parts> {
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            files.push(match name == manifest {
                true => self.manifest_parts(name),
                false => self.put_file(name)?,
            });
        }
        Ok(Parts {
            seq: self.seq,
            identity: self.what.identity.to_owned(),
            ancestors,
            written_at_s: self.what.now_s,
            part_bytes: self.what.part_bytes,
            files,
        })
    }

    fn put_file(&mut self, name: &str) -> Result<FileParts> {
        let device = open(&self.source, name)?;
        let bytes = device.len_bytes()?;
        let chunk_bytes = CHUNK_BYTES.max(bytes.div_ceil(CHUNKS_MAX));
        let mut parts = PartHasher::new(self.what.part_bytes);
        let location = self.location;
        let mut chunks = (0..bytes.div_ceil(chunk_bytes)).map(|at| {
            let range = at * chunk_bytes..bytes.min((at + 1) * chunk_bytes);
            let chunk = read_range(&*device, range)?;
            parts.update(&chunk);
            self.done += chunk.len() as u64;
            (self.progress)(self.done, self.bytes)?;
            Ok(chunk)
        });
        location.objects.put_large(&self.seq.object(name), &mut chunks)?;
        Ok(FileParts { name: name.to_owned(), bytes, sha256: parts.finish() })
    }

    fn manifest_parts(&self, name: &str) -> FileParts {
        let mut parts = PartHasher::new(self.what.part_bytes);
        parts.update(&self.manifest);
        let bytes = self.manifest.len() as u64;
        FileParts { name: name.to_owned(), bytes, sha256: parts.finish() }
    }

    /// Writes parts and manifest once everything else is there; returns the chain.
    fn finish(&mut self, parts: &Parts) -> Result<Vec<Link>> {
        let (location, seq) = (self.location, self.seq);
        let encoded = parts.encode()?;
        if manifest_bytes(&self.source, parts.manifest())? != self.manifest {
            return Err(Error::invalid("folder was published again while it was pushed")
                .with("path", self.what.folder.display())
                .with("remedy", "push it once its publisher is done"));
        }
        location.create(seq, PARTS_NAME, &encoded)?;
        self.check_all_there(parts)?;
        location.create(seq, parts.manifest(), &self.manifest)?;
        self.done += self.manifest.len() as u64;
        (self.progress)(self.done, self.bytes)?;
        Ok(parts.chain(&encoded))
    }

    /// Fails when somebody took away, or wrote over, what was written.
    fn check_all_there(&self, parts: &Parts) -> Result<()> {
        let objects = self.location.objects_of(self.seq)?;
        let files = parts.files.iter().filter(|file| file.name != parts.manifest());
        let is_there = |file: &FileParts| {
            objects.iter().any(|object| (&object.name, object.bytes) == (&file.name, file.bytes))
        };
        if self.location.is_claimed(self.seq, &self.claim)? && files.into_iter().all(is_there) {
            return Ok(());
        }
        Err(Error::invalid("version was pruned or overwritten while it was pushed")
            .with("version", self.seq)
            .with("remedy", "push again, and prune with a longer keep"))
    }
}

impl Location {
    /// Writes an object that nobody else may have written.
    fn create(&self, seq: Seq, file: &str, bytes: &[u8]) -> Result<()> {
        let name = seq.object(file);
        if self.objects.put(&name, bytes, &When::Absent)? == Put::Done {
            return Ok(());
        }
        // A client that asked again finds its own first write.
        let found = self.objects.get(&name, PARTS_BYTES_MAX)?;
        if found.is_some_and(|found| found.bytes == bytes) {
            return Ok(());
        }
        Err(Error::invalid("another publisher wrote into the version")
            .with("version", seq)
            .with("remedy", "push again; each push takes a number of its own"))
    }
}

/// Digests of parts of bytes that come in chunks.
struct PartHasher {
    part_bytes: u64,
    sha256: Vec<Digest>,
    hasher: Hasher,
    left: u64,
}

impl PartHasher {
    fn new(part_bytes: u64) -> Self {
        assert!(part_bytes > 0, "parts have bytes");
        Self { part_bytes, sha256: Vec::new(), hasher: Hasher::default(), left: part_bytes }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (now, later) = bytes.split_at(len);
            self.hasher.update(now);
            self.left -= len as u64;
            if self.left == 0 {
                self.end_part();
            }
            bytes = later;
        }
    }

    fn end_part(&mut self) {
        self.sha256.push(std::mem::take(&mut self.hasher).finish());
        self.left = self.part_bytes;
    }

    fn finish(mut self) -> Vec<Digest> {
        if self.left < self.part_bytes {
            self.end_part();
        }
        self.sha256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_of_parts_do_not_depend_on_chunks() {
        let bytes: Vec<u8> = (0..2500u32).map(|at| (at * 7) as u8).collect();
        let expected: Vec<_> = bytes.chunks(1000).map(Digest::of).collect();
        for chunk_bytes in [1, 7, 999, 1000, 1001, 2500] {
            let mut hasher = PartHasher::new(1000);
            bytes.chunks(chunk_bytes).for_each(|chunk| hasher.update(chunk));
            assert_eq!(hasher.finish(), expected);
        }
        assert!(PartHasher::new(1).finish().is_empty());
    }
}
