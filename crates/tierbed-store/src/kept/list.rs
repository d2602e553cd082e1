//! The list file of a named checkpoint: its files and their checksums.
//!
//! ```text
//! kept.<name>.list   "tierbed-kept 2 <crc32c of the rest>\n" + JSON
//! RESTORE            "tierbed-restore 2 <crc32c of the rest>\n" + the same JSON
//! ```
//!
//! Version 1 of the list has no checksums of files; version 1 of `RESTORE` is a name alone.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};
use tierbed_io::CheckedText;

const VERSION: u32 = 2;
const LIST: CheckedText = CheckedText { magic: "tierbed-kept", versions: 1..=VERSION };
const RESTORE: CheckedText = CheckedText { magic: "tierbed-restore", versions: VERSION..=VERSION };

/// A kept checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// Its name.
    pub name: String,
    /// Number of its commit.
    pub number: u64,
    /// The bytes of `CURRENT`.
    pub(crate) current: String,
    /// Its files.
    pub(crate) files: Vec<KeptFile>,
}

/// A file of a kept checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptFile {
    /// Its name in the store.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// CRC32C of all its bytes; none where the file has checksums of its own and is shared, and
    /// in lists of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) crc32c: Option<u32>,
}

/// What the file `RESTORE` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Restore {
    /// Version 1: this kept checkpoint was being given back, in place.
    Named(String),
    /// Every file lies ready under the name of a staged one.
    Staged(Kept),
}

impl Kept {
    /// Returns the length of its files, holes included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        self.encode_as(&LIST)
    }

    pub(crate) fn encode_restore(&self) -> Result<Vec<u8>> {
        self.encode_as(&RESTORE)
    }

    fn encode_as(&self, text: &CheckedText) -> Result<Vec<u8>> {
        let body = serde_json::to_string_pretty(self).map_err(|cause| {
            Error::invalid("list of files cannot be written").with("cause", cause)
        })?;
        Ok(text.encode(VERSION, body.as_bytes()))
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        decode_as(&LIST, bytes).map_err(|cause| {
            Error::corruption("list of a kept checkpoint is damaged").with("cause", cause)
        })
    }
}

impl Restore {
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        if !bytes.starts_with(RESTORE.magic.as_bytes()) {
            return Ok(Self::Named(String::from_utf8_lossy(bytes).into_owned()));
        }
        let kept = decode_as(&RESTORE, bytes);
        kept.map(Self::Staged).map_err(|cause| {
            Error::corruption("file RESTORE is damaged")
                .with("cause", cause)
                .with("remedy", "see `tierbed repair FOLDER` for the commits that are whole")
        })
    }
}

fn decode_as(text: &CheckedText, bytes: &[u8]) -> std::result::Result<Kept, String> {
    let (_, body) = text.decode(bytes).map_err(|refused| {
        format!("first line is not that of its version and checksum: {refused:?}")
    })?;
    let kept: Kept = serde_json::from_slice(body).map_err(|cause| cause.to_string())?;
    let is_plain = |file: &KeptFile| tierbed_io::folder::check_name(&file.name).is_ok();
    if !kept.files.iter().all(is_plain) {
        return Err("names a file outside of the folder".to_owned());
    }
    Ok(kept)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept() -> Kept {
        let file = |name: &str, crc32c| KeptFile { name: name.to_owned(), bytes: 9, crc32c };
        Kept {
            name: "old".to_owned(),
            number: 3,
            current: "tierbed-current 1 3 00000000\n".to_owned(),
            files: vec![file("t.rows", Some(7)), file("000001.sst", None)],
        }
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(Kept::decode(&kept().encode().unwrap()).unwrap(), kept());
        let restore = Restore::decode(&kept().encode_restore().unwrap()).unwrap();
        assert_eq!(restore, Restore::Staged(kept()));
        assert_eq!(Restore::decode(b"old").unwrap(), Restore::Named("old".to_owned()));
    }

    #[test]
    fn a_list_without_checksums_is_read() {
        let body = r#"{"name":"old","number":3,"current":"x","files":[{"name":"a","bytes":1}]}"#;
        let text = LIST.encode(1, body.as_bytes());
        assert_eq!(Kept::decode(&text).unwrap().files[0].crc32c, None);
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_noticed(bit in 0usize..4000) {
            let mut bytes = kept().encode().unwrap();
            let bit = bit % (8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Kept::decode(&bytes).is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Kept::decode(&bytes);
            let _ = Restore::decode(&bytes);
        }
    }
}
