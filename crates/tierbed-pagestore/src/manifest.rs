//! What is in this snapshot, and is it whole? The last file written, the first one read.
//!
//! One line `tierbed-snapshot <version> <crc32c of the rest, 8 hex digits>`, then JSON. A folder
//! without it is not a snapshot. Normative text: docs/formats/snapshot.md.

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, OptimizerKind, Result, Schema};
use tierbed_io::Folder;

/// The manifest's file name.
pub const MANIFEST_NAME: &str = "snapshot.json";
/// The page file's name.
pub const PAGES_NAME: &str = "rows.pages";
/// The forward index's file name.
pub const INDEX_NAME: &str = "rows.index";
/// File names of attachments start with this.
pub const ATTACHMENT_PREFIX: &str = "att.";
/// First word of the manifest.
pub const MANIFEST_MAGIC: &str = "tierbed-snapshot";
/// Version of the snapshot format.
pub const SNAPSHOT_VERSION: u32 = 1;

/// What a snapshot holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The tables; optimizers are left behind.
    pub schema: Schema,
    /// Rows stored, over all tables.
    pub row_count: u64,
    /// Pages in the page file.
    pub page_count: u64,
    /// CRC32C over the pages' checksums, in page order.
    pub pages_crc32c: u32,
    /// CRC32C over the forward index blocks' checksums, in order.
    pub index_crc32c: u32,
    /// Per table, in id order.
    pub tables: Vec<TableContents>,
    /// The attachments, in name order.
    pub attachments: Vec<AttachmentInfo>,
    /// In a delta: the identity of the snapshot it changes. `None`: a whole snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

/// What is stored of one table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableContents {
    /// Rows stored.
    pub row_count: u64,
    /// Pages they occupy.
    pub page_count: u64,
}

/// A named blob of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentInfo {
    /// Its name; the file is `att.<name>`.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its CRC32C.
    pub crc32c: u32,
}

impl Manifest {
    /// Returns what tells the snapshot from every other: checksums of manifest, pages, index.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn identity(&self) -> Result<String> {
        let manifest = crc32c(&self.encode()?);
        Ok(format!("{manifest:08x}{:08x}{:08x}", self.pages_crc32c, self.index_crc32c))
    }

    /// Encodes the manifest file.
    ///
    /// # Errors
    /// `Invalid` when a number cannot be written as JSON, which no checked schema has.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut body = serde_json::to_vec_pretty(self)
            .map_err(|cause| Error::invalid("cannot encode the manifest").with("cause", cause))?;
        body.push(b'\n');
        let mut bytes = header_line(crc32c(&body)).into_bytes();
        bytes.append(&mut body);
        Ok(bytes)
    }

    /// Decodes and checks a manifest file.
    ///
    /// # Errors
    /// `Invalid` for files of another format or version, `Corruption` when the bytes are not
    /// what was written.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let line_end =
            bytes.iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |at| at + 1);
        let (line, body) = bytes.split_at(line_end);
        let expected = header_line(crc32c(body));
        if line != expected.as_bytes() {
            return Err(header_error(line, &expected));
        }
        let manifest: Self = serde_json::from_slice(body).map_err(|cause| {
            Error::corruption("manifest is not the expected JSON").with("cause", cause)
        })?;
        manifest.checked()
    }

    /// Reads the manifest of `folder`.
    ///
    /// # Errors
    /// `Invalid` when there is none, else as [`decode`](Self::decode).
    pub fn read(folder: &dyn Folder) -> Result<Self> {
        let path =
            folder.path().map_or_else(|| "(memory)".into(), |path| path.display().to_string());
        let Some(bytes) = folder.read(MANIFEST_NAME)? else {
            let is_half = folder.list()?.iter().any(|name| name == PAGES_NAME);
            let error = if is_half {
                Error::invalid("snapshot was not finished: publishing was interrupted")
                    .with("path", path)
                    .with("remedy", "remove the folder and publish again")
            } else {
                Error::invalid("not a snapshot: the folder has no manifest")
                    .with("path", path)
                    .with("expected", MANIFEST_NAME)
            };
            return Err(error);
        };
        Self::decode(&bytes).map_err(|error| error.with("path", path))
    }

    fn checked(self) -> Result<Self> {
        let bad = |what: &str| Error::corruption(what);
        let schema = Schema::new(self.schema.tables().to_vec())
            .map_err(|error| bad("manifest has a bad schema").with("cause", error))?;
        let rows = self.tables.iter().try_fold(0u64, |sum, table| sum.checked_add(table.row_count));
        let pages =
            self.tables.iter().try_fold(0u64, |sum, table| sum.checked_add(table.page_count));
        if self.tables.len() != schema.tables().len()
            || rows != Some(self.row_count)
            || pages != Some(self.page_count)
            || self.page_count > u64::MAX >> 16
        {
            return Err(bad("manifest's counts do not add up"));
        }
        for attachment in &self.attachments {
            check_attachment_name(&attachment.name)
                .map_err(|error| bad("manifest has a bad attachment name").with("cause", error))?;
        }
        Ok(self)
    }
}

/// Returns `schema` without optimizers: rows of a snapshot are weights only.
pub(crate) fn served_schema(schema: &Schema) -> Result<Schema> {
    let tables = schema.tables().iter().cloned().map(|mut table| {
        (table.optimizer, table.state_init) = (OptimizerKind::Sgd, 0.0);
        table
    });
    Schema::new(tables.collect())
}

pub(crate) fn check_attachment_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > 128 || name.ends_with(".tmp") || !name.chars().all(is_plain)
    {
        return Err(Error::invalid(
            "attachment name must be 1 to 128 of [A-Za-z0-9_.-], not ending in '.tmp'",
        )
        .with("name", format_args!("{name:?}")));
    }
    Ok(())
}

pub(crate) fn header_line(crc: u32) -> String {
    format!("{MANIFEST_MAGIC} {SNAPSHOT_VERSION} {crc:08x}\n")
}

fn header_error(line: &[u8], expected: &str) -> Error {
    let shown =
        String::from_utf8_lossy(line.get(..line.len().min(80)).unwrap_or_default()).into_owned();
    let mut words = shown.split_ascii_whitespace();
    if words.next() != Some(MANIFEST_MAGIC) {
        return Error::invalid("not a snapshot manifest").with("found", format_args!("{shown:?}"));
    }
    match words.next().and_then(|version| version.parse::<u32>().ok()) {
        Some(version) if version != SNAPSHOT_VERSION => {
            Error::invalid("snapshot has another format version")
                .with("expected", SNAPSHOT_VERSION)
                .with("found", version)
                .with("remedy", "publish it again with this version, or read it with that one")
        }
        _ => Error::corruption("manifest checksum mismatch")
            .with("expected", format_args!("{:?}", expected.trim_end()))
            .with("found", format_args!("{:?}", shown.trim_end()))
            .with("remedy", "publish the snapshot again"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::{ErrorKind, InitSpec, TableSchema};

    use super::*;

    fn manifest() -> Manifest {
        let table = TableSchema {
            name: "c1".into(),
            row_count: 10,
            dim: 4,
            optimizer: OptimizerKind::Sgd,
            state_init: 0.0,
            init: InitSpec::Uniform { low: -0.1, high: 0.3 },
            seed: 1,
        };
        Manifest {
            schema: Schema::new(vec![table]).unwrap(),
            row_count: 3,
            page_count: 1,
            pages_crc32c: 5,
            index_crc32c: 6,
            tables: vec![TableContents { row_count: 3, page_count: 1 }],
            attachments: vec![AttachmentInfo { name: "model".into(), bytes: 2, crc32c: 7 }],
            base: None,
        }
    }

    #[test]
    fn comes_back_as_written() {
        assert_eq!(Manifest::decode(&manifest().encode().unwrap()).unwrap(), manifest());
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_noticed() {
        let bytes = manifest().encode().unwrap();
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::decode(&flipped).is_err(), "bit {bit}");
        }
        assert!((0..bytes.len()).all(|end| Manifest::decode(&bytes[..end]).is_err()));
    }

    #[test]
    fn other_versions_and_other_files_are_named() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        let newer = text.replacen("snapshot 1", "snapshot 2", 1);
        let error = Manifest::decode(newer.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("found: 2"), "{error}");
        assert_eq!(Manifest::decode(b"{}").unwrap_err().kind(), ErrorKind::Invalid);
        let mut wrong = manifest();
        wrong.row_count = 4;
        let error = Manifest::decode(&wrong.encode().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
    }

    proptest! {
        #[test]
        fn random_bodies_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = header_line(crc32c(&body)).into_bytes();
            bytes.extend_from_slice(&body);
            prop_assert!(Manifest::decode(&bytes).is_err());
        }
    }
}
