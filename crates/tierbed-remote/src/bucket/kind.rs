//! Kinds of stores that have buckets, and how each tells one content of an object from the next.

use std::fmt;

use object_store::{ObjectMeta, UpdateVersion};

use crate::objects::Tag;

/// Whose bucket it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketKind {
    /// Amazon S3, or a store that speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage, whose buckets are containers.
    Az,
}

impl fmt::Display for BucketKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
        })
    }
}

impl BucketKind {
    /// Returns the kind that a scheme of an address names.
    pub(crate) fn of(scheme: &str) -> Option<Self> {
        [Self::S3, Self::Gs, Self::Az].into_iter().find(|kind| kind.to_string() == scheme)
    }

    /// Returns what tells the content of an object: Google compares generations, others tags.
    pub(super) fn tag(self, found: &ObjectMeta) -> Option<Tag> {
        let told = if self == Self::Gs { &found.version } else { &found.e_tag };
        told.clone().map(Tag)
    }

    /// Returns the condition that an object is still the one with this tag.
    pub(super) fn unchanged(self, Tag(tag): &Tag) -> UpdateVersion {
        match self {
            Self::Gs => UpdateVersion { e_tag: None, version: Some(tag.clone()) },
            Self::S3 | Self::Az => UpdateVersion { e_tag: Some(tag.clone()), version: None },
        }
    }
}
