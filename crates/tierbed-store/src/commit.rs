//! Atomic commits of rows, optimizer state and attachments.
//!
//! A commit is a set of files `commit-<number>.*` and one manifest that lists them with
//! lengths and checksums. It comes into force when the small file `CURRENT` is atomically
//! replaced; until then the previous commit is untouched. Normative:
//! `docs/reference/formats/store.md`.
//!
//! ```text
//! <table>.rows                    pages (file store)
//! commit-000012.<table>.pages     page map of the table (file store)
//! commit-000012.<table>.dump      records of the table (memory store)
//! commit-000012.version           live SSTs, log segments, hot rows (the LSM tree)
//! commit-000012.att.<name>        attachments
//! commit-000012.manifest          "tierbed-manifest 2 <crc32c>\n" + JSON
//! CURRENT                         "tierbed-current 1 12 <crc32c of the manifest file>\n"
//! ```
//!
//! A new store begins with a `CURRENT` that names commit 0: nothing is in force yet. So a folder
//! with files of a store and without `CURRENT` has lost it, and is refused.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Error, ErrorKind, Poison, Result, Schema, TableSchema};
use tierbed_io::checked_text::Refused;
use tierbed_io::{CheckedText, Folder};

use crate::kept::{is_kept, is_staged, remove_staged, RESTORE};
use crate::shards::{shard_of_name, SHARDS_FILE};

const CURRENT_MAGIC: &str = "tierbed-current";
const CURRENT_VERSION: u32 = 1;
pub(crate) const MANIFEST_VERSION: u32 = 2;
pub(crate) const MANIFEST: CheckedText =
    CheckedText { magic: "tierbed-manifest", versions: 1..=MANIFEST_VERSION };
/// Files of the stores that use this protocol, beside `CURRENT` and `commit-*`.
const OWN_ENDINGS: [&str; 7] = [".rows", ".sst", ".wal", ".mark", ".dense", ".undo", ".bucket"];

/// What a commit consists of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Number of the commit, from 1, growing.
    pub number: u64,
    /// Name given by the user.
    pub name: String,
    /// Kind of store that wrote it: `file`, `memory`, `lsm`, `hashdb`, `mmap`, `rocksdb`.
    pub backend: String,
    /// Number of the store, which its pages hold; 0 in stores whose pages do not (version 1).
    #[serde(default)]
    pub store: u32,
    /// The tables.
    pub schema: Schema,
    /// One entry per table, in id order; empty for a backend whose files hold all tables.
    pub tables: Vec<TableMeta>,
    /// The commit's own file of a backend whose files hold all tables (`lsm`: its version).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_file: Option<TableMeta>,
    /// Blobs committed together with the rows.
    pub attachments: Vec<AttachmentMeta>,
}

impl Manifest {
    /// Returns each table with the file that the commit has of it.
    ///
    /// # Errors
    /// `Corruption` when it names no file per table: without, tables would be missing unnoticed.
    pub fn table_files(&self) -> Result<impl Iterator<Item = (&TableSchema, &TableMeta)>> {
        let tables = self.schema.tables();
        if tables.len() != self.tables.len() {
            return Err(Error::corruption("manifest names no file for a table")
                .with("tables", tables.len())
                .with("files", self.tables.len())
                .with("remedy", "restore the store's folder from a copy"));
        }
        Ok(tables.iter().zip(&self.tables))
    }
}

/// The commit's own file of one table, or of the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableMeta {
    /// Name of the file in the store's folder.
    pub file: String,
    /// CRC32C of the file's payload.
    pub crc32c: u32,
    /// Rows or pages in it.
    pub entry_count: u64,
    /// Where a file of pages was lengthened: its pages before each time (`file`); else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub grown_at: Vec<u64>,
}

/// An attachment's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentMeta {
    /// Name given by the user.
    pub name: String,
    /// Name of the file in the store's folder.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// CRC32C of its bytes.
    pub crc32c: u32,
}

/// A commit that lies in a folder, whether it is in force or not.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundCommit {
    /// What it consists of.
    pub manifest: Manifest,
    /// The `CURRENT` that puts it in force.
    pub current: String,
}

/// The commits of one folder: reads the one in force, puts the next one in force.
#[derive(Debug)]
pub struct CommitLog {
    folder: Arc<dyn Folder>,
    manifest: Option<Manifest>,
    info: Option<CommitInfo>,
    later_number: u64,
    backend: String,
    store: u32,
}

/// Why a commit did not happen, and whether the store may go on.
#[derive(Debug)]
pub enum CommitFailure {
    /// The previous commit is in force; trying again is allowed.
    Undone(Error),
    /// Which commit is in force is unknown until the store is reopened.
    Poisoned(Error),
}

impl CommitFailure {
    /// Sorts a failure before the commit came into force. A full disk or a bad argument may be
    /// tried again; after a failed sync it is unknown what later syncs promise.
    #[must_use]
    pub fn of(error: Error) -> Self {
        match error.kind() {
            ErrorKind::NoSpace | ErrorKind::Invalid => Self::Undone(error),
            _ => Self::Poisoned(error),
        }
    }

    /// As [`of`](Self::of), of work that reads as well: a damaged page undoes the commit and says
    /// nothing about later syncs.
    #[must_use]
    pub fn of_merge(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Corruption => Self::Undone(error),
            _ => Self::of(error),
        }
    }

    /// Returns the error, noted in `poison` if the store must not go on.
    #[must_use]
    pub fn into_error(self, poison: &mut Poison) -> Error {
        match self {
            Self::Undone(error) => error,
            Self::Poisoned(error) => {
                poison.note(&error);
                error
            }
        }
    }
}

impl CommitLog {
    /// Name of the small file that says which commit is in force.
    pub const CURRENT: &'static str = "CURRENT";

    /// Returns which kind of store wrote the commit in force in `folder`, if there is one.
    ///
    /// # Errors
    /// `Corruption` when checksums disagree, otherwise the folder's.
    pub fn stored_backend(folder: &dyn Folder) -> Result<Option<String>> {
        let Some(current) = folder.read(Self::CURRENT)? else { return Ok(None) };
        let Some((number, crc)) = commit_of(&current)? else { return Ok(None) };
        Ok(Some(Self::read_manifest(folder, number, crc)?.backend))
    }

    /// Returns the text of a `CURRENT` that puts no commit in force.
    #[must_use]
    pub fn none_in_force() -> String {
        current_of(0, &[])
    }

    /// Returns whether `current`, the bytes of a `CURRENT`, puts no commit in force.
    ///
    /// # Errors
    /// `Corruption` when they are damaged, `Invalid` when they are of something else.
    pub fn names_none(current: &[u8]) -> Result<bool> {
        Ok(commit_of(current)?.is_none())
    }

    /// Refuses a folder without `CURRENT` that is not empty: its files may be wanted.
    ///
    /// # Errors
    /// `Corruption` when files of a store lie there, `Invalid` for others.
    pub fn check_new(folder: &dyn Folder) -> Result<()> {
        for name in folder.list()? {
            // Plans of the order of batches, and what is left of making one.
            if name.starts_with("order-") {
                continue;
            }
            if is_of_a_store(&name) {
                return Err(Error::corruption(
                    "folder holds files of a store, but not the one that says which commit is in \
                     force",
                )
                .with("missing", "CURRENT (SHARDS, with several shards)")
                .with("found", name)
                .with(
                    "remedy",
                    "list the commits that are whole by `tierbed repair FOLDER` and put one in \
                     force; a new store needs a new or empty folder",
                ));
            }
            return Err(Error::invalid("folder holds other files and no store")
                .with("found", name)
                .with("remedy", "name a new or empty folder"));
        }
        Ok(())
    }

    /// Reads the commit in force, if there is one; a new store begins.
    ///
    /// # Errors
    /// `Invalid` when the folder holds something else, `Corruption` when checksums disagree, or
    /// files of a store lie there and nothing says which commit is in force.
    pub fn open(folder: Arc<dyn Folder>, backend: &str) -> Result<Self> {
        let log = Self::open_any(folder, backend)?;
        match &log.manifest {
            Some(manifest) if manifest.backend != log.backend => {
                Err(Error::invalid("store was written by another backend")
                    .with("stored", &manifest.backend)
                    .with("asked", log.backend)
                    .with("remedy", "open it with the stored backend"))
            }
            _ => {
                log.remove_other_commits();
                Ok(log)
            }
        }
    }

    /// Opens the log of a store that goes on as another kind: the commit in force may be of any,
    /// the next one is of `backend`. Until that one is in force nothing of the other is removed.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_any(folder: Arc<dyn Folder>, backend: &str) -> Result<Self> {
        let backend = backend.to_owned();
        let mut log =
            Self { folder, manifest: None, info: None, later_number: 0, backend, store: 0 };
        let Some(current) = log.folder.read(Self::CURRENT)? else {
            Self::check_new(&*log.folder)?;
            log.folder.write_atomic(Self::CURRENT, Self::none_in_force().as_bytes())?;
            log.store = log.folder.draw_store_number();
            return Ok(log);
        };
        let Some((number, crc)) = commit_of(&current)? else {
            // No page of a store without a commit counts: another number is as good.
            log.store = log.folder.draw_store_number();
            return Ok(log);
        };
        let manifest = Self::read_manifest(&*log.folder, number, crc)?;
        log.info = Some(CommitInfo { number: manifest.number, name: manifest.name.clone() });
        log.store = manifest.store;
        log.manifest = Some(manifest);
        Ok(log)
    }

    /// Returns the manifest in force.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Returns number and name of the commit in force.
    #[must_use]
    pub fn info(&self) -> Option<&CommitInfo> {
        self.info.as_ref()
    }

    /// Returns the number the next commit will have.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        let number = self.info.as_ref().map_or(0, |info| info.number);
        number.max(self.later_number) + 1
    }

    /// Returns the number of the store, which its pages hold.
    #[must_use]
    pub fn store(&self) -> u32 {
        self.store
    }

    /// Takes note of commit `number`, which lives in a log of the store's own on top of the one in
    /// force; the next one counts on from it.
    pub fn note_later(&mut self, number: u64) {
        self.later_number = self.later_number.max(number);
    }

    /// Returns the name of commit `number`'s file `rest`.
    #[must_use]
    pub fn file_name(number: u64, rest: &str) -> String {
        format!("commit-{number:06}.{rest}")
    }

    /// Returns the manifest of the next commit, `name`, of tables `schema`; it names no file yet.
    #[must_use]
    pub fn next_manifest(&self, name: &str, schema: &Schema) -> Manifest {
        Manifest {
            number: self.next_number(),
            name: name.to_owned(),
            backend: self.backend.clone(),
            store: self.store,
            schema: schema.clone(),
            tables: Vec::new(),
            store_file: None,
            attachments: Vec::new(),
        }
    }

    /// Writes attachments and manifest, then puts the commit in force.
    ///
    /// The files named in `manifest.tables` and `manifest.store_file` must be durable already.
    ///
    /// # Errors
    /// A [`CommitFailure`], which says whether the commit before is surely in force.
    ///
    /// # Panics
    /// When the manifest's number is not [`next_number`](Self::next_number).
    pub fn put_in_force(
        &mut self,
        mut manifest: Manifest,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        assert_eq!(manifest.number, self.next_number(), "commit numbers grow by one");
        let prepared = self.prepare(&mut manifest, attachments);
        let current = match prepared {
            Ok(current) => current,
            Err(error) => {
                self.remove_commit(manifest.number);
                return Err(CommitFailure::of(error));
            }
        };
        // From here on an error leaves open which of the two commits a reopen will find.
        self.folder
            .write_atomic(Self::CURRENT, current.as_bytes())
            .map_err(CommitFailure::Poisoned)?;
        self.info = Some(CommitInfo { number: manifest.number, name: manifest.name.clone() });
        self.manifest = Some(manifest);
        self.remove_other_commits();
        Ok(())
    }

    fn prepare(&self, manifest: &mut Manifest, attachments: &[Attachment<'_>]) -> Result<String> {
        manifest.attachments.clear();
        for attachment in attachments {
            check_attachment_name(attachment.name, &manifest.attachments)?;
            let file = Self::file_name(manifest.number, &format!("att.{}", attachment.name));
            self.folder.write_durable(&file, attachment.bytes)?;
            manifest.attachments.push(AttachmentMeta {
                name: attachment.name.to_owned(),
                file,
                bytes: attachment.bytes.len() as u64,
                crc32c: crc32c(attachment.bytes),
            });
        }
        let body = serde_json::to_string_pretty(manifest)
            .map_err(|cause| Error::invalid("manifest cannot be written").with("cause", cause))?;
        let text = MANIFEST.encode(MANIFEST_VERSION, body.as_bytes());
        let file = Self::file_name(manifest.number, "manifest");
        self.folder.write_durable(&file, &text)?;
        self.folder.sync()?;
        Ok(current_of(manifest.number, &text))
    }

    /// Returns the names of the attachments of the commit in force.
    #[must_use]
    pub fn attachment_names(&self) -> Vec<String> {
        let metas = self.manifest.iter().flat_map(|manifest| &manifest.attachments);
        metas.map(|meta| meta.name.clone()).collect()
    }

    /// Reads attachment `name` of the commit in force.
    ///
    /// # Errors
    /// `Corruption` when it is missing or fails its checksum, `Io` from the device.
    pub fn attachment(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(meta) = self
            .manifest
            .as_ref()
            .and_then(|manifest| manifest.attachments.iter().find(|meta| meta.name == name))
        else {
            return Ok(None);
        };
        let bytes = self.folder.read(&meta.file)?.ok_or_else(|| missing(&meta.file))?;
        let found = crc32c(&bytes);
        if bytes.len() as u64 != meta.bytes || found != meta.crc32c {
            return Err(Error::corruption("attachment checksum mismatch")
                .with("attachment", name)
                .with("file", &meta.file)
                .with("expected", format_args!("{:08x}", meta.crc32c))
                .with("found", format_args!("{found:08x}"))
                .with("remedy", "restore the store's folder from a copy"));
        }
        Ok(Some(bytes))
    }

    /// Checks every attachment of the commit in force.
    ///
    /// # Errors
    /// As [`attachment`](Self::attachment).
    pub fn verify(&self) -> Result<()> {
        for meta in self.manifest.iter().flat_map(|manifest| &manifest.attachments) {
            self.attachment(&meta.name)?;
        }
        Ok(())
    }

    /// Returns the bytes of the attachments in force.
    #[must_use]
    pub fn attachment_bytes(&self) -> u64 {
        self.manifest.iter().flat_map(|manifest| &manifest.attachments).map(|meta| meta.bytes).sum()
    }

    /// Reads the manifest of commit `number` and the text of the `CURRENT` that puts it in force.
    ///
    /// # Errors
    /// `Corruption` when it is missing or damaged.
    pub fn found(folder: &dyn Folder, number: u64) -> Result<FoundCommit> {
        let file = Self::file_name(number, "manifest");
        let bytes = folder.read(&file)?.ok_or_else(|| missing(&file))?;
        let manifest = parse_manifest(&bytes).map_err(|error| error.with("file", &file))?;
        if manifest.number != number {
            return Err(Error::corruption("manifest is that of another commit")
                .with("file", file)
                .with("found", manifest.number));
        }
        Ok(FoundCommit { current: current_of(number, &bytes), manifest })
    }

    /// Returns the numbers of the commits whose manifests lie in `folder`, in force or not.
    ///
    /// # Errors
    /// `Io` from the folder.
    pub fn found_numbers(folder: &dyn Folder) -> Result<BTreeSet<u64>> {
        let number_of = |name: &String| {
            name.strip_prefix("commit-")?.strip_suffix(".manifest")?.parse::<u64>().ok()
        };
        Ok(folder.list()?.iter().filter_map(number_of).collect())
    }

    fn read_manifest(folder: &dyn Folder, number: u64, crc: u32) -> Result<Manifest> {
        let file = Self::file_name(number, "manifest");
        let bytes = folder.read(&file)?.ok_or_else(|| missing(&file))?;
        let found = crc32c(&bytes);
        if found != crc {
            return Err(Error::corruption("manifest checksum mismatch")
                .with("file", &file)
                .with("expected", format_args!("{crc:08x}"))
                .with("found", format_args!("{found:08x}")));
        }
        parse_manifest(&bytes).map_err(|error| error.with("file", file))
    }

    // Old commits are garbage; failing to remove them costs space, not correctness.
    fn remove_other_commits(&self) {
        let Some(info) = &self.info else { return };
        let keep = Self::file_name(info.number, "");
        for name in self.folder.list().unwrap_or_default() {
            if name.starts_with("commit-") && !name.starts_with(&keep) {
                let _ = self.folder.remove(&name);
            }
        }
        let _ = remove_staged(&*self.folder);
    }

    fn remove_commit(&self, number: u64) {
        let prefix = Self::file_name(number, "");
        for name in self.folder.list().unwrap_or_default() {
            if name.starts_with(&prefix) {
                let _ = self.folder.remove(&name);
            }
        }
    }
}

fn is_of_a_store(name: &str) -> bool {
    name.starts_with("commit-")
        || OWN_ENDINGS.iter().any(|ending| name.ends_with(ending))
        || matches!(name, RESTORE | SHARDS_FILE)
        || is_kept(name)
        || is_staged(name)
        || shard_of_name(name).is_some()
}

fn missing(file: &str) -> Error {
    Error::corruption("file of the commit in force is missing")
        .with("file", file)
        .with("remedy", "restore the store's folder from a copy")
}

/// Checks the names of a commit's attachments.
///
/// # Errors
/// `Invalid` for a name of other characters or given twice.
pub fn check_attachments(attachments: &[Attachment<'_>]) -> Result<()> {
    let mut names = BTreeSet::new();
    for attachment in attachments {
        check_attachment_name(attachment.name, &[])?;
        if !names.insert(attachment.name) {
            return Err(given_twice(attachment.name));
        }
    }
    Ok(())
}

fn given_twice(name: &str) -> Error {
    Error::invalid("attachment given twice").with("attachment", name)
}

fn check_attachment_name(name: &str, before: &[AttachmentMeta]) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > 100 || !name.chars().all(is_plain) {
        return Err(Error::invalid("attachment name must be 1 to 100 of [A-Za-z0-9_.-]")
            .with("attachment", name));
    }
    if before.iter().any(|meta| meta.name == name) {
        return Err(given_twice(name));
    }
    Ok(())
}

// The commit that a `CURRENT` puts in force and its manifest's checksum; none in a new store.
fn commit_of(current: &[u8]) -> Result<Option<(u64, u32)>> {
    match parse_current(current)? {
        (0, 0) => Ok(None),
        (0, _) => Err(Error::corruption("CURRENT is damaged")),
        commit => Ok(Some(commit)),
    }
}

fn parse_current(bytes: &[u8]) -> Result<(u64, u32)> {
    let foreign = || {
        Error::invalid("CURRENT is not of this format; the folder holds no tierbed store")
            .with("remedy", "name the folder of a store")
    };
    if bytes.iter().all(|byte| *byte == 0) {
        // Ours once: the name is there, the write of what it holds was lost.
        return Err(Error::corruption("CURRENT is empty")
            .with("remedy", "restore the store's folder from a copy"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| foreign())?;
    let mut words = text.split_whitespace();
    if words.next() != Some(CURRENT_MAGIC) {
        return Err(foreign());
    }
    let version = words.next();
    if version.and_then(|word| word.parse().ok()) != Some(CURRENT_VERSION) {
        let refusal = "CURRENT is of a store format version that is not supported";
        return Err(other_version(refusal, CURRENT_VERSION, version.unwrap_or("none")));
    }
    let damaged = || Error::corruption("CURRENT is damaged");
    let number = words.next().and_then(|word| word.parse().ok()).ok_or_else(damaged)?;
    let crc = words.next().and_then(|word| u32::from_str_radix(word, 16).ok());
    let crc = crc.ok_or_else(damaged)?;
    if words.next().is_some() || !text.ends_with('\n') {
        return Err(damaged());
    }
    Ok((number, crc))
}

fn other_version(refusal: &str, supported: u32, found: &str) -> Error {
    Error::invalid(refusal)
        .with("supported", supported)
        .with("found", found)
        .with("remedy", "open it with the version that wrote it")
}

fn parse_manifest(bytes: &[u8]) -> Result<Manifest> {
    let damaged = || Error::corruption("manifest is damaged");
    let (_, body) = MANIFEST.decode(bytes).map_err(|refused| match refused {
        Refused::Version(found) => other_version(
            "store format version is not supported",
            MANIFEST_VERSION,
            &found.to_string(),
        ),
        Refused::Foreign(_) | Refused::Damaged { .. } => damaged(),
    })?;
    let manifest: Manifest =
        serde_json::from_slice(body).map_err(|cause| damaged().with("cause", cause))?;
    let table_files =
        if manifest.store_file.is_some() { 0 } else { manifest.schema.tables().len() };
    if manifest.tables.len() != table_files {
        return Err(damaged().with("tables", manifest.tables.len()));
    }
    // The schema came from disk: hold it to the same rules as one from a user.
    Schema::new(manifest.schema.tables().to_vec())
        .map_err(|error| damaged().with("cause", error))?;
    Ok(manifest)
}

/// The text of a `CURRENT` that names `manifest`.
pub(crate) fn current_of(number: u64, manifest: &[u8]) -> String {
    format!("{CURRENT_MAGIC} {CURRENT_VERSION} {number} {:08x}\n", crc32c(manifest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_current(&bytes);
            let _ = parse_manifest(&bytes);
        }

        #[test]
        fn every_flipped_bit_of_a_manifest_is_noticed(bit in 0usize..800) {
            let manifest = Manifest {
                number: 1,
                name: "epoch-1".into(),
                backend: "file".into(),
                store: 7,
                schema: Schema::default(),
                tables: vec![],
                store_file: None,
                attachments: vec![],
            };
            let body = serde_json::to_string(&manifest).unwrap();
            let text = MANIFEST.encode(1, body.as_bytes());
            prop_assert!(parse_manifest(&text).is_ok());
            let mut bytes = text;
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(parse_manifest(&bytes).is_err());
        }
    }

    #[test]
    fn a_foreign_current_is_invalid_and_a_damaged_one_is_corruption() {
        use tierbed_core::ErrorKind::{Corruption, Invalid};
        assert_eq!(parse_current(b"MANIFEST-000005\n").unwrap_err().kind(), Invalid);
        assert_eq!(parse_current(b"tierbed-current 9 1 00\n").unwrap_err().kind(), Invalid);
        assert_eq!(parse_current(b"tierbed-current 1 x 00\n").unwrap_err().kind(), Corruption);
        assert_eq!(parse_current(b"").unwrap_err().kind(), Corruption);
        assert_eq!(parse_current(&[0; 40]).unwrap_err().kind(), Corruption);
        assert_eq!(parse_current(b"tierbed-current 1 7 0000abcd\n").unwrap(), (7, 0xabcd));
        assert_eq!(commit_of(b"tierbed-current 1 0 0000abcd\n").unwrap_err().kind(), Corruption);
        assert!(CommitLog::names_none(CommitLog::none_in_force().as_bytes()).unwrap());
    }

    fn log(folder: &Arc<dyn Folder>) -> Result<CommitLog> {
        CommitLog::open(Arc::clone(folder), "memory")
    }

    fn commit(log: &mut CommitLog) {
        let manifest = Manifest {
            number: log.next_number(),
            name: "good".into(),
            backend: "memory".into(),
            store: log.store(),
            schema: Schema::default(),
            tables: vec![],
            store_file: None,
            attachments: vec![],
        };
        log.put_in_force(manifest, &[]).unwrap();
    }

    #[test]
    fn a_folder_that_lost_its_current_is_no_new_store() {
        let files = [
            "commit-000001.manifest",
            "t.rows",
            "000001.sst",
            "000001.wal",
            "t.dense",
            "pages.undo",
            "000001.bucket",
            "kept.old.list",
            "RESTORE",
            "restore.t.rows.staged",
            "shard1.t.rows",
            "SHARDS",
        ];
        for file in files {
            let folder: Arc<dyn Folder> = Arc::new(tierbed_io::MemoryFolder::new());
            folder.write_durable(file, b"bytes").unwrap();
            let refused = log(&folder).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Corruption, "{file}");
            assert!(refused.to_string().contains("tierbed repair"), "{refused}");
            assert_eq!(folder.list().unwrap(), [file], "nothing was written");
        }
        let folder: Arc<dyn Folder> = Arc::new(tierbed_io::MemoryFolder::new());
        folder.write_durable("notes.txt", b"bytes").unwrap();
        assert_eq!(log(&folder).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_store_that_never_committed_begins_again_over_its_left_overs() {
        let folder: Arc<dyn Folder> = Arc::new(tierbed_io::MemoryFolder::new());
        folder.write_durable("order-plan", b"bytes").unwrap();
        drop(log(&folder).unwrap());
        folder.write_durable("commit-000001.manifest", b"torn").unwrap();
        folder.write_durable("t.rows", b"bytes").unwrap();
        let mut log = log(&folder).unwrap();
        assert!(log.manifest().is_none());
        assert_eq!(CommitLog::stored_backend(&*folder).unwrap(), None);
        commit(&mut log);
        assert_eq!(CommitLog::stored_backend(&*folder).unwrap().unwrap(), "memory");
    }

    #[test]
    fn a_commit_is_found_without_current() {
        let folder: Arc<dyn Folder> = Arc::new(tierbed_io::MemoryFolder::new());
        commit(&mut log(&folder).unwrap());
        let current = folder.read(CommitLog::CURRENT).unwrap().unwrap();
        folder.remove(CommitLog::CURRENT).unwrap();
        let numbers: Vec<u64> = CommitLog::found_numbers(&*folder).unwrap().into_iter().collect();
        assert_eq!(numbers, [1]);
        let found = CommitLog::found(&*folder, 1).unwrap();
        assert_eq!(found.current.as_bytes(), current);
        assert_eq!(found.manifest.name, "good");
    }
}
