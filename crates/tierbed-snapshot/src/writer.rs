//! Snapshot writer: rows to pages, pages to files, and the manifest that makes them a snapshot.
//!
//! Rows go to pages in the order given, each table filling its own page; a full page is appended
//! to the page file and gets the next number. (row, page) pairs are sorted outside memory into
//! the forward index, so a publish needs little memory however many rows there are. The manifest
//! is written last, atomically: before it there is no snapshot, after it there is a whole one.
//!
//! ```text
//! push ─▶ page of the table ─▶ rows.pages        (row, page) ─▶ sorter ─▶ rows.index ─▶ manifest
//! ```
//!
//! Rows of tables that share pages by a placement take another way to the same page file: see
//! `placed_writer`.
#![expect(clippy::indexing_slicing, reason = "tables are checked against the schema on entry")]

use std::sync::Arc;

use serde::Serialize;
use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::store::out_of_range;
use tierbed_core::{
    Budget, Error, Reservation, Result, RowId, RowKey, Schema, TableId, TableSchema,
};
use tierbed_io::{AlignedBuf, Device, Folder, FolderLock, OpenMode, PAGE_BYTES};
use tierbed_kernels::Codec;

use crate::blocks::BUFFER_BYTES;
use crate::codecs::{InitialCode, PageLayout, TableCodecs, Tables};
use crate::delta::chain::BaseChain;
use crate::forward_index::{IndexShape, IndexWriter};
use crate::manifest::{
    check_attachment_name, served_schema, AttachmentInfo, Manifest, Placed, PlacementInfo,
    TableContents, Tailed, ATTACHMENT_PREFIX, INDEX_NAME, MANIFEST_NAME, PAGES_NAME, PLACES_NAME,
    TAILS_NAME,
};
use crate::page::{le_u64, PageBuilder, PageShape};
use crate::placed::{PlacedTables, Starts};
use crate::placed_writer::{encode, PlacedWriter, RowSource, SortSpace};
use crate::places::{places_blocks, PlacesWriter};
use crate::snapshot::Snapshot;
use crate::tails::{HeadAndShape, TableHeads, TailIndexWriter, TailShapes, TailSink, TailWriter};
use tierbed_io::sorter::{ExternalSorter, SorterOptions, MEMORY_BYTES_MIN};

/// Pages handed to the device at once.
const PAGES_AT_ONCE: usize = 16;
/// The sorter needs no more than this to sort a billion rows in two passes.
const SORT_BYTES_MAX: u64 = 64 << 20;
const BUFFERS_BYTES: u64 = BUFFER_BYTES + (PAGES_AT_ONCE * PAGE_BYTES) as u64;
const SCRATCH_NAME: &str = "scratch.index";

/// Writes one snapshot into an empty folder.
///
/// Dropping it unfinished removes what it wrote.
#[derive(Debug)]
pub struct SnapshotWriter {
    folder: Arc<dyn Folder>,
    schema: Schema,
    codecs: TableCodecs,
    /// Of the row that is being pushed.
    code: Vec<u8>,
    initial: InitialCode,
    pages: PageFileWriter,
    sorter: Option<ExternalSorter>,
    open_pages: Vec<Option<PageBuilder>>,
    open_bytes: Reservation,
    _buffers: Reservation,
    tables: Vec<TableContents>,
    attachments: Vec<AttachmentInfo>,
    base: Option<String>,
    base_delta: Option<String>,
    starts: Starts,
    placed: Vec<PlacedWriter>,
    /// By table: those that have one.
    tails: Vec<Option<TailWriter>>,
    /// The table with a tail whose rows come now.
    open_tail: Option<TableId>,
    /// Rows of tails come by id.
    comes_by_id: bool,
    sort_run_count: u64,
    budget: Budget,
    is_finished: bool,
    _lock: FolderLock,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What tells the snapshot from every other.
    pub identity: String,
    /// Rows stored.
    pub row_count: u64,
    /// Pages written.
    pub page_count: u64,
    /// Bytes of the page file.
    pub pages_bytes: u64,
    /// Bytes of the forward index.
    pub index_bytes: u64,
    /// Bytes of the placements' index.
    pub places_bytes: u64,
    /// Copies of rows beyond the first, on pages that tables share.
    pub replica_count: u64,
    /// Bytes of all attachments.
    pub attachments_bytes: u64,
    /// Bytes of rows, as they are coded, per byte of the page file.
    pub fill_ratio: f64,
    /// Sorted runs of (row, page) pairs spilled to the folder.
    pub sort_run_count: u64,
    /// Shards that were written; 0 for one snapshot.
    pub shard_count: u32,
    /// Rows never written that shards have all the same, because rows are numbered anew there and
    /// initial values are random.
    pub initial_rows: u64,
}

impl Report {
    /// Returns what was written together with `other`.
    pub(crate) fn and(self, other: &Self) -> Self {
        let pages_bytes = self.pages_bytes + other.pages_bytes;
        let row_bytes = |report: &Self| report.fill_ratio * report.pages_bytes as f64;
        Self {
            fill_ratio: (row_bytes(&self) + row_bytes(other)) / pages_bytes.max(1) as f64,
            row_count: self.row_count + other.row_count,
            page_count: self.page_count + other.page_count,
            pages_bytes,
            index_bytes: self.index_bytes + other.index_bytes,
            places_bytes: self.places_bytes + other.places_bytes,
            replica_count: self.replica_count + other.replica_count,
            attachments_bytes: self.attachments_bytes + other.attachments_bytes,
            sort_run_count: self.sort_run_count + other.sort_run_count,
            initial_rows: self.initial_rows + other.initial_rows,
            ..self
        }
    }
}

impl SnapshotWriter {
    /// Least memory of a writer, without placements and without a page for each table, bytes.
    pub const MEMORY_BYTES_MIN: u64 = BUFFERS_BYTES + MEMORY_BYTES_MIN;

    /// Returns the least memory of a writer of `schema`: a page for each table, the tails that
    /// `layout` says, and `placed`. The index is sorted in half of what is free, before memory is
    /// taken for placements, so these count twice.
    pub(crate) fn bytes_min(schema: &Schema, placed: &[PlacedTables], layout: &PageLayout) -> u64 {
        let pages_bytes = (PAGE_BYTES * schema.tables().len()) as u64;
        let placed_bytes = placed.iter().map(|placed| {
            let page_count = u64::from(placed.index.page_count());
            let item_count = u64::from(placed.index.forward().list_count());
            let sorter_bytes = ExternalSorter::memory_bytes_min(PAGE_BYTES);
            placed.index.memory_bytes() + 4 * page_count + item_count.div_ceil(8) + sorter_bytes
        });
        let tails_bytes = layout.tails_bytes_min(schema);
        Self::MEMORY_BYTES_MIN + pages_bytes + tails_bytes + 2 * placed_bytes.sum::<u64>()
    }

    /// Starts a snapshot of `schema` in `folder`, which must be empty. Optimizers are left
    /// behind. Memory is reserved from `budget`: half of what is free, up to 64 MiB, for sorting.
    ///
    /// # Errors
    /// `Invalid` when the folder is not empty or the budget does not reach, `Closed` when
    /// another writer holds the folder, `Io` and `NoSpace` from the folder.
    pub fn create(folder: Arc<dyn Folder>, schema: &Schema, budget: &Budget) -> Result<Self> {
        Self::create_placed(folder, schema, PageLayout::default(), budget)
    }

    /// As [`create`](Self::create), with rows on pages as `layout` says.
    ///
    /// Rows of a placement sit where it put them, in whatever order they are pushed. The
    /// placements' indexes and a sorter for each come out of `budget`.
    ///
    /// # Errors
    /// `Invalid` when a placement is not one of its tables, a table is in two of them, or a table
    /// cannot be coded; otherwise as [`create`](Self::create).
    pub fn create_placed(
        folder: Arc<dyn Folder>,
        schema: &Schema,
        layout: impl Into<PageLayout>,
        budget: &Budget,
    ) -> Result<Self> {
        let PageLayout { placed, codecs, heads, shards } = layout.into();
        assert!(shards.is_none(), "shards have a writer of their own");
        let schema = served_schema(schema)?;
        codecs.check(&schema)?;
        heads.check(&schema, |table| placed.iter().any(|placed| placed.tables.contains(&table)))?;
        let lock = folder.lock()?;
        if let Some(name) = folder.list()?.first() {
            let path = folder.path().map_or_else(String::new, |path| path.display().to_string());
            return Err(Error::invalid("a snapshot must be written into an empty folder")
                .with("path", path)
                .with("found", name)
                .with("remedy", "choose a new or empty folder"));
        }
        let buffers = budget.reserve("publish", BUFFERS_BYTES)?;
        let tables = Tables { schema: &schema, codecs: &codecs };
        let tails = open_tails(&heads, tables, budget)?;
        let free_bytes = budget.free_bytes().saturating_sub(heads.sorter_bytes_min(tables));
        let options = SorterOptions {
            key_bytes: KEY_BYTES,
            payload_bytes: size_of::<u64>(),
            memory_bytes: (free_bytes / 2).clamp(MEMORY_BYTES_MIN, SORT_BYTES_MAX),
            scratch_name: SCRATCH_NAME.to_owned(),
        };
        let sorter = ExternalSorter::new(Arc::clone(&folder), &options, budget)?;
        let pages = PageFileWriter::new(folder.open(PAGES_NAME, OpenMode::Create)?);
        let table_count = schema.tables().len();
        let placed = open_placed(placed, tables, &folder, budget)?;
        let starts = Starts::new(placed.iter().map(|placed| &placed.numbering));
        Ok(Self {
            tails,
            open_tail: None,
            comes_by_id: false,
            sort_run_count: 0,
            budget: budget.clone(),
            starts,
            placed,
            folder,
            schema,
            codecs,
            code: Vec::new(),
            initial: InitialCode::default(),
            pages,
            sorter: Some(sorter),
            open_pages: std::iter::repeat_with(|| None).take(table_count).collect(),
            open_bytes: budget.reserve("publish", 0)?,
            _buffers: buffers,
            tables: vec![TableContents::default(); table_count],
            attachments: Vec::new(),
            base: None,
            base_delta: None,
            is_finished: false,
            _lock: lock,
        })
    }

    /// Makes this a delta of `base`, and of the delta that was applied to make it. Where deltas lie
    /// upon `base` it is one of the newest of them, and names no snapshot: upon the snapshot alone
    /// it would be wrong.
    ///
    /// # Errors
    /// `Invalid` when a table has a tail; otherwise as [`Snapshot::attachment`].
    pub fn set_base(&mut self, base: &Snapshot) -> Result<()> {
        self.set_chain(&BaseChain::of(base)?)
    }

    /// As [`set_base`](Self::set_base), for a snapshot of which only manifests were read.
    ///
    /// # Errors
    /// `Invalid` when a table has a tail; otherwise as [`Manifest::encode`].
    pub fn set_chain(&mut self, base: &BaseChain) -> Result<()> {
        if self.tails.iter().any(Option::is_some) {
            return Err(Error::invalid("a delta has no tails")
                .with("remedy", "leave head_rows out, or publish in full"));
        }
        (self.base, self.base_delta) = (Some(base.identity()?), base.delta_identity()?);
        Ok(())
    }

    /// Says how many rows of a table will come, before they do: of a table that has a tail, so many
    /// have a share that is the head. Otherwise it is a share of all rows that the table has.
    ///
    /// # Errors
    /// `Invalid` for a table outside the schema.
    pub fn expect_rows(&mut self, table: TableId, stored_rows: u64) -> Result<()> {
        self.schema.table(table)?;
        if let Some(tail) = &mut self.tails[table.0 as usize] {
            tail.expect(stored_rows);
        }
        Ok(())
    }

    /// Says that rows of tails will come by id, so that they need not be sorted.
    pub(crate) fn expect_order_of_ids(&mut self) {
        self.comes_by_id = true;
    }

    /// Stores the weights `[dim]` of a row behind those pushed before; not those whose code is that
    /// of the initial weights, but in a delta. Of a table that has a tail the first ones are the
    /// head, and rows of other tables come before or behind all of its own.
    ///
    /// # Errors
    /// `Invalid` for a row or size outside the schema, and numbers that the table's codec cannot
    /// keep; `NoSpace` and `Io` from the folder. A row pushed twice is noticed by
    /// [`finish`](Self::finish).
    pub fn push(&mut self, table: TableId, row: RowId, weights: &[f32]) -> Result<()> {
        let mut code = std::mem::take(&mut self.code);
        code.resize(self.code_bytes(table)?, 0);
        if self.code(RowKey::new(table, row), weights, &mut code)? {
            self.push_code(table, row, &code)?;
        }
        self.code = code;
        Ok(())
    }

    /// Returns the bytes of a coded row of `table`.
    pub(crate) fn code_bytes(&self, table: TableId) -> Result<usize> {
        Ok(self.codecs.of(table).code_bytes(self.schema.table(table)?.dim as usize))
    }

    /// Codes the weights of a row as [`push`](Self::push) does; false where the row is not stored.
    pub(crate) fn code(&mut self, key: RowKey, weights: &[f32], code: &mut [u8]) -> Result<bool> {
        let RowKey { table, row } = key;
        let schema = shape_of(&self.schema, table, row)?;
        if weights.len() != schema.dim as usize {
            return Err(Error::invalid("row has another number of elements than its table")
                .with("table", &schema.name)
                .with("expected", schema.dim)
                .with("found", weights.len()));
        }
        let codec = self.codecs.of(table);
        encode(codec, key, weights, code)?;
        let may_skip = *codec != Codec::F32 && self.base.is_none();
        Ok(!(may_skip && self.initial.is(schema, codec, row, code)))
    }

    /// As [`push`](Self::push), for a row that is coded already, in the table's codec.
    pub(crate) fn push_code(&mut self, table: TableId, row: RowId, code: &[u8]) -> Result<()> {
        if self.open_tail.is_some_and(|open| open != table) {
            self.close_tail()?;
        }
        let schema = shape_of(&self.schema, table, row)?;
        if let Some((placement, item)) = self.starts.find(RowKey::new(table, row)) {
            return self.placed[placement as usize].push(item, code);
        }
        if self.tails[table.0 as usize].is_some() {
            return self.push_to_tail(table, row, code);
        }
        let place = &mut self.open_pages[table.0 as usize];
        if place.is_none() {
            self.open_bytes.resize(self.open_bytes.bytes() + PAGE_BYTES as u64)?;
        }
        let page = place
            .get_or_insert_with(|| PageBuilder::new(PageShape::new(schema, self.codecs.of(table))));
        for part in 0..page.shape().parts_per_row {
            page.push(row, part, code);
            if page.is_full() {
                let contents = &mut self.tables[table.0 as usize];
                self.pages.append(table, page, contents, self.sorter.as_mut())?;
            }
        }
        Ok(())
    }

    fn push_to_tail(&mut self, table: TableId, row: RowId, code: &[u8]) -> Result<()> {
        let (folder, budget) = (&self.folder, &self.budget);
        let space = (!self.comes_by_id).then_some(SortSpace { folder, budget, share_count: 2 });
        let (Some(tail), Some(pairs)) = (&mut self.tails[table.0 as usize], &mut self.sorter)
        else {
            panic!("{table:?} has no tail, or its index was written");
        };
        let contents = &mut self.tables[table.0 as usize];
        let mut sink = TailSink { pages: &mut self.pages, contents, pairs };
        self.open_tail = Some(table);
        tail.push(row, code, &mut sink, space)
    }

    // Completes the pages of the table with a tail whose rows came last.
    fn close_tail(&mut self) -> Result<()> {
        let Some(table) = self.open_tail.take() else { return Ok(()) };
        let (Some(tail), Some(pairs)) = (&mut self.tails[table.0 as usize], &mut self.sorter)
        else {
            panic!("{table:?} has no tail, or its index was written");
        };
        let contents = &mut self.tables[table.0 as usize];
        let mut sink = TailSink { pages: &mut self.pages, contents, pairs };
        self.sort_run_count += tail.close(&mut sink)?;
        Ok(())
    }

    /// Writes the pages of placement `placement` with the rows that `row_of` gives: each row as
    /// often as it has pages, page by page. For rows that can be asked for in any order; nothing is
    /// sorted then.
    ///
    /// # Errors
    /// `Invalid` when there is no such placement, or rows of its tables were given before;
    /// `NoSpace` and `Io` from the folder; errors of `row_of` pass through.
    pub fn fill(&mut self, placement: usize, row_of: &mut RowSource<'_>) -> Result<()> {
        self.close_tail()?;
        let Some(placed) = self.placed.get_mut(placement) else {
            return Err(Error::invalid("no such placement").with("placement", placement));
        };
        placed.fill(&mut self.pages, row_of)
    }

    /// Adds the named blob `bytes`: dense parameters, feature names, ….
    ///
    /// # Errors
    /// `Invalid` for a name taken or not plain, `NoSpace` and `Io` from the folder.
    pub fn attach(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        check_attachment_name(name)?;
        if self.attachments.iter().any(|known| known.name == name) {
            return Err(Error::invalid("attachment exists").with("name", name));
        }
        self.folder.write_durable(&format!("{ATTACHMENT_PREFIX}{name}"), bytes)?;
        self.attachments.push(AttachmentInfo {
            name: name.to_owned(),
            bytes: bytes.len() as u64,
            crc32c: crc32c(bytes),
        });
        Ok(())
    }

    /// Completes the snapshot: what was pushed and attached is durable and can be opened.
    ///
    /// # Errors
    /// `Invalid` when a row was pushed twice, `NoSpace` and `Io` from the folder; there is no
    /// snapshot then.
    pub fn finish(mut self) -> Result<Report> {
        self.close_tail()?;
        for (at, place) in self.open_pages.iter_mut().enumerate() {
            if let Some(page) = place.as_mut().filter(|page| page.row_count() > 0) {
                let (table, contents) = (TableId(at as u32), &mut self.tables[at]);
                self.pages.append(table, page, contents, self.sorter.as_mut())?;
            }
        }
        self.open_pages.clear();
        self.open_bytes.resize(0)?;
        let mut sort_run_count = self.sort_run_count;
        for placed in &mut self.placed {
            sort_run_count += placed.finish(&mut self.pages)?;
            placed.row_counts(|table| self.tables[table].row_count += 1);
        }
        self.pages.finish()?;
        let shape = self.index_shape()?;
        let is_sparse = shape.is_sparse();
        let tails = self.tail_shapes()?;
        let Indexed { index_crc32c, tailed, run_count } = self.write_index(&shape, &tails)?;
        sort_run_count += run_count;
        let placed = self.write_places()?;
        self.attachments.sort_by(|a, b| a.name.cmp(&b.name));
        let manifest = Manifest {
            schema: self.schema.clone(),
            row_count: self.tables.iter().map(|table| table.row_count).sum(),
            page_count: self.pages.page_count,
            pages_crc32c: self.pages.crc,
            index_crc32c,
            tables: self.tables.clone(),
            attachments: std::mem::take(&mut self.attachments),
            base: self.base.take(),
            base_delta: self.base_delta.take(),
            placed,
            codecs: self.codecs.clone(),
            is_sparse,
            tailed,
        };
        self.folder.sync()?;
        self.folder.write_atomic(MANIFEST_NAME, &manifest.encode()?)?;
        self.is_finished = true;
        let index_blocks = shape.block_count() + tails.block_count();
        report(&manifest, index_blocks * PAGE_BYTES as u64, sort_run_count)
    }

    fn write_places(&mut self) -> Result<Option<Placed>> {
        if self.placed.is_empty() {
            return Ok(None);
        }
        let device = self.folder.open(PLACES_NAME, OpenMode::Create)?;
        let mut places = PlacesWriter::new(Arc::clone(&device));
        let mut placements = Vec::with_capacity(self.placed.len());
        for placed in &self.placed {
            placed.write_places(&mut places)?;
            placements.push(PlacementInfo {
                tables: placed.tables.clone(),
                first_page: placed.first_page,
                page_count: u64::from(placed.page_count),
                seat_count: placed.seat_count,
            });
        }
        let places_crc32c = places.finish()?;
        device.sync()?;
        Ok(Some(Placed { places_crc32c, placements }))
    }

    // The index of a delta is sparse where that is smaller.
    fn index_shape(&self) -> Result<IndexShape> {
        let page_count = self.pages.page_count;
        let is_left_out =
            |table: TableId| self.starts.is_placed(table) || self.tails[table.0 as usize].is_some();
        let dense = IndexShape::without(&self.schema, page_count, is_left_out)?;
        let stored = self.tables.iter().map(|table| table.row_count);
        let may_be_sparse = self.base.is_some()
            && self.placed.is_empty()
            && IndexShape::can_be_sparse(stored.clone(), page_count);
        if !may_be_sparse {
            return Ok(dense);
        }
        let sparse = IndexShape::sparse(&self.schema, page_count, stored)?;
        Ok(if sparse.word_count() < dense.word_count() { sparse } else { dense })
    }

    fn tail_shapes(&self) -> Result<TailShapes> {
        let infos: Vec<_> = self.tails.iter().flatten().map(TailWriter::info).collect();
        let tables = Tables { schema: &self.schema, codecs: &self.codecs };
        TailShapes::new(tables, &self.tables, &infos)
    }

    fn write_index(&mut self, shape: &IndexShape, tail_shapes: &TailShapes) -> Result<Indexed> {
        let Some(sorter) = self.sorter.take() else {
            return Err(Error::invalid("snapshot is finished already"));
        };
        let mut pairs = sorter.finish()?;
        let device = self.folder.open(INDEX_NAME, OpenMode::Create)?;
        let mut index = IndexWriter::new(shape.clone(), Arc::clone(&device));
        let mut tail_index = self.open_tail_index(tail_shapes)?;
        let mut previous = None;
        while let Some(pair) = pairs.next()? {
            let key = decode_key(pair.key);
            if previous == Some(key) {
                let table = self.schema.table(key.table)?;
                return Err(Error::invalid("row was pushed twice")
                    .with("table", &table.name)
                    .with("row", key.row.0));
            }
            previous = Some(key);
            let page_id = le_u64(pair.payload, 0);
            match &mut tail_index {
                Some(tails) if self.tails[key.table.0 as usize].is_some() => {
                    tails.push(key, page_id)?;
                }
                _ => index.push(key, page_id)?,
            }
        }
        let index_crc32c = index.finish()?;
        device.sync()?;
        let tailed = tail_index.map(|index| {
            let tails = self.tails.iter().flatten().map(TailWriter::info).collect();
            Ok(Tailed { tails_crc32c: index.finish()?, tails })
        });
        let run_count = pairs.stats().run_count;
        Ok(Indexed { index_crc32c, tailed: tailed.transpose()?, run_count })
    }

    fn open_tail_index<'a>(
        &'a self,
        shapes: &'a TailShapes,
    ) -> Result<Option<TailIndexWriter<'a>>> {
        if shapes.tables.is_empty() {
            return Ok(None);
        }
        let device = self.folder.open(TAILS_NAME, OpenMode::Create)?;
        let writers = self.tails.iter().flatten().collect();
        Ok(Some(TailIndexWriter::new(shapes, writers, device)))
    }
}

/// What was written of the indexes.
struct Indexed {
    index_crc32c: u32,
    tailed: Option<Tailed>,
    run_count: u64,
}

impl Drop for SnapshotWriter {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // Best effort: without a manifest the files are no snapshot anyway.
        let _ = self.folder.remove(PAGES_NAME);
        let _ = self.folder.remove(INDEX_NAME);
        let _ = self.folder.remove(PLACES_NAME);
        let _ = self.folder.remove(TAILS_NAME);
        for attachment in &self.attachments {
            let _ = self.folder.remove(&format!("{ATTACHMENT_PREFIX}{}", attachment.name));
        }
    }
}

/// Returns the table of a row that is one of `schema`.
fn shape_of(schema: &Schema, table: TableId, row: RowId) -> Result<&TableSchema> {
    let table = schema.table(table)?;
    if row.0 >= table.row_count {
        return Err(out_of_range(table, row.0));
    }
    Ok(table)
}

/// Makes ready for the rows of tables that have tails; returns them by table.
fn open_tails(
    heads: &TableHeads,
    tables: Tables<'_>,
    budget: &Budget,
) -> Result<Vec<Option<TailWriter>>> {
    let mut tails = Vec::new();
    tails.resize_with(tables.schema.tables().len(), || None);
    for (id, size) in heads.iter() {
        let table = tables.schema.table(id)?;
        let shape = PageShape::new(table, tables.codecs.of(id));
        let tail = TailWriter::new(id, table.row_count, HeadAndShape { size, shape }, budget)?;
        tails[id.0 as usize] = Some(tail);
    }
    Ok(tails)
}

fn open_placed(
    placed: Vec<PlacedTables>,
    tables: Tables<'_>,
    folder: &Arc<dyn Folder>,
    budget: &Budget,
) -> Result<Vec<PlacedWriter>> {
    let count = placed.len();
    let mut ids: Vec<TableId> = placed.iter().flat_map(|p| p.tables.iter().copied()).collect();
    ids.sort_unstable();
    if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::invalid("table is in two placements").with("table_id", twice[0].0));
    }
    let open = |(number, placed)| {
        // One share each for this writer and those still to come, and one that stays free.
        let share_count = (count - number) as u64 + 1;
        PlacedWriter::new(placed, number, tables, SortSpace { folder, budget, share_count })
    };
    placed.into_iter().enumerate().map(open).collect()
}

/// Appends pages to the page file, several at a time.
#[derive(Debug)]
pub(crate) struct PageFileWriter {
    device: Arc<dyn Device>,
    buffer: AlignedBuf,
    /// Pages in the buffer.
    buffered: usize,
    /// Pages numbered so far.
    page_count: u64,
    crc: u32,
}

impl PageFileWriter {
    fn new(device: Arc<dyn Device>) -> Self {
        let buffer = AlignedBuf::new(PAGES_AT_ONCE * PAGE_BYTES);
        Self { device, buffer, buffered: 0, page_count: 0, crc: 0 }
    }

    /// Numbers the page, notes in `pairs` which rows start on it, and empties it.
    pub(crate) fn append(
        &mut self,
        table: TableId,
        page: &mut PageBuilder,
        contents: &mut TableContents,
        mut pairs: Option<&mut ExternalSorter>,
    ) -> Result<()> {
        let page_id = self.page_count;
        contents.page_count += 1;
        if page.part() == 0 {
            contents.row_count += page.row_count() as u64;
            for slot in 0..page.row_count() {
                let Some(pairs) = &mut pairs else { break };
                let key = encode_key(RowKey::new(table, page.row(slot)));
                pairs.push(&key, &page_id.to_le_bytes())?;
            }
        }
        self.put(table.0, page)
    }

    /// Returns the number that the next page gets.
    pub(crate) fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Numbers a page of `owner`, appends and empties it.
    pub(crate) fn put(&mut self, owner: u32, page: &mut PageBuilder) -> Result<()> {
        if self.buffered == PAGES_AT_ONCE {
            self.flush()?;
        }
        assert!(self.buffered < PAGES_AT_ONCE, "no room for a page after a flush");
        let page_id = self.page_count;
        let start = self.buffered * PAGE_BYTES;
        let (buffer, crc) = (&mut self.buffer, &mut self.crc);
        page.seal(TableId(owner), page_id, |bytes| {
            *crc = crc32c_append(*crc, &bytes[..4]);
            buffer[start..start + PAGE_BYTES].copy_from_slice(bytes);
        });
        self.buffered += 1;
        self.page_count += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let first = self.page_count - self.buffered as u64;
        let used = &self.buffer[..self.buffered * PAGE_BYTES];
        self.device.write_at(first * PAGE_BYTES as u64, used)?;
        self.buffered = 0;
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.flush()?;
        self.device.sync()
    }
}

/// Bytes of an encoded key: 4 of table, 8 of row, most significant first, so that keys compare as
/// bytes.
const KEY_BYTES: usize = 12;

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn encode_key(key: RowKey) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    let (table, row) = bytes.split_at_mut(4);
    table.copy_from_slice(&key.table.0.to_be_bytes());
    row.copy_from_slice(&key.row.0.to_be_bytes());
    bytes
}

#[expect(clippy::big_endian_bytes, reason = "sort keys compare most significant byte first")]
fn decode_key(bytes: &[u8]) -> RowKey {
    assert_eq!(bytes.len(), KEY_BYTES, "bytes of a sort key");
    let (mut table, mut row) = ([0; 4], [0; 8]);
    table.copy_from_slice(&bytes[..4]);
    row.copy_from_slice(&bytes[4..]);
    RowKey::new(TableId(u32::from_be_bytes(table)), RowId(u64::from_be_bytes(row)))
}

fn report(manifest: &Manifest, index_bytes: u64, sort_run_count: u64) -> Result<Report> {
    let pages_bytes = manifest.page_count * PAGE_BYTES as u64;
    let blocks =
        manifest.placed.as_ref().map_or(Ok(0), |placed| places_blocks(&manifest.schema, placed))?;
    Ok(Report {
        identity: manifest.identity()?,
        places_bytes: blocks * PAGE_BYTES as u64,
        replica_count: manifest.replica_count(),
        row_count: manifest.row_count,
        page_count: manifest.page_count,
        pages_bytes,
        index_bytes,
        attachments_bytes: manifest.attachments.iter().map(|attachment| attachment.bytes).sum(),
        fill_ratio: manifest.fill_ratio(),
        sort_run_count,
        shard_count: 0,
        initial_rows: 0,
    })
}
