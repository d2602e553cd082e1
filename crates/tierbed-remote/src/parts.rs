//! Files of a version, cut in parts: sizes and SHA-256 digests.
//!
//! One line `tierbed-parts 1 <crc32c of the rest>`, then JSON. Names are plain: a version cannot
//! write beside its folder. Normative text: docs/reference/formats/remote.md.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};
use tierbed_io::CheckedText;

use crate::digest::Digest;
use crate::head::{check_chain, decode, encode, Link};
use crate::names::{check_file, check_identity, Seq, MANIFESTS};

/// Bytes of a part: few enough to be fetched again, many enough to be few.
pub const PART_BYTES: u64 = 64 << 20;
/// Longest `parts.json` that is read: one of half a million parts.
pub(crate) const PARTS_BYTES_MAX: u64 = 64 << 20;
const FILES_MAX: usize = 1 << 16;
const PART_BYTES_RANGE: std::ops::RangeInclusive<u64> = 512..=(1 << 30);
const TEXT: CheckedText = CheckedText { magic: "tierbed-parts", versions: 1..=1 };

/// A file of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileParts {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Digests of its parts, in order.
    pub sha256: Vec<Digest>,
}

/// What a version consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    /// Number of the version.
    pub seq: Seq,
    /// Identity of what was published.
    pub identity: String,
    /// The versions that it is a delta on, oldest first; none of a whole one.
    pub ancestors: Vec<Link>,
    /// When it was pushed, in seconds since 1970.
    pub written_at_s: u64,
    /// Bytes of each part but the last one of a file.
    pub part_bytes: u64,
    /// All files, in ascending order of names; one of them is a manifest.
    pub files: Vec<FileParts>,
}

/// A part: which file, which part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PartAt {
    pub(crate) file: u32,
    pub(crate) part: u32,
}

impl Parts {
    /// Returns the bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the name of the manifest.
    #[must_use]
    #[expect(clippy::expect_used, reason = "checked when decoded, and before it is encoded")]
    pub fn manifest(&self) -> &'static str {
        manifest_of(self.files.iter().map(|file| file.name.as_str())).expect("has a manifest")
    }

    /// Returns the chain that ends with this version, whose encoded bytes are `encoded`.
    #[must_use]
    pub fn chain(&self, encoded: &[u8]) -> Vec<Link> {
        let parts_sha256 = Digest::of(encoded);
        let own = Link { seq: self.seq, identity: self.identity.clone(), parts_sha256 };
        self.ancestors.iter().cloned().chain([own]).collect()
    }

    /// Encodes the object.
    ///
    /// # Errors
    /// `Invalid` when names or sizes are not those of a version.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let bytes = encode(&TEXT, self)?;
        if bytes.len() as u64 > PARTS_BYTES_MAX {
            return Err(Error::invalid("a version has too many parts").with("bytes", bytes.len()));
        }
        Ok(bytes)
    }

    /// Decodes and checks an object.
    ///
    /// # Errors
    /// `Invalid` for another format or version, `Corruption` when the bytes are not what was
    /// written.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let parts: Self = decode(&TEXT, bytes)?;
        let bad = |cause| Error::corruption("parts.json is of no version").with("cause", cause);
        parts.check().map_err(bad)?;
        Ok(parts)
    }

    fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::invalid(what.to_owned()));
        check_identity(&self.identity)?;
        if !self.ancestors.is_empty() {
            check_chain(&self.ancestors)?;
        }
        if self.ancestors.last().is_some_and(|last| last.seq >= self.seq) {
            return bad("a version is later than what it is a delta on");
        }
        if !PART_BYTES_RANGE.contains(&self.part_bytes) || self.files.len() > FILES_MAX {
            return bad("parts or files have a size or number that none have");
        }
        if !self.files.is_sorted_by(|before, next| before.name < next.name) {
            return bad("files must ascend by name");
        }
        let mut bytes = 0u64;
        for file in &self.files {
            check_file(&file.name)?;
            let has_all = file.bytes.div_ceil(self.part_bytes) == file.sha256.len() as u64;
            match bytes.checked_add(file.bytes) {
                Some(sum) if has_all => bytes = sum,
                _ => return bad("parts do not make up their file"),
            }
        }
        match manifest_of(self.files.iter().map(|file| file.name.as_str())) {
            Some(_) => Ok(()),
            None => bad("a version has one manifest: snapshot.json, delta.json or shards.json"),
        }
    }

    /// Lists all parts, file by file.
    pub(crate) fn all(&self) -> impl Iterator<Item = PartAt> + '_ {
        (0..).zip(&self.files).flat_map(|(file, parts)| {
            (0..).zip(&parts.sha256).map(move |(part, _)| PartAt { file, part })
        })
    }

    /// Returns file, place and digest of a part; `None` when there is no such part.
    pub(crate) fn get(&self, at: PartAt) -> Option<Part<'_>> {
        let file = self.files.get(at.file as usize)?;
        let sha256 = *file.sha256.get(at.part as usize)?;
        let start = u64::from(at.part) * self.part_bytes;
        let end = file.bytes.min(start + self.part_bytes);
        Some(Part { file: &file.name, range: start..end, sha256 })
    }
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part<'a> {
    pub(crate) file: &'a str,
    pub(crate) range: Range<u64>,
    pub(crate) sha256: Digest,
}

/// Returns the manifest among names, if there is exactly one.
pub(crate) fn manifest_of<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let mut found = names.filter_map(|name| MANIFESTS.into_iter().find(|known| *known == name));
    let manifest = found.next()?;
    found.next().is_none().then_some(manifest)
}

#[cfg(test)]
mod tests {
    use tierbed_core::ErrorKind;

    use super::*;

    fn file(name: &str, bytes: u64) -> FileParts {
        let sha256 = (0..bytes.div_ceil(1024)).map(|at| Digest::of(&at.to_le_bytes())).collect();
        FileParts { name: name.into(), bytes, sha256 }
    }

    fn parts() -> Parts {
        let link = Link { seq: Seq(6), identity: "a".into(), parts_sha256: Digest::of(b"6") };
        Parts {
            seq: Seq(7),
            identity: "b".into(),
            ancestors: vec![link],
            written_at_s: 9,
            part_bytes: 1024,
            files: vec![file("att.empty", 0), file("rows.pages", 2049), file("snapshot.json", 10)],
        }
    }

    #[test]
    fn parts_come_back_and_cover_their_files() {
        let parts = parts();
        let bytes = parts.encode().unwrap();
        assert_eq!(Parts::decode(&bytes).unwrap(), parts);
        let all: Vec<_> = parts.all().map(|at| parts.get(at).unwrap()).collect();
        let ranges: Vec<_> = all.iter().map(|part| (part.file, part.range.clone())).collect();
        let pages = "rows.pages";
        let expected =
            [(pages, 0..1024), (pages, 1024..2048), (pages, 2048..2049), ("snapshot.json", 0..10)];
        assert_eq!(ranges, expected);
        let chain = parts.chain(&bytes);
        assert_eq!(
            (chain.len(), chain[1].seq, chain[1].parts_sha256),
            (2, Seq(7), Digest::of(&bytes))
        );
    }

    #[test]
    fn every_flipped_bit_of_parts_is_noticed() {
        let bytes = parts().encode().unwrap();
        for at in 0..bytes.len() {
            assert!(Parts::decode(&bytes[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut wrong = bytes.clone();
                wrong[at] ^= 1 << bit;
                assert!(Parts::decode(&wrong).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn parts_of_no_version_are_refused() {
        let breaks: [fn(&mut Parts); 11] = [
            |parts| parts.files[1].name = "../rows.pages".into(),
            |parts| parts.files[1].name = "/etc/passwd".into(),
            |parts| parts.files[1].name = "parts.json".into(),
            |parts| parts.files[1].name = "att.empty".into(),
            |parts| parts.files[1].bytes = 3073,
            |parts| parts.files[1].bytes = u64::MAX,
            |parts| parts.part_bytes = 0,
            |parts| parts.part_bytes = u64::MAX,
            |parts| parts.seq = Seq(6),
            |parts| parts.identity = String::new(),
            |parts| drop(parts.files.pop()),
        ];
        for (at, damage) in breaks.iter().enumerate() {
            let mut parts = parts();
            damage(&mut parts);
            let bytes = encode(&TEXT, &parts).unwrap();
            let error = Parts::decode(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{at}: {error}");
            assert!(parts.encode().is_err(), "{at}");
        }
        let more = String::from_utf8(parts().encode().unwrap()).unwrap();
        let (_, body) = more.split_once('\n').unwrap();
        let body = body.replace("\"seq\": 7", "\"seq\": 7, \"link\": 1");
        assert!(Parts::decode(&TEXT.encode(1, body.as_bytes())).is_err(), "unknown field");
    }
}
