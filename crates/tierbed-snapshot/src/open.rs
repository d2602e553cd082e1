//! Opening of a snapshot: checks of the files' lengths, and division of the memory budget.
//!
//! The forward index is needed whole. Of what is left, half at most goes to readers, each with
//! I/O buffers and a scratch, and the rest to the row cache. Everything is sized from what is
//! left, so that the minimum named in an error is enough.

use std::sync::Arc;

use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_io::{
    CachedDevice, Device, EngineChoice, EngineOptions, Folder, MemoryDevice, MmapDevice, OpenMode,
    PAGE_BYTES,
};

use crate::blocks::BUFFER_BYTES;
use crate::forward_index::{ForwardIndex, IndexShape};
use crate::manifest::{Manifest, INDEX_NAME, PAGES_NAME, PLACES_NAME, TAILS_NAME};
use crate::places::{places_blocks, Places, PlacesMemory};
use crate::reader::{Reader, CHOICE_BYTES_PER_ROW};
use crate::readers::{Maker, Readers};
use crate::refresh::{RefreshOptions, Refresher};
use crate::scratch::{Scratch, ScratchShape};
use crate::snapshot::{full_reader_count, Backend, Snapshot, SnapshotOptions};
use crate::tails::{TailShapes, Tails};
use crate::tiers::{resident_bytes, CacheBytes, TierStack};

const SCRATCH_BYTES_MIN: u64 = 64 << 10;
const SCRATCH_BYTES_MAX: u64 = 8 << 20;
const QUEUE_DEPTH_MIN: u32 = 4;
/// A call on the calling thread has one page in flight; a few buffers are plenty.
const INLINE_QUEUE_DEPTH: u32 = 8;
/// Pages copied at once into memory.
const COPY_PAGES: usize = 64;

/// The parts of an open snapshot that take memory.
pub(crate) struct Opened {
    pub(crate) pages: Arc<dyn Device>,
    pub(crate) index: ForwardIndex,
    pub(crate) tails: Tails,
    /// Those of both files.
    pub(crate) index_bytes: u64,
    pub(crate) places: Places,
    pub(crate) places_bytes: u64,
    pub(crate) tiers: TierStack,
    pub(crate) readers: Readers,
    pub(crate) refresher: Option<Refresher>,
    pub(crate) budget: Budget,
    /// That of the tiers.
    pub(crate) cache: Reservation,
    /// What the tiers may grow to.
    pub(crate) cache_bytes_max: u64,
    pub(crate) backing: Backing,
    pub(crate) reservations: Vec<Reservation>,
}

/// Where the memory of a snapshot comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Room<'a> {
    /// A budget of its own.
    Own,
    /// That of another one, whose cache gives what is not free.
    Beside {
        /// The other one.
        snapshot: &'a Snapshot,
        /// Part of the memory left for rows that this one gets at first.
        cache_share: f64,
    },
}

impl Room<'_> {
    fn budget(self, options: &SnapshotOptions) -> Budget {
        match self {
            Self::Own => Budget::new(options.dram_budget_bytes),
            Self::Beside { snapshot, .. } => snapshot.budget().clone(),
        }
    }

    fn reserve(self, budget: &Budget, part: &'static str, bytes: u64) -> Result<Reservation> {
        match self {
            Self::Own => budget.reserve(part, bytes),
            Self::Beside { snapshot, .. } => snapshot.make_room(part, bytes),
        }
    }

    /// Returns the part of `left_bytes` that readers may be cut from: another one has its own.
    fn readers_bytes(self, left_bytes: u64) -> u64 {
        match self {
            Self::Own => left_bytes,
            Self::Beside { .. } => left_bytes / 2,
        }
    }

    /// Returns what the tiers have, of at most `most_bytes`.
    fn cache_bytes(self, budget: &Budget, most_bytes: u64) -> CacheBytes {
        match self {
            Self::Own => {
                let bytes = budget.free_bytes().min(most_bytes);
                CacheBytes { now: bytes, most: bytes }
            }
            Self::Beside { snapshot, cache_share } => {
                let left_bytes = budget.free_bytes() + snapshot.cache().bytes();
                let bytes = (left_bytes as f64 * cache_share) as u64;
                CacheBytes { now: bytes.min(most_bytes), most: most_bytes }
            }
        }
    }
}

/// How pages are read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backing {
    backend: Backend,
    mapped_bytes_max: Option<u64>,
}

impl Backing {
    fn of(options: &SnapshotOptions) -> Self {
        Self { backend: options.backend, mapped_bytes_max: options.mapped_bytes_max }
    }

    /// Returns the bytes of pages in memory.
    pub(crate) fn copied_bytes(self, page_count: u64) -> u64 {
        if self.backend == Backend::Memory {
            page_count * PAGE_BYTES as u64
        } else {
            0
        }
    }
}

/// Opens the page file of `folder` and checks its length.
pub(crate) fn open_pages(
    folder: &dyn Folder,
    page_count: u64,
    backing: Backing,
) -> Result<Arc<dyn Device>> {
    let file = open_whole(folder, PAGES_NAME, page_count)?;
    match backing.backend {
        Backend::Direct => Ok(file),
        Backend::Mmap => map_pages(folder, backing.mapped_bytes_max),
        Backend::Memory => copy_pages(file.as_ref(), page_count),
    }
}

impl Opened {
    pub(crate) fn new(
        folder: &dyn Folder,
        manifest: &Manifest,
        options: &SnapshotOptions,
        room: Room<'_>,
    ) -> Result<Self> {
        check_tiers(options)?;
        let (shape, tail_shapes) = (manifest.index_shape()?, manifest.tail_shapes()?);
        let word_bytes = shape.word_bytes() + tail_shapes.memory_bytes();
        let places_memory = PlacesMemory::of(manifest)?;
        let index_device = open_whole(folder, INDEX_NAME, shape.block_count())?;
        let file = open_whole(folder, PAGES_NAME, manifest.page_count)?;
        let backing = Backing::of(options);
        let copied_bytes = backing.copied_bytes(manifest.page_count);
        let kept_bytes = resident_bytes(&options.tiers.resident);
        let index_needs = word_bytes + places_memory.held_bytes;
        let pages_needs = copied_bytes + kept_bytes;
        let left_bytes = options.dram_budget_bytes.saturating_sub(index_needs + pages_needs);
        let left_bytes = room.readers_bytes(left_bytes);
        let maker = ReaderMaker::new(options, left_bytes, manifest);
        // A first reader, over no pages yet, says what readers cost here.
        let reader_bytes = maker.make(0, &file, maker.overlaps)?.memory_bytes();
        let load_bytes = BUFFER_BYTES + places_memory.load_bytes;
        let needs = Needs { word_bytes, index_bytes: index_needs, pages_bytes: pages_needs };
        check_budget(options, needs, reader_bytes.max(load_bytes))?;

        let budget = room.budget(options);
        let reserve = |part, bytes| room.reserve(&budget, part, bytes);
        let mut reservations = vec![reserve("forward_index", word_bytes)?];
        let index_blocks = shape.block_count() + tail_shapes.block_count();
        let load = reserve("load", load_bytes)?;
        let index = load_index(shape, manifest, index_device.as_ref())?;
        let tails = load_tails(folder, manifest, tail_shapes)?;
        let (places, places_bytes) = load_places(folder, manifest, options)?;
        reservations.push(reserve("placement_index", places.memory_bytes())?);
        reservations.push(reserve("resident_rows", kept_bytes)?);
        drop(load);
        reservations.push(reserve("pages", copied_bytes)?);
        drop(file);
        let pages = open_pages(folder, manifest.page_count, backing)?;
        let (readers, bytes) = maker.make_all(options.reader_count, &pages, left_bytes)?;
        reservations.push(reserve("readers", bytes)?);
        let refresher = maker.make_refresher(&pages, manifest)?;
        let bytes = refresher.as_ref().map_or(0, Refresher::memory_bytes);
        reservations.push(reserve("refresh", bytes)?);
        let bytes = options.tiers.waiting_bytes(&manifest.schema);
        reservations.push(reserve("neighbours", bytes)?);
        let held_bytes: u64 = reservations.iter().map(Reservation::bytes).sum();
        let most_bytes = options.dram_budget_bytes.saturating_sub(held_bytes);
        let most_bytes = most_bytes.min(cache_bytes_max(options));
        let bytes = room.cache_bytes(&budget, most_bytes);
        let cache = reserve("row_cache", bytes.held(&options.tiers))?;
        let stored: Vec<u64> = manifest.tables.iter().map(|table| table.row_count).collect();
        let tiers = TierStack::new(&manifest.schema, &stored, &options.tiers, bytes)?;
        Ok(Self {
            pages,
            index,
            tails,
            index_bytes: index_blocks * PAGE_BYTES as u64,
            places,
            places_bytes,
            tiers,
            readers,
            refresher,
            budget,
            cache,
            cache_bytes_max: bytes.most,
            backing,
            reservations,
        })
    }
}

/// # Errors
/// `Invalid` for parts of the tiers that have no sense together.
fn check_tiers(options: &SnapshotOptions) -> Result<()> {
    if options.tiers.shared.is_some() && options.cache_bytes_max.is_some() {
        return Err(Error::invalid("a cache in a shared budget has no bytes of its own"));
    }
    options.tiers.check()
}

/// Most bytes of the tiers out of the snapshot's own budget.
fn cache_bytes_max(options: &SnapshotOptions) -> u64 {
    match options.tiers.shared {
        Some(_) => 0,
        None => options.cache_bytes_max.unwrap_or(u64::MAX),
    }
}

fn load_index(shape: IndexShape, manifest: &Manifest, device: &dyn Device) -> Result<ForwardIndex> {
    ForwardIndex::load(shape, manifest.page_count, device, manifest.index_crc32c)
}

/// Loads the index of tails, where tables have them.
fn load_tails(folder: &dyn Folder, manifest: &Manifest, shapes: TailShapes) -> Result<Tails> {
    let Some(tailed) = &manifest.tailed else { return Ok(Tails::default()) };
    let device = open_whole(folder, TAILS_NAME, shapes.block_count())?;
    Tails::load(shapes, device.as_ref(), tailed.tails_crc32c)
}

/// Loads the placements' indexes; returns them and the bytes of their file.
fn load_places(
    folder: &dyn Folder,
    manifest: &Manifest,
    options: &SnapshotOptions,
) -> Result<(Places, u64)> {
    let Some(placed) = &manifest.placed else { return Ok((Places::default(), 0)) };
    let block_count = places_blocks(&manifest.schema, placed)?;
    let device = open_whole(folder, PLACES_NAME, block_count)?;
    let index_limit = options.select.index_limit;
    let places = Places::load(&manifest.schema, placed, device.as_ref(), index_limit)?;
    Ok((places, block_count * PAGE_BYTES as u64))
}

/// How readers are made in what is left of a budget.
struct ReaderMaker<'a> {
    refresh: &'a RefreshOptions,
    engine: EngineOptions,
    scratch_bytes: u64,
    /// Whether lookups work on while pages fly. The next part does not know the rows of the one
    /// before, but for a cache.
    overlaps: bool,
    scratch: ScratchShape,
}

impl<'a> ReaderMaker<'a> {
    fn new(options: &'a SnapshotOptions, left_bytes: u64, manifest: &Manifest) -> Self {
        let dims = manifest.schema.tables().iter().map(|table| table.dim);
        let row_words_max = dims.max().unwrap_or(1) as usize;
        let share = left_bytes / 8;
        let mut engine = EngineOptions { buf_bytes: PAGE_BYTES, ..options.engine.clone() };
        if options.backend != Backend::Direct {
            engine.choice = EngineChoice::Inline;
            engine.queue_depth = engine.queue_depth.min(INLINE_QUEUE_DEPTH);
        }
        // A page in flight may cost a thread's stack besides its buffer.
        let depth_max = u32::try_from(share / (16 * PAGE_BYTES as u64)).unwrap_or(u32::MAX);
        if engine.queue_depth > QUEUE_DEPTH_MIN {
            engine.queue_depth = engine.queue_depth.min(depth_max).max(QUEUE_DEPTH_MIN);
        }
        let scratch_bytes = share.clamp(SCRATCH_BYTES_MIN, SCRATCH_BYTES_MAX);
        let choice_bytes_per_row = if manifest.placed.is_some() { CHOICE_BYTES_PER_ROW } else { 0 };
        let tier_count = options.tiers.tiers.len();
        let refresh = &options.tiers.refresh;
        Self {
            refresh,
            overlaps: options.backend == Backend::Direct
                && tier_count > 0
                && options.cache_bytes_max != Some(0),
            engine,
            scratch_bytes,
            scratch: ScratchShape { row_words_max, choice_bytes_per_row, tier_count },
        }
    }

    /// Makes what reads rows that were answered approximately, if any are.
    fn make_refresher(
        &self,
        pages: &Arc<dyn Device>,
        manifest: &Manifest,
    ) -> Result<Option<Refresher>> {
        if self.refresh.tables.is_empty() {
            return Ok(None);
        }
        // It is never lent, so its number counts for nothing.
        let reader = self.make(usize::MAX, pages, false)?;
        Refresher::new(&manifest.schema, self.refresh, reader).map(Some)
    }

    /// Makes the readers for `count` lookups at once in half of `left_bytes`, at least one; returns
    /// them and the bytes of all, small ones that are not made yet included.
    fn make_all(
        &self,
        count: usize,
        pages: &Arc<dyn Device>,
        left_bytes: u64,
    ) -> Result<(Readers, u64)> {
        let first = self.make(0, pages, self.overlaps)?;
        let fitting = usize::try_from(left_bytes / 2 / first.memory_bytes().max(1));
        let full_count = count.min(full_reader_count()).min(fitting.unwrap_or(usize::MAX)).max(1);
        let mut full = vec![first];
        for number in 1..full_count {
            full.push(self.make(number, pages, self.overlaps)?);
        }
        let small_count_max = count.saturating_sub(full_count);
        let mut maker = Maker::new(&self.engine, pages, self.scratch, small_count_max);
        let full_bytes: u64 = full.iter().map(Reader::memory_bytes).sum();
        let bytes = full_bytes + maker.fit(left_bytes.saturating_sub(full_bytes))?;
        Ok((Readers::new(full, maker), bytes))
    }

    fn make(&self, number: usize, pages: &Arc<dyn Device>, overlaps: bool) -> Result<Reader> {
        let bytes = if overlaps { self.scratch_bytes / 2 } else { self.scratch_bytes };
        let scratch = || Scratch::new(bytes, self.scratch);
        Reader::new(number, &self.engine, pages, scratch(), overlaps.then(scratch))
    }
}

/// An index of more than one part in so many of what is needed is worth making smaller.
const INDEX_SHARE: u64 = 4;

/// What a snapshot holds in memory beside readers and cache.
#[derive(Debug, Clone, Copy)]
struct Needs {
    /// Of the index, what names the page of a row.
    word_bytes: u64,
    /// That, and the indexes of placements.
    index_bytes: u64,
    /// Pages and resident rows.
    pages_bytes: u64,
}

fn check_budget(options: &SnapshotOptions, needs: Needs, reader_bytes: u64) -> Result<()> {
    let Needs { word_bytes, index_bytes, pages_bytes } = needs;
    let minimum_bytes = index_bytes + pages_bytes + reader_bytes.max(BUFFER_BYTES);
    if options.dram_budget_bytes >= minimum_bytes {
        return Ok(());
    }
    let error = Error::invalid("dram budget too small for this snapshot")
        .with("dram_budget_bytes", options.dram_budget_bytes)
        .with_minimum_bytes(minimum_bytes)
        .with("forward_index_bytes", index_bytes)
        .with("pages_and_resident_bytes", pages_bytes)
        .with("reader_bytes", reader_bytes);
    Err(match word_bytes > minimum_bytes / INDEX_SHARE {
        true => error.with(
            "remedy",
            format_args!(
                "raise dram_budget to at least {minimum_bytes} bytes, or publish with head_rows, \
                 which makes the index smaller"
            ),
        ),
        false => error
            .with("remedy", format_args!("raise dram_budget to at least {minimum_bytes} bytes")),
    })
}

/// Opens a file of `page_count` pages or blocks and checks its length.
fn open_whole(folder: &dyn Folder, name: &str, page_count: u64) -> Result<Arc<dyn Device>> {
    let device = folder.open(name, OpenMode::ReadOnly).map_err(|error| {
        Error::corruption("snapshot lacks a file").with("name", name).with("cause", error)
    })?;
    let (expected, found) = (page_count * PAGE_BYTES as u64, device.len_bytes()?);
    if expected != found {
        return Err(Error::corruption("snapshot file has the wrong length")
            .with("path", device.name())
            .with("expected_bytes", expected)
            .with("found_bytes", found)
            .with("remedy", "publish the snapshot again"));
    }
    Ok(device)
}

/// Opens the pages through the page cache; by a map only where its memory is bounded, as baselines
/// of measurements are: touching a map of a file that was cut short ends the process.
fn map_pages(folder: &dyn Folder, bytes_max: Option<u64>) -> Result<Arc<dyn Device>> {
    let Some(path) = folder.path() else {
        return Err(Error::unsupported("a folder in memory has no page cache")
            .with("remedy", "open the snapshot with the memory backend"));
    };
    let path = path.join(PAGES_NAME);
    Ok(Arc::new(match bytes_max {
        Some(u64::MAX) => MmapDevice::open(path)?,
        Some(bytes_max) => MmapDevice::open_bounded(path, bytes_max)?,
        None => return Ok(Arc::new(CachedDevice::open(path)?)),
    }))
}

fn copy_pages(file: &dyn Device, page_count: u64) -> Result<Arc<dyn Device>> {
    let memory = MemoryDevice::new(file.name());
    // At once, so that the copy takes no more memory than the pages.
    memory.set_len(page_count * PAGE_BYTES as u64)?;
    let mut buffer = tierbed_io::AlignedBuf::new(COPY_PAGES * PAGE_BYTES);
    for first in (0..page_count).step_by(COPY_PAGES) {
        let count = (page_count - first).min(COPY_PAGES as u64) as usize;
        let (bytes, _) = buffer.split_at_mut(count * PAGE_BYTES);
        file.read_at(first * PAGE_BYTES as u64, bytes)?;
        memory.write_at(first * PAGE_BYTES as u64, bytes)?;
    }
    Ok(Arc::new(memory))
}
