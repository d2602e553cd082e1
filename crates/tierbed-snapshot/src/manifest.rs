//! Manifest of a snapshot: schema, counts and checksums. The last file written, the first one read.
//!
//! One line `tierbed-snapshot <version> <crc32c of the rest, 8 hex digits>`, then JSON. A folder
//! without it is not a snapshot. Normative text: docs/reference/formats/snapshot.md.

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, OptimizerKind, Result, Schema, TableId};
use tierbed_io::checked_text::Refused;
use tierbed_io::{CheckedText, Folder, PAGE_BYTES};

use crate::codecs::{TableCodecs, Tables};
use crate::forward_index::IndexShape;
use crate::placed::Numbering;
use crate::shards::SHARDS_NAME;
use crate::tails::TailShapes;

/// The manifest's file name.
pub const MANIFEST_NAME: &str = "snapshot.json";
/// The page file's name.
pub const PAGES_NAME: &str = "rows.pages";
/// The forward index's file name.
pub const INDEX_NAME: &str = "rows.index";
/// The file name of the placements' index.
pub const PLACES_NAME: &str = "rows.places";
/// The file name of the index of tails.
pub const TAILS_NAME: &str = "rows.tails";
/// File names of attachments start with this.
pub const ATTACHMENT_PREFIX: &str = "att.";
/// Version of the snapshot format: tables whose rows lie by id behind a head.
pub const SNAPSHOT_VERSION: u32 = 5;
/// Version written for a delta whose index has its own rows only.
pub const SPARSE_VERSION: u32 = 4;
/// Version written when some rows are coded.
pub const CODED_VERSION: u32 = 3;
/// Version written when rows are f32 and tables share pages: readers of that version can read it.
pub const PLACED_VERSION: u32 = 2;
/// Version written when rows are f32 and no tables share pages.
pub const PLAIN_VERSION: u32 = 1;
/// The manifest's first line.
pub(crate) const TEXT: CheckedText =
    CheckedText { magic: "tierbed-snapshot", versions: PLAIN_VERSION..=SNAPSHOT_VERSION };

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
    /// In a delta of a snapshot that a delta was applied to: the identity of that delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_delta: Option<String>,
    /// Tables that share pages by placements. `None`: each table has pages of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<Placed>,
    /// In which codecs rows are kept.
    #[serde(default, skip_serializing_if = "TableCodecs::is_plain")]
    pub codecs: TableCodecs,
    /// In a delta: the forward index has entries of stored rows only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_sparse: bool,
    /// Tables whose rows lie by id behind a head. `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tailed: Option<Tailed>,
}

/// The tables of a snapshot that have tails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tailed {
    /// CRC32C over the checksums of the blocks of the index of tails, in order.
    pub tails_crc32c: u32,
    /// In id order.
    pub tails: Vec<TailInfo>,
}

/// A table whose rows lie by id behind a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TailInfo {
    /// Id of the table.
    pub table: u32,
    /// Rows that have entries in the index.
    pub head_rows: u64,
    /// Number of the first page of the table; its pages follow each other.
    pub first_page: u64,
}

/// The placements of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// CRC32C over the checksums of the blocks of the places file, in order.
    pub places_crc32c: u32,
    /// One for each group of tables that share pages.
    pub placements: Vec<PlacementInfo>,
}

/// Tables that share pages, and the pages they share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementInfo {
    /// Ids of the tables, in the order in which their rows are numbered through.
    pub tables: Vec<u32>,
    /// Number of the first page.
    pub first_page: u64,
    /// Pages.
    pub page_count: u64,
    /// Rows on all pages, each as often as it is there.
    pub seat_count: u64,
}

/// What is stored of one table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableContents {
    /// Rows stored.
    pub row_count: u64,
    /// Pages of their own that they occupy; 0 where tables share pages.
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

    /// Checks that this is no delta.
    ///
    /// # Errors
    /// `Invalid` when it is one.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match &self.base {
            None => Ok(()),
            Some(base) => Err(Error::invalid("folder holds a delta, not a whole snapshot")
                .with("delta_of", base)
                .with("remedy", "apply it to that snapshot, and open the result")),
        }
    }

    fn version(&self) -> u32 {
        match (self.codecs.is_plain(), &self.placed) {
            _ if self.tailed.is_some() => SNAPSHOT_VERSION,
            _ if self.is_sparse => SPARSE_VERSION,
            (false, _) => CODED_VERSION,
            (true, Some(_)) => PLACED_VERSION,
            (true, None) => PLAIN_VERSION,
        }
    }

    /// Returns the bytes of rows, as they are coded, per byte of the page file.
    #[must_use]
    pub fn fill_ratio(&self) -> f64 {
        let tables = (0..).map(TableId).zip(self.schema.tables()).zip(&self.tables);
        let row_bytes = tables.map(|((id, schema), contents)| {
            contents.row_count * self.codecs.of(id).code_bytes(schema.dim as usize) as u64
        });
        let pages_bytes = self.page_count * PAGE_BYTES as u64;
        row_bytes.sum::<u64>() as f64 / pages_bytes.max(1) as f64
    }

    /// Returns the placement that table `id` belongs to.
    #[must_use]
    pub fn placement_of(&self, id: TableId) -> Option<usize> {
        let placements = &self.placed.as_ref()?.placements;
        placements.iter().position(|placement| placement.tables.contains(&id.0))
    }

    /// Returns what is said of the head and the tail of table `id`, if it has them.
    #[must_use]
    pub fn tail_of(&self, id: TableId) -> Option<TailInfo> {
        let tails = &self.tailed.as_ref()?.tails;
        tails.iter().find(|tail| tail.table == id.0).copied()
    }

    /// Returns how many copies of rows there are beyond the first.
    #[must_use]
    pub fn replica_count(&self) -> u64 {
        let placements = self.placed.iter().flat_map(|placed| &placed.placements);
        let rows = placements.map(|placement| {
            let tables = placement.tables.iter().filter_map(|&id| self.tables.get(id as usize));
            placement.seat_count.saturating_sub(tables.map(|table| table.row_count).sum())
        });
        rows.sum()
    }

    /// Returns how the forward index is laid out.
    pub(crate) fn index_shape(&self) -> Result<IndexShape> {
        match self.is_sparse {
            true => {
                let stored = self.tables.iter().map(|table| table.row_count);
                IndexShape::sparse(&self.schema, self.page_count, stored)
            }
            false => {
                let is_left_out =
                    |table| self.placement_of(table).is_some() || self.tail_of(table).is_some();
                IndexShape::without(&self.schema, self.page_count, is_left_out)
            }
        }
    }

    /// Returns how the index of tails is laid out.
    pub(crate) fn tail_shapes(&self) -> Result<TailShapes> {
        let Some(tailed) = &self.tailed else { return Ok(TailShapes::default()) };
        let tables = Tables { schema: &self.schema, codecs: &self.codecs };
        TailShapes::new(tables, &self.tables, &tailed.tails)
    }

    /// Encodes the manifest file.
    ///
    /// # Errors
    /// `Invalid` when a number cannot be written as JSON, which no checked schema has.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut body = serde_json::to_vec_pretty(self)
            .map_err(|cause| Error::invalid("cannot encode the manifest").with("cause", cause))?;
        body.push(b'\n');
        Ok(TEXT.encode(self.version(), &body))
    }

    /// Decodes and checks a manifest file.
    ///
    /// # Errors
    /// `Invalid` for files of another format or version, `Corruption` when the bytes are not
    /// what was written.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (version, body) = TEXT.decode(bytes).map_err(refusal)?;
        let manifest: Self = serde_json::from_slice(body).map_err(|cause| {
            Error::corruption("manifest is not the expected JSON").with("cause", cause)
        })?;
        if manifest.version() != version {
            return Err(Error::corruption("manifest is of another version than its content")
                .with("expected", manifest.version())
                .with("found", version));
        }
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
            let names = folder.list()?;
            let has = |name: &str| names.iter().any(|other| other == name);
            let error = if has(SHARDS_NAME) {
                Error::invalid("the folder holds shards, not one snapshot")
                    .with("path", path)
                    .with("remedy", "open the folder of one shard, or serve all of them")
            } else if has(PAGES_NAME) {
                Error::invalid("snapshot was not finished: publishing was interrupted")
                    .with("path", path)
                    .with("remedy", "publish again, into a new or empty folder")
            } else {
                Error::invalid("not a snapshot: the folder has no manifest")
                    .with("path", path)
                    .with("expected", MANIFEST_NAME)
            };
            return Err(error);
        };
        Self::decode(&bytes).map_err(|error| error.with("path", path))
    }

    /// Reads attachment `name` from `folder`; `None` when there is none of that name.
    pub(crate) fn read_attachment(
        &self,
        folder: &dyn Folder,
        name: &str,
    ) -> Result<Option<Vec<u8>>> {
        let Some(info) = self.attachments.iter().find(|info| info.name == name) else {
            return Ok(None);
        };
        let bytes = folder.read(&format!("{ATTACHMENT_PREFIX}{name}"))?;
        let found = bytes.as_ref().map(|bytes| (bytes.len() as u64, crc32c(bytes)));
        if found != Some((info.bytes, info.crc32c)) {
            return Err(Error::corruption("attachment is missing or changed")
                .with("name", name)
                .with("expected", format_args!("{} bytes, crc {:08x}", info.bytes, info.crc32c))
                .with("found", format_args!("{found:x?}"))
                .with("remedy", "publish the snapshot again"));
        }
        Ok(bytes)
    }

    fn checked(self) -> Result<Self> {
        let bad = |what: &str| Error::corruption(what);
        let schema = Schema::new(self.schema.tables().to_vec())
            .map_err(|error| bad("manifest has a bad schema").with("cause", error))?;
        let rows = self.tables.iter().try_fold(0u64, |sum, table| sum.checked_add(table.row_count));
        let own = self.tables.iter().map(|table| table.page_count);
        let placements = self.placed.iter().flat_map(|placed| &placed.placements);
        let pages = own
            .chain(placements.map(|placement| placement.page_count))
            .try_fold(0u64, u64::checked_add);
        if self.tables.len() != schema.tables().len()
            || rows != Some(self.row_count)
            || pages != Some(self.page_count)
            || self.page_count > u64::MAX >> 16
        {
            return Err(bad("manifest's counts do not add up"));
        }
        let stored = self.tables.iter().map(|table| table.row_count);
        let may_be_sparse = self.base.is_some()
            && self.placed.is_none()
            && IndexShape::can_be_sparse(stored, self.page_count);
        if self.is_sparse && !may_be_sparse {
            return Err(bad("manifest has a sparse index where none can be"));
        }
        let coded = self.codecs.check(&schema);
        coded.map_err(|error| bad("manifest has a bad codec").with("cause", error))?;
        if let Some(placed) = &self.placed {
            let tables = Tables { schema: &schema, codecs: &self.codecs };
            check_placements(placed, tables, self.page_count)?;
        }
        self.check_tails()?;
        for attachment in &self.attachments {
            check_attachment_name(&attachment.name)
                .map_err(|error| bad("manifest has a bad attachment name").with("cause", error))?;
        }
        Ok(self)
    }

    /// Fails when tables have tails that cannot have them, or on pages that are not there.
    fn check_tails(&self) -> Result<()> {
        let Some(tailed) = &self.tailed else { return Ok(()) };
        self.tail_shapes()?;
        let is_wrong = |tail: &TailInfo| {
            let table = TableId(tail.table);
            let pages = self.tables.get(tail.table as usize).map(|table| table.page_count);
            let end = pages.and_then(|pages| tail.first_page.checked_add(pages));
            self.placement_of(table).is_some() || end.is_none_or(|end| end > self.page_count)
        };
        if self.base.is_some() || tailed.tails.is_empty() || tailed.tails.iter().any(is_wrong) {
            return Err(Error::corruption("manifest has a tail where none can be"));
        }
        Ok(())
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

/// Fails when tables are placed twice, together with another dim, or on pages that are not there.
fn check_placements(placed: &Placed, tables: Tables<'_>, page_count: u64) -> Result<()> {
    let bad = |at: usize| Error::corruption("manifest has a bad placement").with("placement", at);
    let mut seen = Vec::new();
    for (at, placement) in placed.placements.iter().enumerate() {
        let numbering = Numbering::new(tables.schema, &placement.tables);
        let shape = numbering.and_then(|numbering| numbering.shape(tables.codecs));
        shape.map_err(|error| bad(at).with("cause", error))?;
        let is_seen = placement.tables.iter().any(|table| seen.contains(table));
        seen.extend_from_slice(&placement.tables);
        let end = placement.first_page.checked_add(placement.page_count);
        let is_inside = end.is_some_and(|end| end <= page_count);
        if is_seen || !is_inside || placement.seat_count > u64::from(u32::MAX) {
            return Err(bad(at));
        }
    }
    if placed.placements.is_empty() {
        return Err(bad(0));
    }
    Ok(())
}

fn refusal(refused: Refused) -> Error {
    match refused {
        Refused::Foreign(found) => {
            Error::invalid("not a snapshot manifest").with("found", format_args!("{found:?}"))
        }
        Refused::Version(found) => Error::invalid("snapshot has another format version")
            .with("expected", format_args!("{PLAIN_VERSION} to {SNAPSHOT_VERSION}"))
            .with("found", found)
            .with("remedy", "publish it again with this version, or read it with that one"),
        Refused::Damaged { found, body_crc32c } => Error::corruption("manifest checksum mismatch")
            .with("expected", format_args!("{body_crc32c:08x}"))
            .with("found", format_args!("{found:?}"))
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
            init: InitSpec::Uniform { low: -0.1, high: 0.3 },
            seed: 1,
            ..TableSchema::plain("c1", 10, 4)
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
            base_delta: None,
            placed: None,
            codecs: TableCodecs::default(),
            is_sparse: false,
            tailed: None,
        }
    }

    fn sparse_manifest() -> Manifest {
        Manifest { base: Some("0".repeat(24)), is_sparse: true, ..manifest() }
    }

    #[test]
    fn sparse_indexes_raise_the_version_and_belong_to_deltas() {
        assert!(sparse_manifest().encode().unwrap().starts_with(b"tierbed-snapshot 4 "));
        for broken in [
            Manifest { base: None, ..sparse_manifest() },
            Manifest { base: sparse_manifest().base, is_sparse: true, ..placed_manifest() },
        ] {
            let error = Manifest::decode(&broken.encode().unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
        }
    }

    fn coded_manifest() -> Manifest {
        let codecs = TableCodecs::named([(TableId(0), "int8")]).unwrap();
        Manifest { codecs, ..manifest() }
    }

    fn placed_manifest() -> Manifest {
        let placement =
            PlacementInfo { tables: vec![0], first_page: 0, page_count: 1, seat_count: 4 };
        Manifest {
            tables: vec![TableContents { row_count: 3, page_count: 0 }],
            placed: Some(Placed { places_crc32c: 8, placements: vec![placement] }),
            ..manifest()
        }
    }

    fn tailed_manifest() -> Manifest {
        let tails = vec![TailInfo { table: 0, head_rows: 1, first_page: 0 }];
        Manifest {
            page_count: 2,
            tables: vec![TableContents { row_count: 3, page_count: 2 }],
            tailed: Some(Tailed { tails_crc32c: 9, tails }),
            ..manifest()
        }
    }

    #[test]
    fn tails_raise_the_version_and_must_fit_the_tables() {
        assert!(tailed_manifest().encode().unwrap().starts_with(b"tierbed-snapshot 5 "));
        let breaks: [fn(&mut Manifest, &mut Vec<TailInfo>); 10] = [
            |_, tails| tails.clear(),
            |_, tails| tails.push(tails[0]),
            |_, tails| tails[0].table = 1,
            |_, tails| tails[0].head_rows = 4,
            |_, tails| tails[0].head_rows = 0,
            |_, tails| tails[0].head_rows = u64::MAX,
            |_, tails| tails[0].first_page = 1,
            |_, tails| tails[0].first_page = u64::MAX,
            |manifest, _| manifest.base = sparse_manifest().base,
            |manifest, _| (manifest.row_count, manifest.tables[0].row_count) = (11, 11),
        ];
        for (at, act) in breaks.iter().enumerate() {
            let mut broken = tailed_manifest();
            let mut tailed = broken.tailed.take().unwrap();
            act(&mut broken, &mut tailed.tails);
            broken.tailed = Some(tailed);
            let error = Manifest::decode(&broken.encode().unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{at}: {error}");
        }
        let placed = Manifest { tailed: tailed_manifest().tailed, ..placed_manifest() };
        assert!(Manifest::decode(&placed.encode().unwrap()).is_err());
    }

    #[test]
    fn comes_back_as_written() {
        for manifest in
            [manifest(), placed_manifest(), coded_manifest(), sparse_manifest(), tailed_manifest()]
        {
            assert_eq!(Manifest::decode(&manifest.encode().unwrap()).unwrap(), manifest);
        }
    }

    #[test]
    fn codecs_raise_the_version_and_must_fit_the_tables() {
        let bytes = coded_manifest().encode().unwrap();
        assert!(bytes.starts_with(b"tierbed-snapshot 3 "));
        let text = String::from_utf8(bytes).unwrap();
        let (_, body) = text.split_once('\n').unwrap();
        for bad in [r#""0": "int3""#, r#""0": "evstore8""#, r#""1": "int8""#, r#""0": "f32""#] {
            let body = body.replace(r#""0": "int8""#, bad);
            let error = Manifest::decode(&TEXT.encode(3, body.as_bytes())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{bad}: {error}");
        }
        let plain = TEXT.encode(PLAIN_VERSION, body.as_bytes());
        assert!(Manifest::decode(&plain).is_err(), "codecs in a file of version 1");
    }

    #[test]
    fn placements_raise_the_version_and_must_fit_the_tables() {
        assert!(manifest().encode().unwrap().starts_with(b"tierbed-snapshot 1 "));
        assert!(placed_manifest().encode().unwrap().starts_with(b"tierbed-snapshot 2 "));
        let breaks: [fn(&mut PlacementInfo); 5] = [
            |placement| placement.tables = vec![1],
            |placement| placement.tables = vec![0, 0],
            |placement| placement.first_page = 1,
            |placement| placement.first_page = u64::MAX,
            |placement| placement.seat_count = 1 << 32,
        ];
        for (at, act) in breaks.iter().enumerate() {
            let mut broken = placed_manifest();
            broken.placed.iter_mut().for_each(|placed| act(&mut placed.placements[0]));
            let error = Manifest::decode(&broken.encode().unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{at}");
        }
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
        let newer = text.replacen("snapshot 1", "snapshot 6", 1);
        let error = Manifest::decode(newer.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("found: 6"), "{error}");
        assert_eq!(Manifest::decode(b"{}").unwrap_err().kind(), ErrorKind::Invalid);
        let mut wrong = manifest();
        wrong.row_count = 4;
        let error = Manifest::decode(&wrong.encode().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
    }

    proptest! {
        #[test]
        fn random_bodies_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Manifest::decode(&TEXT.encode(PLAIN_VERSION, &body)).is_err());
        }
    }
}
