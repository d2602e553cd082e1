//! Names of versions, channels, files, and of the objects that hold them.
//!
//! ```text
//! HEAD.<channel>.json    pins/<seq>    v/<seq>/{claim, <files>, parts.json, <manifest>, leaving}
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

/// Folder of all versions.
pub(crate) const VERSIONS: &str = "v";
/// Folder of all pins.
pub(crate) const PINS: &str = "pins";
/// Says who writes a version; its first object.
pub(crate) const CLAIM: &str = "claim";
/// Says that a version is about to be removed.
pub(crate) const LEAVING: &str = "leaving";
/// Sizes and digests of the files of a version.
pub const PARTS_NAME: &str = "parts.json";
/// What was fetched of a version so far; in the folder of a download only.
pub(crate) const MARKS: &str = "parts.done";
/// Files that make a folder a published one; a version has one, and it is written last.
pub(crate) const MANIFESTS: [&str; 3] = ["snapshot.json", "delta.json", "shards.json"];
/// Longest name of a file, a channel, an identity.
const NAME_LEN_MAX: usize = 160;

/// The number of a version; a later one is larger.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Seq(pub u64);

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Seq {
    /// Returns the name of the version's folder.
    #[must_use]
    pub fn folder_name(self) -> String {
        format!("{:06}", self.0)
    }

    /// Returns the number that a folder is named after.
    #[must_use]
    pub fn of_folder(name: &str) -> Option<Self> {
        let seq = Self(name.parse().ok()?);
        (seq.folder_name() == name).then_some(seq)
    }

    /// Returns the name of the folder of the version's objects.
    pub(crate) fn prefix(self) -> String {
        format!("{VERSIONS}/{}", self.folder_name())
    }

    /// Returns the name of an object of the version.
    pub(crate) fn object(self, file: &str) -> String {
        format!("{VERSIONS}/{}/{file}", self.folder_name())
    }

    /// Returns the name of the version's pin.
    pub(crate) fn pin(self) -> String {
        format!("{PINS}/{}", self.folder_name())
    }
}

/// What the name of an object says that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Object<'a> {
    Head { channel: &'a str },
    Pin(Seq),
    OfVersion { seq: Seq, file: &'a str },
}

impl<'a> Object<'a> {
    /// Reads the name of an object; `None` when it is none of ours.
    pub(crate) fn of(name: &'a str) -> Option<Self> {
        let words: Vec<&str> = name.split('/').collect();
        match words.as_slice() {
            [head] => {
                let channel = head.strip_prefix("HEAD.")?.strip_suffix(".json")?;
                check_channel(channel).ok().map(|()| Self::Head { channel })
            }
            [PINS, seq] => Seq::of_folder(seq).map(Self::Pin),
            [VERSIONS, seq, file] => Seq::of_folder(seq).map(|seq| Self::OfVersion { seq, file }),
            _ => None,
        }
    }
}

/// Returns the name of the object that says where `channel` is.
pub(crate) fn head_name(channel: &str) -> Result<String> {
    check_channel(channel)?;
    Ok(format!("HEAD.{channel}.json"))
}

fn is_plain(name: &str) -> bool {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty()
        && name.len() <= NAME_LEN_MAX
        && !name.starts_with('.')
        && name.chars().all(is_fine)
}

/// Checks the name of a channel.
///
/// # Errors
/// `Invalid` unless it is 1 to 160 of `[A-Za-z0-9_-]`.
pub fn check_channel(channel: &str) -> Result<()> {
    if is_plain(channel) && !channel.contains('.') {
        return Ok(());
    }
    Err(Error::invalid("name of a channel must be 1 to 160 of [A-Za-z0-9_-]")
        .with("channel", format_args!("{channel:?}")))
}

/// Checks the name of a file of a version: it leads nowhere else, and is none of our own.
///
/// # Errors
/// `Invalid` otherwise.
pub(crate) fn check_file(name: &str) -> Result<()> {
    let is_own = matches!(name, CLAIM | LEAVING | PARTS_NAME | MARKS | "LOCK");
    if is_plain(name) && !is_own && !name.ends_with(".tmp") {
        return Ok(());
    }
    Err(Error::invalid("name of a file must be 1 to 160 of [A-Za-z0-9_.-], and not reserved")
        .with("name", format_args!("{name:?}")))
}

/// Checks what tells published folders apart.
pub(crate) fn check_identity(identity: &str) -> Result<()> {
    if is_plain(identity) {
        return Ok(());
    }
    Err(Error::invalid("identity must be 1 to 160 of [A-Za-z0-9_.-]")
        .with("identity", format_args!("{identity:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_objects_lead_back_to_what_they_name() {
        let seq = Seq(57);
        assert_eq!(seq.object("rows.pages"), "v/000057/rows.pages");
        let found = Object::of("v/000057/rows.pages");
        assert_eq!(found, Some(Object::OfVersion { seq, file: "rows.pages" }));
        assert_eq!(Object::of(&seq.pin()), Some(Object::Pin(seq)));
        let head = head_name("stable").unwrap();
        assert_eq!(Object::of(&head), Some(Object::Head { channel: "stable" }));
        assert_eq!(Seq::of_folder(&Seq(12_345_678).folder_name()), Some(Seq(12_345_678)));
        for foreign in ["v/57/rows", "v/000057", "v/000057/a/b", "HEAD..json", "HEAD.a/b.json", ""]
        {
            assert_eq!(Object::of(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a\0", ".a", "a.tmp", "LOCK"] {
            assert!(check_file(name).is_err(), "{name:?}");
        }
        for name in ["claim", "leaving", "parts.json", "parts.done", "\u{e9}", &"a".repeat(161)] {
            assert!(check_file(name).is_err(), "{name:?}");
        }
        assert!(check_file("att.serving.json").is_ok() && check_file("rows.pages").is_ok());
        assert!(check_channel("a.b").is_err() && check_channel("canary-2").is_ok());
    }
}
