//! An open snapshot: options, memory, statistics and attachments.
//!
//! One budget holds the forward index, the readers (I/O buffers and scratch) and the row cache,
//! which gets what the others leave. With the memory backend the pages count too; with mmap they
//! live in the page cache of the operating system, outside the budget, and may be bounded there.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::select::Selection;
use serde::Serialize;
use tierbed_core::budget::BudgetReport;
use tierbed_core::handover::Leases;
use tierbed_core::stats::IoStats;
use tierbed_core::{Budget, Error, Reservation, Result, RowKey, Schema, TableId};
use tierbed_io::{Device, EngineOptions, Folder, PAGE_BYTES};
use tierbed_kernels::Kernels;

use crate::apply::{Applying, Generation};
use crate::delta::holds;
use crate::forward_index::ForwardIndex;
use crate::layers::{Layers, LayersLease, PagePlace};
use crate::lookup::LookupStats;
use crate::manifest::Manifest;
use crate::open::{Opened, Room};
use crate::page::PageShape;
use crate::places::Places;
use crate::reader::{PageTable, Reader, Source};
use crate::readers::{ReaderGuard, Readers};
use crate::record::{RecordStats, Recorder};
use crate::refresh::{RefreshStats, Refresher};
use crate::tails::Tails;
use crate::tiers::{NeighbourStats, Neighbours, TierStack, TierStackOptions, TierSummary};
use crate::view::held_here;

/// How pages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// From the file, past the page cache where the file system allows it.
    #[default]
    Direct,
    /// Through the operating system's cache, whose pages lie outside the budget.
    Mmap,
    /// From a copy in memory, which counts against the budget.
    Memory,
}

impl Backend {
    /// Returns the one of `name`.
    ///
    /// # Errors
    /// `Invalid` naming those there are.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "direct" => Ok(Self::Direct),
            "mmap" => Ok(Self::Mmap),
            "memory" => Ok(Self::Memory),
            other => Err(Error::invalid("unknown snapshot backend")
                .with("found", other)
                .with("allowed", "direct, mmap, memory")),
        }
    }
}

/// How the pages of rows with several are chosen and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectOptions {
    /// How pages are chosen.
    pub selection: Selection,
    /// Most pages of a row that are chosen among; `None`: all.
    pub index_limit: Option<u32>,
    /// Each page is read as soon as it is chosen; otherwise all are chosen first.
    pub is_pipelined: bool,
}

impl Default for SelectOptions {
    /// One pass over at most ten pages of a row, pipelined: what MaxEmbed §8 runs with.
    fn default() -> Self {
        Self { selection: Selection::OnePass, index_limit: Some(10), is_pipelined: true }
    }
}

/// How to open a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// Bytes for everything this snapshot keeps in memory.
    pub dram_budget_bytes: u64,
    /// The I/O engine of each reader; buffers are pages, the depth shrinks in small budgets and
    /// adapts to the device below that.
    pub engine: EngineOptions,
    /// How pages are read.
    pub backend: Backend,
    /// Lookups that may run at once. One for each processor may be of any size, the others are for
    /// small calls; fewer in small budgets.
    pub reader_count: usize,
    /// How the pages of rows with several are chosen.
    pub select: SelectOptions,
    /// Most bytes of the row cache; `None`: what the rest of the budget allows.
    pub cache_bytes_max: Option<u64>,
    /// For measurements of [`Backend::Mmap`]: read by a map, with at most so many bytes of pages in
    /// memory besides the budget. `u64::MAX`: as many as the system likes. A file
    /// that is cut short then ends the process.
    pub mapped_bytes_max: Option<u64>,
    /// What the row cache is made of, and what misses do.
    pub tiers: TierStackOptions,
}

/// Lookups that may run at once where nothing else is said: they wait for the disk.
const READER_COUNT: usize = 8;

/// Returns how many lookups of any size may run at once: what computes needs a processor.
pub(crate) fn full_reader_count() -> usize {
    std::thread::available_parallelism().map_or(4, |count| count.get().min(READER_COUNT))
}

impl Default for SnapshotOptions {
    fn default() -> Self {
        Self {
            dram_budget_bytes: 256 << 20,
            engine: EngineOptions::default(),
            backend: Backend::default(),
            reader_count: full_reader_count().max(READER_COUNT),
            select: SelectOptions::default(),
            cache_bytes_max: None,
            mapped_bytes_max: None,
            tiers: TierStackOptions::default(),
        }
    }
}

/// A published snapshot. Read-only; shared by threads.
#[derive(Debug)]
pub struct Snapshot {
    folder: Arc<dyn Folder>,
    manifest: Manifest,
    pages: Arc<dyn Device>,
    page_table: PageTable,
    index: ForwardIndex,
    tails: Tails,
    index_bytes: u64,
    places: Places,
    places_bytes: u64,
    select: SelectOptions,
    tiers: TierStack,
    readers: Readers,
    totals: Mutex<(u64, LookupStats)>,
    kernels: Kernels,
    pub(crate) recorder: OnceLock<Recorder>,
    refresher: Option<Refresher>,
    layers: Arc<Leases<Layers>>,
    applying: Applying,
    budget: Budget,
    _reservations: Vec<Reservation>,
}

/// What a snapshot did since it was opened.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SnapshotStats {
    /// Lookups answered.
    pub lookup_count: u64,
    /// All lookups together.
    pub lookups: LookupStats,
    /// Rows asked of the cache and found, in whichever tier.
    pub cache_hits: u64,
    /// Rows asked of the cache and found in no tier.
    pub cache_misses: u64,
    /// Rows that left the cache.
    pub cache_evictions: u64,
    /// Rows in the cache.
    pub cache_rows: u64,
    /// Bytes of the cache's rows and metadata.
    pub cache_used_bytes: u64,
    /// Bytes the cache may use.
    pub cache_capacity_bytes: u64,
    /// Bytes of the rows that are always in memory.
    pub resident_bytes: u64,
    /// The tiers of the cache, the first asked first.
    pub tiers: Vec<TierSummary>,
    /// Readers made so far: lookups that ran at once.
    pub reader_count: u64,
    /// Why no more could be made, if one could not.
    pub reader_error: Option<String>,
    /// Pages a reader lets fly at once at most; the largest of all readers.
    pub queue_depth: u32,
    /// What the engines did.
    pub io: IoStats,
    /// Queries recorded for placements, where they are.
    pub recorded: Option<RecordStats>,
    /// Approximate answers that were followed by a read, where they are.
    pub refreshed: Option<RefreshStats>,
    /// Rows that left the cache and whose neighbours answer, where they do.
    pub neighbours: Option<NeighbourStats>,
    /// The deltas that it answers from, where it does.
    pub generation: Generation,
}

/// What a snapshot holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Rows stored.
    pub row_count: u64,
    /// Pages.
    pub page_count: u64,
    /// Bytes of the page file.
    pub pages_bytes: u64,
    /// Bytes of the files of the forward index, that of tails included.
    pub index_bytes: u64,
    /// Bytes of rows, as they are coded, per byte of the page file.
    pub fill_ratio: f64,
    /// The tables, in id order.
    pub tables: Vec<TableSummary>,
    /// Tables that share pages, by placement.
    pub placements: Vec<PlacementSummary>,
    /// Names and bytes of the attachments.
    pub attachments: Vec<(String, u64)>,
}

/// What a snapshot holds of one placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlacementSummary {
    /// Ids of its tables.
    pub tables: Vec<u32>,
    /// Pages the tables share.
    pub page_count: u64,
    /// Rows on all pages, each as often as it is there.
    pub seat_count: u64,
    /// Bytes of the index in memory.
    pub memory_bytes: u64,
}

/// What a snapshot holds of one table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableSummary {
    /// Its name.
    pub name: String,
    /// Elements per row.
    pub dim: u32,
    /// How its rows are kept on pages.
    pub codec: &'static str,
    /// Rows the table has.
    pub row_count: u64,
    /// Rows stored; the others have their initial values.
    pub stored_rows: u64,
    /// Pages of its own; 0 where it shares pages.
    pub page_count: u64,
    /// Stored rows that have entries in the index, the others lie by id; `None`: all have.
    pub head_rows: Option<u64>,
}

impl Snapshot {
    /// Opens the snapshot in `folder`.
    ///
    /// # Errors
    /// `Invalid` when the folder holds no whole snapshot or the budget is too small (naming the
    /// minimum), `Corruption` when manifest or index are not what was written.
    pub fn open(folder: Arc<dyn Folder>, options: &SnapshotOptions) -> Result<Self> {
        let opened = Self::open_any(folder, options)?;
        opened.manifest.check_whole()?;
        Ok(opened)
    }

    /// Opens another snapshot in the memory of this one, which goes on answering: the cache gives
    /// what is not free. The other one's cache has `cache_share` of the memory that is left for
    /// rows, until this one is closed and [`grow_cache`](Self::grow_cache) is called.
    ///
    /// # Errors
    /// As [`open`](Self::open); `Invalid` also when both do not fit the budget, naming what is
    /// missing. This one has its cache again then.
    pub fn open_beside(
        &self,
        folder: Arc<dyn Folder>,
        options: &SnapshotOptions,
        cache_share: f64,
    ) -> Result<Self> {
        let dram_budget_bytes = self.budget.limit_bytes();
        let options = SnapshotOptions { dram_budget_bytes, ..options.clone() };
        let room = Room::Beside { snapshot: self, cache_share };
        let opened = Self::open_in(folder, &options, room);
        let opened = opened.and_then(|opened| opened.manifest.check_whole().map(|()| opened));
        if opened.is_err() {
            self.grow_cache()?;
        }
        opened
    }

    /// Opens the snapshot or the delta in `folder`; the rows of a delta are those that changed.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_any(folder: Arc<dyn Folder>, options: &SnapshotOptions) -> Result<Self> {
        Self::open_in(folder, options, Room::Own)
    }

    fn open_in(folder: Arc<dyn Folder>, options: &SnapshotOptions, room: Room<'_>) -> Result<Self> {
        let manifest = Manifest::read(folder.as_ref())?;
        let opened = Opened::new(folder.as_ref(), &manifest, options, room)?;
        let page_table = PageTable::new(&manifest, &opened.places, opened.pages.name())?;
        let layers = Arc::new(Leases::new(Layers::alone(&manifest.schema, &manifest.identity()?)));
        Ok(Self {
            folder,
            manifest,
            pages: opened.pages,
            page_table,
            index: opened.index,
            tails: opened.tails,
            index_bytes: opened.index_bytes,
            places: opened.places,
            places_bytes: opened.places_bytes,
            select: options.select,
            tiers: opened.tiers,
            readers: opened.readers,
            totals: Mutex::default(),
            kernels: Kernels::detect(),
            recorder: OnceLock::new(),
            refresher: opened.refresher,
            layers,
            applying: Applying::new(opened.cache, opened.cache_bytes_max, opened.backing),
            budget: opened.budget,
            _reservations: opened.reservations,
        })
    }

    /// Returns the tables as the snapshot has them, whatever deltas were applied. Their optimizer
    /// is SGD: snapshots hold weights only.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.manifest.schema
    }

    /// Returns the manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns what tells this snapshot from every other.
    ///
    /// # Errors
    /// As [`Manifest::encode`].
    pub fn identity(&self) -> Result<String> {
        self.manifest.identity()
    }

    /// Returns the snapshot's folder.
    #[must_use]
    pub fn folder(&self) -> &Arc<dyn Folder> {
        &self.folder
    }

    /// Returns what the snapshot holds.
    #[must_use]
    pub fn inspect(&self) -> Summary {
        let manifest = &self.manifest;
        let tables = (0..).map(TableId).zip(manifest.schema.tables()).zip(&manifest.tables);
        let tables: Vec<_> = tables
            .map(|((id, schema), contents)| TableSummary {
                name: schema.name.clone(),
                dim: schema.dim,
                codec: manifest.codecs.of(id).name(),
                row_count: schema.row_count,
                stored_rows: contents.row_count,
                page_count: contents.page_count,
                head_rows: manifest.tail_of(id).map(|tail| tail.head_rows),
            })
            .collect();
        let pages_bytes = manifest.page_count * PAGE_BYTES as u64;
        let placed: &[_] = manifest.placed.as_ref().map_or(&[], |placed| &placed.placements);
        assert_eq!(placed.len(), self.places.placements.len(), "every placement has an index");
        let held = placed.iter().zip(&self.places.placements);
        let placements = held.map(|(info, held)| PlacementSummary {
            tables: info.tables.clone(),
            page_count: info.page_count,
            seat_count: info.seat_count,
            memory_bytes: held.index.memory_bytes(),
        });
        Summary {
            placements: placements.collect(),
            row_count: manifest.row_count,
            page_count: manifest.page_count,
            pages_bytes,
            index_bytes: self.index_bytes,
            fill_ratio: manifest.fill_ratio(),
            tables,
            attachments: manifest.attachments.iter().map(|a| (a.name.clone(), a.bytes)).collect(),
        }
    }

    /// Returns the bytes of the snapshot's files.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        let attachments: u64 = self.manifest.attachments.iter().map(|a| a.bytes).sum();
        let files = self.index_bytes + self.places_bytes;
        self.manifest.page_count * PAGE_BYTES as u64 + files + attachments
    }

    /// Returns the names of the attachments of what answers now, in order.
    #[must_use]
    pub fn attachment_names(&self) -> Vec<String> {
        self.view().attachment_names()
    }

    /// Reads attachment `name` of what answers now; `None` when there is none of that name.
    ///
    /// # Errors
    /// `Corruption` when the blob is missing or not what was attached, `Io` from the folder.
    pub fn attachment(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.view().attachment(name)
    }

    /// Puts rows into the first tier of the cache, those to be kept longest last: a cache need not
    /// begin empty. `rows` holds the weights of `keys` one after the other.
    ///
    /// The caller answers for the weights: they are not compared with what is stored.
    ///
    /// # Errors
    /// `Invalid` when the weights are not as many as the keys have.
    pub fn preload(&self, keys: &[RowKey], rows: &[f32]) -> Result<()> {
        self.tiers.preload(keys, rows)
    }

    /// Returns what was counted since the snapshot was opened.
    #[must_use]
    pub fn stats(&self) -> SnapshotStats {
        let tiers = self.tiers.stats();
        let sum = |field: fn(&TierSummary) -> u64| tiers.iter().map(field).sum::<u64>();
        let neighbours = self.tiers.neighbours().map(Neighbours::stats);
        let (lookup_count, lookups) = *lock(&self.totals);
        let readers = self.readers.stats();
        SnapshotStats {
            lookup_count,
            lookups,
            cache_hits: sum(|tier| tier.hits),
            // What one tier lacks the next is asked for.
            cache_misses: tiers.last().map_or(0, |tier| tier.misses),
            cache_evictions: sum(|tier| tier.evictions),
            cache_rows: sum(|tier| tier.row_count),
            cache_used_bytes: sum(|tier| tier.data_bytes + tier.metadata_bytes)
                + neighbours.as_ref().map_or(0, |held| held.used_bytes),
            cache_capacity_bytes: sum(|tier| tier.capacity_bytes)
                + neighbours.as_ref().map_or(0, |held| held.capacity_bytes),
            resident_bytes: self.tiers.resident_bytes(),
            tiers,
            reader_count: readers.reader_count,
            reader_error: readers.error,
            queue_depth: readers.queue_depth,
            io: readers.io,
            recorded: self.record_stats(),
            refreshed: self.refresh_stats(),
            neighbours,
            generation: self.generation(),
        }
    }

    /// Returns how the budget is divided.
    #[must_use]
    pub fn budget_report(&self) -> BudgetReport {
        self.budget.report()
    }

    /// Tells where a row of the schema of `layers` lies.
    pub(crate) fn place_of(&self, key: RowKey, layers: &Layers) -> Result<Place> {
        if let Some(place) = layers.find(key) {
            return Ok(place);
        }
        // Tables grow, and new ones come.
        if !holds(self.schema(), key) {
            return Ok(Place::Nowhere);
        }
        if let Some((placement, item)) = self.places.starts.find(key) {
            let is_there = self.places.at(placement).index.is_present(item);
            return Ok(if is_there { Place::Item { placement, item } } else { Place::Nowhere });
        }
        let page = self.own_page_of(key)?;
        let place = |page_id| Place::Page(PagePlace { layer: 0, page_id });
        Ok(page.map_or(Place::Nowhere, place))
    }

    /// Tells whether a row is stored, or has other than its initial weights by a delta.
    ///
    /// # Errors
    /// `Corruption` when the index is not what was written.
    pub fn holds_row(&self, key: RowKey) -> Result<bool> {
        Ok(self.place_of(key, &self.layers())? != Place::Nowhere)
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    pub(crate) fn pages(&self) -> &dyn Device {
        self.pages.as_ref()
    }

    pub(crate) fn index_bytes(&self) -> u64 {
        self.index_bytes
    }

    pub(crate) fn source<'a>(&'a self, layers: &'a Layers) -> Source<'a> {
        Source { pages: &self.page_table, places: &self.places, options: self.select, layers }
    }

    /// Leases what answers now; on a thread that holds on to a view, that.
    pub(crate) fn layers(&self) -> LayersLease {
        held_here(&self.layers).unwrap_or_else(|| LayersLease::of(&self.layers))
    }

    pub(crate) fn leases(&self) -> &Arc<Leases<Layers>> {
        &self.layers
    }

    pub(crate) fn applying(&self) -> &Applying {
        &self.applying
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Lets readers that nobody uses read the pages of `layers` and of no other.
    pub(crate) fn attach_idle(&self, layers: &Layers) {
        self.readers.attach_idle(layers);
        if let Some(refresher) = &self.refresher {
            refresher.attach(layers);
        }
    }

    /// Returns the first page of a row of the snapshot's schema whose table has pages of its own;
    /// `None` when the snapshot does not store it.
    pub(crate) fn own_page_of(&self, key: RowKey) -> Result<Option<u64>> {
        match self.tails.get(key) {
            Some(page) => page,
            None => self.index.get(key),
        }
    }

    pub(crate) fn tails(&self) -> &Tails {
        &self.tails
    }

    pub(crate) fn tiers(&self) -> &TierStack {
        &self.tiers
    }

    pub(crate) fn refresher(&self) -> Option<&Refresher> {
        self.refresher.as_ref()
    }

    pub(crate) fn kernels(&self) -> Kernels {
        self.kernels
    }

    pub(crate) fn page_table(&self) -> &PageTable {
        &self.page_table
    }

    /// Returns how the row's table is cut into pages; the row was checked at the door.
    pub(crate) fn shape<'a>(&'a self, key: RowKey, layers: &'a Layers) -> &'a PageShape {
        let table = layers.page_table().unwrap_or(&self.page_table);
        table.shape(key.table)
    }

    pub(crate) fn dim(&self, key: RowKey, layers: &Layers) -> usize {
        self.shape(key, layers).dim
    }

    /// Returns the words that the code of a row takes.
    pub(crate) fn code_words(&self, key: RowKey, layers: &Layers) -> usize {
        self.shape(key, layers).row_bytes.div_ceil(size_of::<f32>())
    }

    pub(crate) fn count(&self, stats: &LookupStats) {
        let mut totals = lock(&self.totals);
        totals.0 += 1;
        totals.1.add(stats);
    }

    /// Takes a full reader, waiting for one if all are busy.
    pub(crate) fn take_reader(&self) -> ReaderGuard<'_> {
        self.readers.take()
    }

    /// Takes a reader that is free now for a call of `index_count` indices.
    pub(crate) fn try_take_reader_for(&self, index_count: usize) -> Option<ReaderGuard<'_>> {
        self.readers.try_take_for(index_count)
    }

    /// Takes an asynchronous reader that is free now.
    pub(crate) fn try_take_async(&self) -> Option<Box<Reader>> {
        self.readers.try_take_async()
    }

    /// Takes an asynchronous reader back.
    pub(crate) fn take_back_async(&self, reader: Box<Reader>) {
        self.readers.take_back_async(reader);
    }

    /// Takes a reader for a call of `index_count` indices.
    pub(crate) fn take_reader_for(&self, index_count: usize) -> ReaderGuard<'_> {
        self.readers.take_for(index_count)
    }
}

/// Where a row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Not stored: it has its initial value.
    Nowhere,
    /// Starts on this page of its table's own.
    Page(PagePlace),
    /// On the pages of an item of a placement.
    Item {
        /// The placement.
        placement: u32,
        /// The row's number in it.
        item: u32,
    },
}

// Counters are whole after every statement, so a panic elsewhere while a lock was held leaves
// nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
