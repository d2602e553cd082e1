//! A place where versions of one model lie, and reading what lies there.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result};

use crate::digest::Digest;
use crate::folder::FolderObjects;
use crate::head::{Head, Link, HEAD_BYTES_MAX};
use crate::names::{head_name, Object, Seq, CLAIM, LEAVING, PARTS_NAME};
use crate::objects::{Listed, Objects, Put, Tag, When};
use crate::parts::{manifest_of, Parts, PARTS_BYTES_MAX};

/// Versions of a model, in a folder or a bucket.
#[derive(Debug, Clone)]
pub struct Location {
    pub(crate) objects: Arc<dyn Objects>,
    /// The last word of where it is, for messages.
    model: String,
}

/// Opens the objects at a path or an address, as [`Location::open`] does.
///
/// # Errors
/// Those of [`Location::open`].
pub fn open_objects(location: &str) -> Result<Arc<dyn Objects>> {
    let Some((scheme, address)) = location.split_once("://") else {
        return Ok(Arc::new(FolderObjects::new(Path::new(location))));
    };
    #[cfg(feature = "s3")]
    if let Some(kind) = crate::BucketKind::of(scheme) {
        let settings = crate::BucketSettings::from_env();
        return Ok(Arc::new(crate::BucketObjects::open_in(kind, address, &settings)?));
    }
    #[cfg(not(feature = "s3"))]
    let _ = address;
    Err(Error::unsupported("no objects can lie there")
        .with("scheme", scheme)
        .with("remedy", "name a folder, or a bucket: s3://, gs:// or az://bucket/prefix"))
}

/// A HEAD as it was found.
#[derive(Debug, Clone)]
pub(crate) struct FoundHead {
    pub(crate) tag: Tag,
    /// What it says, or why it cannot be read.
    pub(crate) head: std::result::Result<Head, String>,
}

impl Location {
    /// Opens the location that a path or an address names: `s3://`, `gs://` or `az://bucket/prefix`. How the bucket is
    /// reached is said by this process's environment. Nothing is read or made yet.
    ///
    /// # Errors
    /// `Unsupported` for the address of a store that this build cannot reach; `Invalid` for one
    /// that leads nowhere, or settings that do.
    pub fn open(location: &str) -> Result<Self> {
        Ok(Self::of(open_objects(location)?, location))
    }

    /// Returns the location of `objects`, which messages call by the last word of `name`.
    #[must_use]
    pub fn of(objects: Arc<dyn Objects>, name: &str) -> Self {
        let model = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned();
        Self { objects, model }
    }

    /// Returns what messages call a channel: `ads/stable`.
    pub(crate) fn named(&self, channel: &str) -> String {
        format!("{}/{channel}", self.model)
    }

    /// Reads where `channel` is; `None` when nothing was ever pushed to it.
    ///
    /// # Errors
    /// `Corruption` when its HEAD is not what was written; `Io` from the store.
    pub fn head(&self, channel: &str) -> Result<Option<Head>> {
        let found = self.found_head(channel)?;
        found.map(|found| found.head.map_err(|cause| self.damaged(channel, cause))).transpose()
    }

    /// As [`head`](Self::head), for who needs one.
    pub(crate) fn some_head(&self, channel: &str) -> Result<Head> {
        self.head(channel)?.ok_or_else(|| {
            Error::invalid("channel is at no version")
                .with("channel", self.named(channel))
                .with("remedy", "push a version to it, or name another channel")
        })
    }

    pub(crate) fn found_head(&self, channel: &str) -> Result<Option<FoundHead>> {
        let found = self.objects.get(&head_name(channel)?, HEAD_BYTES_MAX)?;
        Ok(found.map(|found| FoundHead {
            tag: found.tag,
            head: Head::decode(&found.bytes).map_err(|error| error.to_string()),
        }))
    }

    pub(crate) fn damaged(&self, channel: &str, cause: String) -> Error {
        Error::corruption("HEAD cannot be read")
            .with("channel", self.named(channel))
            .with("cause", cause)
            .with("remedy", "move the channel to a whole version: `tierbed models rollback`")
    }

    /// Reads the parts of a version, and returns them with their encoded bytes.
    ///
    /// # Errors
    /// `Corruption` when they are gone, or not those that `link` names.
    pub(crate) fn parts_of(&self, link: &Link) -> Result<(Parts, Vec<u8>)> {
        let (parts, bytes) = self.parts_at(link.seq)?;
        let found = Digest::of(&bytes);
        if found != link.parts_sha256 || parts.ancestors.len() >= crate::head::CHAIN_LEN_MAX {
            return Err(Error::corruption("parts.json is not the one that HEAD names")
                .with("version", link.seq)
                .with("expected", link.parts_sha256)
                .with("found", found));
        }
        Ok((parts, bytes))
    }

    /// Reads the parts of the version with this number, whatever they are.
    pub(crate) fn parts_at(&self, seq: Seq) -> Result<(Parts, Vec<u8>)> {
        let name = seq.object(PARTS_NAME);
        let found = self.objects.get(&name, PARTS_BYTES_MAX)?;
        let gone = || Error::corruption("a version has no parts.json").with("version", seq);
        let bytes = found.ok_or_else(gone)?.bytes;
        let parts = Parts::decode(&bytes).map_err(|error| error.with("version", seq))?;
        if parts.seq != seq {
            return Err(Error::corruption("parts.json is of another version")
                .with("expected", seq)
                .with("found", parts.seq));
        }
        Ok((parts, bytes))
    }

    /// Lists the objects of a version by their names within it.
    pub(crate) fn objects_of(&self, seq: Seq) -> Result<Vec<Listed>> {
        let listed = self.objects.list(Some(&seq.prefix()))?;
        let own = listed.into_iter().filter_map(|object| match Object::of(&object.name) {
            Some(Object::OfVersion { seq: found, file }) if found == seq => {
                let name = file.to_owned();
                Some(Listed { name, ..object })
            }
            _ => None,
        });
        Ok(own.collect())
    }

    /// Fails unless all `versions` are whole, and none is about to be removed.
    pub(crate) fn check_whole(&self, versions: impl IntoIterator<Item = Seq>) -> Result<()> {
        for seq in versions {
            let objects = self.objects_of(seq)?;
            if !is_whole(&objects) || objects.iter().any(|object| object.name == LEAVING) {
                return Err(Error::invalid("version is not whole, or is being pruned")
                    .with("version", seq)
                    .with("remedy", "name a version that `tierbed models list` calls whole"));
            }
        }
        Ok(())
    }

    /// Moves `channel` from what was `found` to `chain`.
    ///
    /// # Errors
    /// `Invalid` when another publisher moved it meanwhile, naming where to; `Io` from the store,
    /// when it may have moved all the same.
    pub(crate) fn move_head(
        &self,
        channel: &str,
        found: Option<&FoundHead>,
        chain: Vec<Link>,
        now_s: u64,
    ) -> Result<Head> {
        let before = found.and_then(|found| found.head.as_ref().ok());
        let head = Head::after(before, chain, now_s, &draw_number());
        let bytes = head.encode()?;
        let when = found.map_or(When::Absent, |found| When::Unchanged(found.tag.clone()));
        let name = head_name(channel)?;
        if self.objects.put(&name, &bytes, &when)? == Put::Done {
            return Ok(head);
        }
        let now = self.objects.get(&name, HEAD_BYTES_MAX)?;
        // A store that answers late is asked again by its client, and then finds our own write.
        if now.as_ref().is_some_and(|now| now.bytes == bytes) {
            return Ok(head);
        }
        let winner = now.and_then(|now| Head::decode(&now.bytes).ok());
        Err(self.moved_by_another(channel, winner).with("ours", head.seq()))
    }

    /// Returns the error of who finds `channel` at what another publisher left there.
    pub(crate) fn moved_by_another(&self, channel: &str, winner: Option<Head>) -> Error {
        let to = winner.map_or_else(|| "elsewhere".to_owned(), |head| format!("to {}", head.seq()));
        let named = self.named(channel);
        Error::invalid(format!("another publisher moved {named} {to}"))
            .with("remedy", "see which version is right, then move the channel there")
    }

    /// Whether the claim of a version is the one of `claim`.
    pub(crate) fn is_claimed(&self, seq: Seq, claim: &str) -> Result<bool> {
        let found = self.objects.get(&seq.object(CLAIM), HEAD_BYTES_MAX)?;
        Ok(found.is_some_and(|found| found.bytes == claim.as_bytes()))
    }
}

/// Returns a number that hardly anybody else draws: no two HEADs or claims are equal.
pub(crate) fn draw_number() -> String {
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

/// Whether the objects of a version are all there: its manifest was written last.
pub(crate) fn is_whole(objects: &[Listed]) -> bool {
    let names = || objects.iter().map(|object| object.name.as_str());
    manifest_of(names()).is_some() && names().any(|name| name == PARTS_NAME)
}

/// Returns the error of a version that is not what its `parts.json` says.
pub(crate) fn not_whole(what: &str, seq: Seq) -> Error {
    Error::new(ErrorKind::Corruption, what.to_owned())
        .with("version", seq)
        .with("remedy", "push the version again, or roll the channel back")
}
