//! State of one table: ranges, delta rows, runs, extents.
//!
//! One counter, the *version*, numbers everything written to a table: runs and merges. A base
//! range holds what every run older than its own version says; newer runs win over it, and the
//! newest of them over the others.

#![expect(
    clippy::indexing_slicing,
    reason = "ranges come from the table's geometry or were checked against it on opening"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{ExtentPool, PageName, HEADER_BYTES, ROWS_MAGIC};
use tierbed_core::{Error, ErrorKind, Reservation, Result, TableSchema};
use tierbed_io::Device;

use crate::cold::cost::PageRun;
use crate::cold::disk::PageFile;
use crate::cold::geometry::Geometry;
use crate::cold::index::{DeltaIndex, RANGE_BYTES};
use crate::cold::run::Run;
use crate::cold::table_file::StoredTable;

/// Runs with a smaller share of newest versions are worth writing again: that frees at least two
/// bytes per three written.
const LIVE_SHARE: f64 = 0.6;
/// Extents a file grows by: few calls of `set_len`, little space ahead of use.
const GROW_EXTENTS: u32 = 16;
/// Extent number of a range that has no base.
const NOWHERE: u32 = u32::MAX;

/// Where a range's base is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BaseRange {
    extent: u32,
    /// When it was merged; 0 when never.
    pub(crate) version: u32,
    /// Bit per page: does it hold rows?
    pub(crate) pages: u64,
}

impl BaseRange {
    pub(crate) const NONE: Self = Self { extent: NOWHERE, version: 0, pages: 0 };

    pub(crate) fn new(extent: u32, version: u32, pages: u64) -> Self {
        Self { extent, version, pages }
    }

    pub(crate) fn extent(&self) -> Option<u32> {
        (self.extent != NOWHERE).then_some(self.extent)
    }

    pub(crate) fn has_page(&self, page: u64) -> bool {
        self.extent != NOWHERE && self.pages >> page & 1 == 1
    }
}

/// An extent that holds pieces of runs.
#[derive(Debug, Default)]
pub(crate) struct DeltaExtent {
    /// Newest versions of rows in it, and live runs with keys in it.
    live: u32,
    /// First page in the extent, and version of the run, ascending.
    parts: Vec<(u32, u32)>,
}

/// One table.
#[derive(Debug)]
pub(crate) struct ColdTable {
    pub(crate) id: u32,
    /// What its pages hold: see [`page_owner`](crate::page_owner).
    pub(crate) owner: u32,
    pub(crate) file: String,
    pub(crate) row_count: u64,
    pub(crate) geometry: Geometry,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) pages: PageFile,
    pub(crate) ranges: Vec<BaseRange>,
    pub(crate) index: DeltaIndex,
    pub(crate) extents: ExtentPool,
    pub(crate) runs: BTreeMap<u32, Run>,
    delta_extents: Vec<Option<Box<DeltaExtent>>>,
    /// The extent that the next run begins in, and its pages already taken.
    pub(crate) open: Option<(u32, u32)>,
    pub(crate) next_version: u32,
    /// Length of the file.
    pub(crate) file_extents: u32,
    /// Extents that the file grows by at a time.
    pub(crate) grow_extents: u32,
    pub(crate) is_dirty: bool,
    /// Extents may hold runs that are not counted yet.
    is_restoring: bool,
    base_count: u64,
    delta_extent_count: u64,
    memory: Reservation,
}

/// Parts of a table that only its opening knows.
pub(crate) struct TableParts {
    pub(crate) id: u32,
    pub(crate) owner: u32,
    pub(crate) file: String,
    pub(crate) geometry: Geometry,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) pages: PageFile,
    pub(crate) memory: Reservation,
}

impl ColdTable {
    /// Returns the memory of a table whose rows are all in their bases.
    pub(crate) fn memory_bytes(geometry: &Geometry) -> u64 {
        // The map of ranges, the lists of the index, two extents' bookkeeping, the commit file.
        let per_range = size_of::<BaseRange>() as u64 + RANGE_BYTES + 24 + 24;
        per_range * geometry.range_count() + 4096
    }

    /// Builds a table that holds no row.
    pub(crate) fn new(schema: &TableSchema, parts: TableParts) -> Self {
        let TableParts { id, owner, file, geometry, device, pages, memory } = parts;
        Self {
            id,
            owner,
            file,
            row_count: schema.row_count,
            geometry,
            device,
            pages,
            ranges: vec![BaseRange::NONE; geometry.range_count() as usize],
            index: DeltaIndex::new(geometry.range_count()),
            extents: ExtentPool::default(),
            runs: BTreeMap::new(),
            delta_extents: Vec::new(),
            open: None,
            next_version: 1,
            file_extents: 0,
            grow_extents: GROW_EXTENTS,
            is_dirty: false,
            is_restoring: false,
            base_count: 0,
            delta_extent_count: 0,
            memory,
        }
    }

    /// Makes the table as long as `schema` says; ranges keep their size.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach; nothing is changed then.
    pub(crate) fn grow(&mut self, schema: &TableSchema) -> Result<()> {
        assert!(schema.row_count >= self.row_count, "a table only grows");
        let geometry = Geometry::with_range_pages(schema, self.geometry.range_pages);
        self.memory.resize(Self::memory_bytes(&geometry))?;
        self.ranges.resize(geometry.range_count() as usize, BaseRange::NONE);
        self.index.grow(geometry.range_count());
        self.geometry = geometry;
        self.row_count = schema.row_count;
        Ok(())
    }

    /// Takes over what a commit says, and returns its runs, whose rows are still unknown. When
    /// they are, [`finish_restoring`](Self::finish_restoring) is to be called.
    pub(crate) fn restore(&mut self, stored: StoredTable) -> Vec<Run> {
        let bases = stored.bases.iter().filter_map(|(_, base)| base.extent());
        let used = bases.chain(stored.parts.iter().map(|(extent, _)| *extent));
        self.extents = ExtentPool::new(used);
        for (range, base) in &stored.bases {
            self.ranges[*range as usize] = *base;
        }
        self.base_count = stored.bases.len() as u64;
        for (extent, parts) in stored.parts {
            parts.iter().for_each(|(first, version)| self.add_part(extent, *first, *version));
        }
        self.open = stored.open;
        self.next_version = stored.next_version;
        self.file_extents = stored.file_extents;
        self.is_restoring = true;
        stored.runs
    }

    /// Gives back the extents that no run needed in the end.
    pub(crate) fn finish_restoring(&mut self) {
        self.is_restoring = false;
        for extent in 0..self.delta_extents.len() as u32 {
            let is_open = self.open.is_some_and(|(open, _)| open == extent);
            if !is_open && self.delta_extent(extent).is_some_and(|place| place.live == 0) {
                self.release_delta(extent);
            }
        }
    }

    pub(crate) fn record_bytes(&self) -> usize {
        self.geometry.layout.record_bytes
    }

    /// Bytes of keys or records that a page of a run holds.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.geometry.page_bytes() - HEADER_BYTES
    }

    pub(crate) fn range(&self, range: usize) -> BaseRange {
        self.ranges[range]
    }

    /// Names page `page` of `range`, as a base.
    pub(crate) fn base_name(&self, range: usize, page: u64, version: u32) -> PageName {
        let page = range as u64 * self.geometry.range_pages + page;
        PageName { magic: ROWS_MAGIC, owner: self.owner, page, generation: version }
    }

    /// Takes the next version.
    pub(crate) fn take_version(&mut self) -> Result<u32> {
        let version = self.next_version;
        self.next_version = version.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "table was written as often as its format can count")
                .with("file", &self.file)
                .with("remedy", "export the table and import it into a new store")
        })?;
        Ok(version)
    }

    /// Takes an extent and makes the file long enough for it.
    pub(crate) fn take_extent(&mut self) -> Result<u32> {
        let extent = self.extents.take(self.geometry.extents_max()).ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "table file has as many extents as it may")
                .with("extents", self.extents.count())
                .with("file", &self.file)
        })?;
        if extent >= self.file_extents {
            let wanted = (extent + 1).next_multiple_of(self.grow_extents);
            let len_bytes = u64::from(wanted) * self.geometry.extent_bytes() as u64;
            if let Err(error) = self.device.set_len(len_bytes) {
                self.extents.release(extent);
                return Err(error.with("file", &self.file));
            }
            // Writing where no block is yet is several times slower, one write after another;
            // where the file system cannot give blocks ahead, it is just that.
            let from = u64::from(self.file_extents) * self.geometry.extent_bytes() as u64;
            let _ = self.device.preallocate(from, len_bytes - from);
            self.file_extents = wanted;
        }
        self.is_dirty = true;
        Ok(extent)
    }

    /// Returns the version of the run that page `page` belongs to.
    pub(crate) fn version_of_page(&self, page: u32) -> Option<u32> {
        let extent = self.geometry.extent_of(page);
        let parts = &self.delta_extent(extent)?.parts;
        let at = page - self.geometry.first_page(extent);
        let after = parts.partition_point(|(first, _)| *first <= at);
        Some(parts[after.checked_sub(1)?].1)
    }

    fn delta_extent(&self, extent: u32) -> Option<&DeltaExtent> {
        self.delta_extents.get(extent as usize)?.as_deref()
    }

    /// Lists the extents that hold runs: number, and first page and version of each run in it.
    pub(crate) fn delta_parts(&self) -> impl Iterator<Item = (u32, &[(u32, u32)])> + '_ {
        let places = (0..).zip(&self.delta_extents);
        places.filter_map(|(extent, place)| Some((extent, place.as_ref()?.parts.as_slice())))
    }

    /// Makes `extent` one of runs, from page `first` of it on of run `version`.
    pub(crate) fn add_part(&mut self, extent: u32, first: u32, version: u32) {
        let at = extent as usize;
        if self.delta_extents.len() <= at {
            self.delta_extents.resize_with(at + 1, || None);
        }
        let place = &mut self.delta_extents[at];
        if place.is_none() {
            self.delta_extent_count += 1;
        }
        place.get_or_insert_default().parts.push((first, version));
    }

    /// Counts `count` more rows or keys that live in `extent`.
    ///
    /// # Panics
    /// When the extent holds no run.
    pub(crate) fn add_live(&mut self, extent: u32, count: u32) {
        let Some(place) = &mut self.delta_extents[extent as usize] else {
            panic!("extent {extent} of {} holds no run", self.file)
        };
        place.live += count;
    }

    /// Counts the row at `loc` out: it was written again or merged. An extent without live rows
    /// and keys, and a run without rows, are given back.
    pub(crate) fn kill(&mut self, loc: u32) {
        let (page, _) = self.geometry.delta_place(loc);
        // Before its extent goes, which may be with this row.
        let Some(version) = self.version_of_page(page) else {
            panic!("a delta row lies on page {page} of no run")
        };
        self.drop_live(self.geometry.extent_of(page));
        let Some(run) = self.runs.get_mut(&version) else {
            panic!("run {version} went before its rows")
        };
        assert!(run.live_rows > 0, "run {version} has fewer rows than leave it");
        run.live_rows -= 1;
        if run.live_rows == 0 {
            self.drop_run(version);
        }
    }

    /// Forgets a run without live rows: its keys are needed no more.
    pub(crate) fn drop_run(&mut self, version: u32) {
        let Some(run) = self.runs.remove(&version) else { panic!("run {version} goes twice") };
        assert_eq!(run.live_rows, 0, "run {version} goes and has live rows");
        for extent in key_extents(&self.geometry, &run) {
            self.drop_live(extent);
        }
    }

    fn drop_live(&mut self, extent: u32) {
        let Some(place) = &mut self.delta_extents[extent as usize] else {
            panic!("extent {extent} of {} holds no run", self.file)
        };
        assert!(place.live > 0, "fewer rows live in extent {extent} than leave it");
        place.live -= 1;
        let is_open = self.open.is_some_and(|(open, _)| open == extent);
        if place.live == 0 && !is_open && !self.is_restoring {
            self.release_delta(extent);
        }
    }

    fn release_delta(&mut self, extent: u32) {
        assert!(!self.is_restoring, "extents are given back when all runs are known");
        let place = self.delta_extents[extent as usize].take();
        assert!(place.is_some_and(|place| place.live == 0), "extent {extent} goes with rows in it");
        self.delta_extent_count -= 1;
        self.extents.release(extent);
    }

    /// Says where the next run begins; an extent left behind is given back when nothing lives
    /// in it.
    pub(crate) fn set_open(&mut self, open: Option<(u32, u32)>) {
        let fits = |(_, used): (u32, u32)| u64::from(used) <= self.geometry.range_pages;
        assert!(open.is_none_or(fits), "the open extent has pages left, or none");
        let before = std::mem::replace(&mut self.open, open);
        let Some((extent, _)) =
            before.filter(|(extent, _)| open.is_none_or(|new| new.0 != *extent))
        else {
            return;
        };
        if self.delta_extent(extent).is_some_and(|place| place.live == 0) {
            self.release_delta(extent);
        }
    }

    /// Puts a merged base in force; the one before is given back.
    pub(crate) fn set_base(&mut self, range: usize, base: BaseRange) {
        assert!(base.extent().is_some(), "a merged range has an extent");
        let before = std::mem::replace(&mut self.ranges[range], base);
        assert!(base.version > before.version, "range {range} goes back to {}", base.version);
        self.base_count += 1;
        if let Some(extent) = before.extent() {
            self.base_count -= 1;
            self.extents.release(extent);
        }
    }

    pub(crate) fn extent_bytes(&self) -> u64 {
        self.geometry.extent_bytes() as u64
    }

    /// Returns the bytes of the base ranges.
    pub(crate) fn base_bytes(&self) -> u64 {
        self.base_count * self.extent_bytes()
    }

    /// Returns the bytes of the extents that hold runs.
    pub(crate) fn delta_bytes(&self) -> u64 {
        self.delta_extent_count * self.extent_bytes()
    }

    /// Returns the bytes of the rows whose newest version is in a run.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.index.row_count() * self.record_bytes() as u64
    }

    /// Returns the bytes of all extents in use or in quarantine.
    pub(crate) fn disk_bytes(&self) -> u64 {
        u64::from(self.file_extents) * self.extent_bytes()
    }

    /// Returns how much longer the file gets by `more_bytes` of new extents.
    pub(crate) fn growth_bytes(&self, more_bytes: u64) -> u64 {
        let free = self.file_extents - self.extents.used_count();
        more_bytes.saturating_sub(u64::from(free) * self.extent_bytes())
    }
}

/// Lists the extents that hold keys of `run`, each once.
pub(crate) fn key_extents(geometry: &Geometry, run: &Run) -> Vec<u32> {
    let count = run.key_page_count(geometry.page_bytes() - HEADER_BYTES);
    let mut extents: Vec<_> =
        run.pages().take(count).map(|page| geometry.extent_of(page)).collect();
    extents.dedup();
    extents
}

impl ColdTable {
    /// Finds the run with most outdated rows among those of which they are a large share:
    /// version and outdated bytes.
    pub(crate) fn emptiest_run(&self) -> Option<(u32, u64)> {
        let is_empty =
            |run: &&Run| f64::from(run.live_rows) < LIVE_SHARE * f64::from(run.row_count);
        let dead_bytes = |run: &Run| {
            let dead_rows = u64::from(run.row_count - run.live_rows);
            dead_rows * self.record_bytes() as u64
        };
        let runs = self.runs.values().filter(is_empty);
        runs.map(|run| (run.version, dead_bytes(run))).max_by_key(|run| run.1)
    }
}

/// Cuts `count` pages from `first` on into runs of at most `max`.
pub(crate) fn cut(first: u32, count: u32, max: u32) -> impl Iterator<Item = PageRun> {
    assert!(max > 0, "a piece has pages");
    (0..count.div_ceil(max))
        .map(move |at| PageRun { first: first + at * max, count: max.min(count - at * max) })
}
