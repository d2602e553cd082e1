//! Pipeline of windows: rows come when they are needed and go where they are needed next.
//!
//! The current window and the [`RowMover`] own all rows between them, so storage work never meets
//! the rows that are trained on. The row mover works in small pieces between batches, or as a whole
//! on a thread of its own; it is handed over as a value, through a channel, so that no lock and
//! no order of memory accesses has to be thought about. What is computed is the same.

use std::sync::Arc;

use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result};

use super::extents::Chunk;
use super::row_mover::RowMover;
use super::size_class::{SizeClass, SizeClassStats};
use super::spans::{ListPlace, Spans};
use super::storage_thread::StorageThread;
use super::window_rows::{Home, Newest, Place, RowVisit, Spot, WindowRows};
use crate::planned::device::DeviceWindows;
use crate::planned::plan::EpochPlan;

/// Work per batch is this many quarters of an even share, so that reads have time to arrive.
const PACE_QUARTERS: usize = 5;

/// A batch makes good at most so many shares that batches before it left.
const OWED_PACES_MAX: usize = 2;

/// Why the row mover cannot be away: [`WindowPipeline::mover`] took it back.
const MOVER_IS_HERE: &str = "the row mover was taken back before";

/// What the storage side did and holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    pub(crate) rows: SizeClassStats,
    pub(crate) arena_bytes: u64,
    pub(crate) used_extents: u64,
    pub(crate) quarantined_extents: u64,
    pub(crate) file_bytes: u64,
    pub(crate) wait_count: u64,
    /// Memory of the lists of chunks.
    pub(crate) chunk_bytes: u64,
    pub(crate) io: IoStats,
}

impl Tally {
    fn of(mover: &RowMover) -> Self {
        let mut rows = SizeClassStats::default();
        let mut arena_bytes = 8 * mover.back.memory().len() as u64;
        for class in &mover.classes {
            rows.add(&class.stats());
            arena_bytes += class.lists().rows_bytes();
        }
        let chunk_count: usize = mover.buckets().map(|bucket| bucket.chunks.capacity()).sum();
        Self {
            rows,
            arena_bytes,
            used_extents: mover.extents.used_count().into(),
            quarantined_extents: mover.extents.quarantined_count().into(),
            file_bytes: mover.extents.file_bytes(),
            wait_count: mover.disk.wait_count(),
            chunk_bytes: (chunk_count * size_of::<Chunk>()) as u64,
            io: mover.disk.stats(),
        }
    }
}

/// All rows of a store, along a plan.
#[derive(Debug)]
pub(crate) struct WindowPipeline {
    pub(crate) plan: EpochPlan,
    pub(crate) homes: Vec<Home>,
    spans: Arc<Spans>,
    pub(crate) current: WindowRows,
    /// `None` while it is under way with the storage thread, and for ever after that one failed.
    mover: Option<Box<RowMover>>,
    storage: Option<StorageThread>,
    /// Rows to move per batch.
    pace_rows: usize,
    /// Rows that batches left, because moving them would have meant waiting.
    owed_rows: usize,
    /// As of the last time the row mover was here.
    tally: Tally,
    /// How often a window had to wait for the row mover.
    late_count: u64,
}

impl WindowPipeline {
    /// Joins the parts, with no window; [`resume`](Self::resume) must follow before training.
    /// With a storage thread, storage work is that thread's.
    pub(crate) fn new(
        mover: Box<RowMover>,
        current: WindowRows,
        storage: Option<StorageThread>,
    ) -> Self {
        Self {
            plan: mover.plan.clone(),
            homes: mover.homes.clone(),
            spans: Arc::clone(mover.splitter.spans()),
            tally: Tally::of(&mover),
            current,
            pace_rows: 0,
            owed_rows: 0,
            mover: Some(mover),
            storage,
            late_count: 0,
        }
    }

    /// Prepares window `number`; [`restore`](Self::restore) may follow, [`start`](Self::start)
    /// must.
    pub(crate) fn resume(&mut self, number: usize) -> Result<()> {
        assert!(number < self.plan.window_count(), "the plan has no window {number}");
        self.mover()?.resume(number)
    }

    /// Lets a record of a size class wait for what waits at `place` in a list.
    pub(crate) fn restore(&mut self, class: usize, place: ListPlace, record: &[u8]) -> Result<()> {
        self.mover()?.restore(class, place, record)
    }

    /// Begins the window that [`resume`](Self::resume) named.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.mover()?.work(usize::MAX, true)?;
        let Self { mover: Some(mover), current, .. } = self else { panic!("{MOVER_IS_HERE}") };
        std::mem::swap(current, &mut mover.back);
        // No window ended: no rows leave.
        mover.begin(current)?;
        self.send_off();
        Ok(())
    }

    /// Returns the row mover, waiting for it to come back if it is under way.
    ///
    /// # Errors
    /// Those of the storage work that the storage thread did.
    pub(crate) fn mover(&mut self) -> Result<&mut RowMover> {
        if self.mover.is_none() {
            let lost = || Error::corruption("the storage thread has ended");
            let storage = self.storage.as_mut().ok_or_else(lost)?;
            let (mover, is_late, result) = storage.take_back()?;
            self.late_count += u64::from(is_late);
            self.tally = Tally::of(&mover);
            self.mover = Some(mover);
            result?;
        }
        let lost = || Error::corruption("the storage thread has ended");
        self.mover.as_deref_mut().ok_or_else(lost)
    }

    /// Ends the current window and begins the next one, on `device` if it has the rows. Returns
    /// how many rows it has stepped.
    ///
    /// # Errors
    /// Those of the storage work of the window that ends, and of the device.
    pub(crate) fn advance(&mut self, device: Option<&dyn DeviceWindows>) -> Result<u64> {
        self.mover()?.work(usize::MAX, true)?;
        let Self { mover: Some(mover), current, .. } = self else { panic!("{MOVER_IS_HERE}") };
        let (ended, window_count) = (current.number, self.plan.window_count());
        let carried = std::mem::take(&mut mover.carried);
        let result = match device.filter(|_| current.newest() != Newest::Host) {
            Some(device) => mover.back.carry_on_device(current, &carried, device, &self.homes),
            None => mover.back.carry_all(current, &carried).map(|()| 0),
        };
        // Its memory is used again.
        mover.carried = carried;
        let row_count = result?;
        std::mem::swap(current, &mut mover.back);
        assert_eq!(current.number, (ended + 1) % window_count, "a window was left out");
        mover.begin(current)?;
        self.send_off();
        Ok(row_count)
    }

    // Lets the storage work begin: on the storage thread, or piece by piece from now on.
    fn send_off(&mut self) {
        let Some(mover) = self.mover.take() else { panic!("{MOVER_IS_HERE}") };
        assert_eq!(mover.current, self.current.number, "rows move for another window");
        self.tally = Tally::of(&mover);
        match &mut self.storage {
            Some(storage) => storage.send(mover),
            None => {
                let batch_count = (self.current.plan.batch_count() as usize).max(1);
                self.owed_rows = 0;
                self.pace_rows = 1 + mover.work_rows() * PACE_QUARTERS / 4 / batch_count;
                self.mover = Some(mover);
            }
        }
    }

    /// Does a batch's share of the storage work, without waiting for the device.
    ///
    /// # Errors
    /// `Corruption` for damaged chunks, otherwise the device's.
    pub(crate) fn pump(&mut self) -> Result<()> {
        if let (None, Some(mover)) = (&self.storage, self.mover.as_deref_mut()) {
            let rows = self.pace_rows + self.owed_rows.min(OWED_PACES_MAX * self.pace_rows);
            self.owed_rows = mover.work(rows, false)?;
        }
        Ok(())
    }

    /// Returns what was counted; with a storage thread, as of the last change of window.
    pub(crate) fn tally(&self) -> Tally {
        self.mover.as_deref().map_or_else(|| self.tally.clone(), Tally::of)
    }

    /// Returns the memory of the lists of chunks; with a storage thread, at the last change of
    /// window.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.tally().chunk_bytes
    }

    /// Returns how often training had to wait for storage, which includes waiting for a device
    /// that has no buffer left.
    pub(crate) fn wait_count(&self) -> u64 {
        let waits = if self.storage.is_some() { 0 } else { self.tally().wait_count };
        self.late_count + waits
    }

    /// Visits the rows of the current window, which wait for that very window.
    ///
    /// # Errors
    /// Those of `visit`.
    pub(crate) fn visit_current(&self, visit: &mut RowVisit<'_>) -> Result<()> {
        self.current.check_here();
        let table_count = self.current.plan.tables().len();
        assert!(table_count <= self.homes.len(), "a table of the window has no size class");
        let window = self.current.number as u32;
        for (table, entries) in self.current.plan.tables().iter().enumerate() {
            for entry in entries.first..entries.first + entries.count {
                let place = Place { window, entry };
                let spot = Spot { table, waits_for: place, known_as: place };
                visit(spot, self.current.record(entry))?;
            }
        }
        Ok(())
    }

    /// Returns the size classes, for a checkpoint or a scan; after [`mover`](Self::mover).
    ///
    /// # Panics
    /// While the row mover is with the storage thread.
    pub(crate) fn classes(&self) -> &[SizeClass] {
        let Some(mover) = &self.mover else { panic!("{MOVER_IS_HERE}") };
        &mover.classes
    }

    /// Returns how many windows share a bucket while they are far; 0 when none do.
    pub(crate) fn span_windows(&self) -> usize {
        self.spans.span_windows()
    }

    pub(crate) fn spans(&self) -> &Spans {
        &self.spans
    }

    /// Returns the size class that the rows of `table` wait in.
    #[expect(clippy::indexing_slicing, reason = "tables are those of the plan")]
    pub(crate) fn home(&self, table: usize) -> Home {
        self.homes[table]
    }
}
