//! Row mover: all storage work between two changes of window.
//!
//! While window `k` is trained on, the rows of `k - 1` leave its memory for the lists of the
//! windows that need them next, and the same memory becomes window `k + 1`: rows that wait in
//! lists, rows of its bucket, rows never used. What `k + 1` shares with `k` is only noted, and
//! carried over when `k` ends ([`super::pipeline`]). The work is cut into small pieces, so that it
//! can be spread over the batches of a window, or done by another thread.
//!
//! ```text
//! Split ─▶ Leave ─▶ Load ─▶ Mark ─▶ Ask ─▶ Fill ─▶ Arrive ─▶ Initialise ─▶ Done
//! rows of  rows of  plan    rows    reads   rows    rows      rows never
//! a span   k - 1    k + 1   of k    start   waiting on disk   used
//! ```

#![expect(clippy::indexing_slicing, reason = "tables have a size class of their record length")]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::{Error, Result, Schema};
use tierbed_io::PAGE_BYTES;
use tierbed_kernels::init_record;

use super::disk::{Arrived, Disk};
use super::extents::{Bucket, Extents};
use super::size_class::{check_chunk, rows_of, Leaving, LeavingRows, Sink, SizeClass, ENTRY_BYTES};
use super::spans::ListPlace;
use super::split::Splitter;
use super::window_rows::{Home, Place, Presence, RowVisit, Spot, WindowRows};
use crate::planned::device::Carried;
use crate::planned::plan::{EpochPlan, PlanWindow, TableEntries};

/// Rows that leave at once: few enough to stay near, many enough to share a check for room.
pub(super) const PIECE_ROWS: usize = 256;
/// How many rows ahead the processor is asked to fetch a place.
const FETCH_AHEAD: usize = 6;

/// What comes next, and where in the window it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// A share of the rows of the span that comes goes to its windows, size class after size class.
    /// First, because what it has in memory can make no room for others.
    Split(usize),
    /// Rows of the window that ended leave, from this table and entry on.
    Leave(usize, usize),
    /// The memory becomes the window that comes.
    Load,
    /// Rows of the current window that come too are noted, from this table on.
    Mark(usize),
    /// The other reads of the bucket start, when the writes to it are done.
    Ask,
    /// Rows come from the lists, size class after size class.
    Fill(usize),
    /// Rows come from the bucket.
    Arrive,
    /// Rows that are nowhere get their initial value, from this table and entry on.
    Initialise(usize, usize),
    /// All rows are there but those the current window has.
    Done,
}

/// What of the next window's buckets has been asked for.
#[derive(Debug, Default)]
struct ReadAhead {
    class: usize,
    chunk: usize,
    /// Chunks of the buckets when the current window began; `None` when some were being written.
    chunks_known: Option<usize>,
}

/// The rows of a store that are not in the current window.
#[derive(Debug)]
pub(crate) struct RowMover {
    pub(crate) plan: EpochPlan,
    pub(crate) schema: Arc<Schema>,
    pub(crate) homes: Vec<Home>,
    pub(crate) classes: Vec<SizeClass>,
    pub(crate) disk: Disk,
    pub(crate) extents: Extents,
    /// The back buffer: the window that ended, until its rows have left; then the one that comes.
    pub(crate) back: WindowRows,
    /// Rows of the current window that [`back`](Self::back) waits for.
    pub(crate) carried: Vec<Carried>,
    pub(crate) stage: Stage,
    pub(super) current: usize,
    /// The window that is prepared.
    coming: usize,
    /// Until [`Stage::Mark`] is over.
    current_plan: Option<Arc<PlanWindow>>,
    ahead: ReadAhead,
    pub(super) arrived: Vec<Arrived>,
    leaving: Vec<Leaving>,
    pub(crate) splitter: Splitter,
}

/// The parts a row mover is made of.
pub(crate) struct RowMoverParts {
    pub(crate) plan: EpochPlan,
    pub(crate) schema: Arc<Schema>,
    pub(crate) homes: Vec<Home>,
    pub(crate) classes: Vec<SizeClass>,
    pub(crate) disk: Disk,
    pub(crate) extents: Extents,
    pub(crate) back: WindowRows,
    pub(crate) splitter: Splitter,
}

impl RowMover {
    /// Wraps the parts; [`resume`](Self::resume) must follow before training.
    pub(crate) fn new(parts: RowMoverParts) -> Self {
        let RowMoverParts { plan, schema, homes, classes, disk, extents, back, splitter } = parts;
        assert_eq!(homes.len(), schema.tables().len(), "every table has a size class");
        let is_home = |home: &Home| classes.get(home.class).map(SizeClass::words);
        let is_right = homes.iter().all(|home| is_home(home) == Some(home.words));
        assert!(is_right, "a table's size class has records of another length");
        Self {
            plan,
            schema,
            homes,
            classes,
            disk,
            extents,
            back,
            carried: Vec::new(),
            stage: Stage::Done,
            current: 0,
            coming: 0,
            current_plan: None,
            ahead: ReadAhead::default(),
            arrived: Vec::new(),
            leaving: Vec::with_capacity(PIECE_ROWS),
            splitter,
        }
    }

    /// Returns the bytes of the notes it keeps, for windows of at most `entries_max` entries.
    pub(crate) fn memory_bytes(entries_max: usize) -> u64 {
        // A checkpoint notes the rows between two windows, in their order, when nothing is carried.
        let note_bytes = size_of::<(Place, u32)>() + size_of::<Carried>();
        (note_bytes * entries_max + size_of::<Leaving>() * PIECE_ROWS) as u64
    }

    /// Begins the work of window `current`; the memory holds the window before it. Some reads
    /// start at once, so that they have time to arrive.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// When the work of the window before is not done.
    pub(crate) fn begin(&mut self, current: &WindowRows) -> Result<()> {
        assert_eq!(self.stage, Stage::Done, "window {} begins too early", current.number);
        assert_eq!(current.number, self.coming, "another window was prepared");
        self.current = current.number;
        self.coming = self.following();
        self.current_plan = Some(Arc::clone(&current.plan));
        self.stage = Stage::Split(0);
        for class in &mut self.classes {
            class.move_horizon(current.number);
        }
        self.disk.poll_writes()?;
        self.ahead = ReadAhead::default();
        // A read must not overtake a write of the same chunk: reads begin only where no write is in
        // flight, else in `ask`, when the writes are done.
        if self.disk.writes_in_flight() == 0 {
            self.ahead.chunks_known = Some(self.chunks_coming());
            // Rows that leave need buffers to be written from: half of them stay free.
            self.read_ahead(self.disk.depth() / 2);
            self.begin_split();
            self.disk.poll_writes()?;
        } else {
            self.begin_split();
        }
        Ok(())
    }

    fn chunks_coming(&self) -> usize {
        let chunks = |class: &SizeClass| class.bucket(self.coming).map_or(0, |b| b.chunks.len());
        self.classes.iter().map(chunks).sum()
    }

    /// Prepares window `number`, with no window before it: its rows come by
    /// [`restore`](Self::restore), wait in lists or its bucket, or were never used.
    pub(crate) fn resume(&mut self, number: usize) -> Result<()> {
        self.current = number;
        self.coming = number;
        self.ahead = ReadAhead::default();
        self.come(number)?;
        // No window is there to carry rows from.
        self.stage = Stage::Ask;
        Ok(())
    }

    /// Lets a record wait for what waits at `place` in a list; between
    /// [`resume`](Self::resume) and the first work.
    ///
    /// # Errors
    /// `Corruption` when there is no such list, otherwise those of the device.
    pub(crate) fn restore(&mut self, class: usize, place: ListPlace, record: &[u8]) -> Result<()> {
        assert_eq!(self.stage, Stage::Ask, "rows are restored before they move");
        let place = self.splitter.spans().place_in(place);
        let place = place.ok_or_else(|| Error::corruption("a row waits for no window"))?;
        if place.window as usize == self.current {
            return self.back.arrive_bytes(place.entry, record);
        }
        let now = self.current;
        self.keep(class, now, place, record)
    }

    /// Lets a record wait for `place`, in memory or on disk, while no window is trained on.
    pub(crate) fn distribute(&mut self, class: usize, place: Place, record: &[u8]) -> Result<()> {
        self.classes[class].forget_horizon();
        self.keep(class, 0, place, record)
    }

    fn keep(&mut self, class: usize, now: usize, place: Place, record: &[u8]) -> Result<()> {
        let class = &mut self.classes[class];
        let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
        class.keep(now, place, bytemuck::cast_slice(record), &mut sink)
    }

    fn following(&self) -> usize {
        (self.current + 1) % self.plan.window_count()
    }

    /// Returns about how many rows must be moved while the current window lasts.
    pub(crate) fn work_rows(&self) -> usize {
        let entries = |number: usize| -> usize {
            let counts = self.plan.counts().nth(number);
            let Some(counts) = counts else { panic!("the plan has no window {number}") };
            counts.iter().map(|&count| count as usize).sum()
        };
        // Noting a row costs about a quarter of moving it.
        self.back.plan.entry_count()
            + entries(self.current) / 4
            + entries(self.following())
            + self.split_rows()
    }

    /// Moves about `rows` rows on, or fewer where that would mean waiting and `may_wait` is false;
    /// returns how many are left of them, 0 when all is done.
    ///
    /// # Errors
    /// `Corruption` for a damaged plan or chunk, otherwise the device's. Rows may be lost then:
    /// nothing can go on from here.
    pub(crate) fn work(&mut self, mut rows: usize, may_wait: bool) -> Result<usize> {
        while rows > 0 {
            let moved = match self.stage {
                Stage::Leave(table, entry) => match self.leave(table, entry, may_wait)? {
                    Some(moved) => moved,
                    None => return Ok(rows),
                },
                Stage::Split(class) => match self.split(class, may_wait)? {
                    Some(moved) => moved,
                    None => return Ok(rows),
                },
                Stage::Load => self.load()?,
                Stage::Mark(table) => self.mark(table)?,
                Stage::Ask => match self.ask(may_wait)? {
                    true => 1,
                    false => return Ok(rows),
                },
                Stage::Fill(class) => self.fill(class, rows)?,
                Stage::Arrive => match self.arrive(may_wait)? {
                    true => 1,
                    false => return Ok(rows),
                },
                Stage::Initialise(table, entry) => self.initialise(table, entry, rows)?,
                Stage::Done => return Ok(0),
            };
            rows = rows.saturating_sub(moved.max(1));
        }
        // Before, the memory is not yet that of the window they are for.
        if matches!(self.stage, Stage::Fill(_) | Stage::Arrive) {
            self.take_arrivals(false)?;
        }
        Ok(0)
    }

    // A piece of the window that ended goes to the lists of other windows; none of it when that
    // would mean waiting and `may_wait` is false.
    fn leave(&mut self, at: usize, first: usize, may_wait: bool) -> Result<Option<usize>> {
        let plan = Arc::clone(&self.back.plan);
        let (Some(table), Some(home)) = (plan.tables().get(at), self.homes.get(at)) else {
            // All rows have left: the memory is free for the window that comes.
            self.stage = Stage::Load;
            return Ok(Some(0));
        };
        let class = &mut self.classes[home.class];
        let end = (first + PIECE_ROWS).min(table.count as usize);
        let start = self.back.table_start(at);
        let (spans, now) = (self.splitter.spans(), self.current);
        self.leaving.clear();
        note_leaving(&plan, table, first..end, self.current, |offset, to| {
            let start = start + offset * home.words;
            let ListPlace { list, entry } = spans.list_of(now, to);
            self.leaving.push(Leaving { start, list, entry });
            Ok(())
        })?;
        let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
        let rows = LeavingRows { rows: &self.leaving, arena: self.back.arena() };
        let kept = class.keep_all(self.current, rows, &mut sink, may_wait)?;
        if let Some(stuck) = self.leaving.get(kept) {
            // Goes on with this row: those before it are in lists and must not come twice.
            let offset = (stuck.start - start) / home.words;
            self.stage = Stage::Leave(at, offset);
            return Ok((kept > 0).then_some(offset - first));
        }
        self.stage = match end == table.count as usize {
            true => Stage::Leave(at + 1, 0),
            false => Stage::Leave(at, end),
        };
        Ok(Some(end - first))
    }

    fn load(&mut self) -> Result<usize> {
        self.come(self.coming)?;
        self.stage = Stage::Mark(0);
        Ok(0)
    }

    // The memory becomes window `number`.
    fn come(&mut self, number: usize) -> Result<()> {
        self.carried.clear();
        self.back.load(&self.plan, number, &self.homes)
    }

    // Notes which rows of one table the next window shares with the current one.
    fn mark(&mut self, at: usize) -> Result<usize> {
        let Some(plan) = &self.current_plan else { return Err(unplanned()) };
        let Some(table) = plan.tables().get(at) else {
            self.current_plan = None;
            self.stage = Stage::Ask;
            return Ok(0);
        };
        let next = plan.next_uses(table);
        for offset in 0..table.count {
            let (window, to) = next.get(offset as usize).ok_or_else(unplanned)?;
            if window == self.back.number {
                self.back.await_carried(to)?;
                self.carried.push(Carried { from: table.first + offset, to });
            }
        }
        self.stage = Stage::Mark(at + 1);
        Ok(table.count as usize / 4)
    }

    // Goes on reading the bucket; false while writes to it are under way.
    fn ask(&mut self, may_wait: bool) -> Result<bool> {
        // As many chunks as at the start: none was written to this bucket since, so nothing has to
        // be waited for.
        let is_known = self.ahead.chunks_known == Some(self.chunks_coming());
        if !is_known && !self.disk.writes_done(may_wait)? {
            return Ok(false);
        }
        self.read_ahead(usize::MAX);
        self.disk.poll(&mut self.arrived)?;
        self.stage = Stage::Fill(0);
        Ok(true)
    }

    fn fill(&mut self, at: usize, rows_max: usize) -> Result<usize> {
        let Some(class) = self.classes.get_mut(at) else {
            self.stage = Stage::Arrive;
            return Ok(0);
        };
        let sent = class.send_waiting(&mut self.back, rows_max)?;
        if sent < rows_max {
            self.stage = Stage::Fill(at + 1);
        }
        Ok(sent)
    }

    /// Asks for as much of the coming window's buckets as there are buffers, while fewer than
    /// `reads_max` reads are in flight.
    fn read_ahead(&mut self, reads_max: usize) {
        let window = self.coming;
        while let Some(class) = self.classes.get(self.ahead.class) {
            if self.disk.reads_in_flight() >= reads_max {
                return;
            }
            let chunks = class.bucket(window).map_or(&[][..], |bucket| &bucket.chunks);
            let Some(first) = chunks.get(self.ahead.chunk) else {
                if matches!(self.stage, Stage::Leave(..) | Stage::Split(_)) {
                    // More chunks may come.
                    return;
                }
                self.ahead.class += 1;
                self.ahead.chunk = 0;
                continue;
            };
            // Chunks that lie side by side come in one read.
            let (mut count, mut end) = (1, first.page + first.page_count);
            for chunk in chunks.iter().skip(self.ahead.chunk + 1) {
                let page_count = (end + chunk.page_count - first.page) as usize;
                if chunk.page != end || page_count * PAGE_BYTES > self.disk.buf_bytes() {
                    break;
                }
                end = chunk.page + chunk.page_count;
                count += 1;
            }
            let len_bytes = (end - first.page) as usize * PAGE_BYTES;
            let tag = read_tag(self.ahead.class, self.ahead.chunk, count);
            if !self.disk.try_read(first.offset_bytes(), len_bytes, tag) {
                return;
            }
            self.ahead.chunk += count;
        }
    }

    // Takes what has arrived; true when that was all.
    fn arrive(&mut self, may_wait: bool) -> Result<bool> {
        self.take_arrivals(false)?;
        while self.disk.reads_in_flight() > 0 || self.ahead.class < self.classes.len() {
            if !may_wait {
                return Ok(false);
            }
            self.take_arrivals(true)?;
        }
        assert!(self.arrived.is_empty(), "what was read is released before it was taken");
        for class in &mut self.classes {
            let bucket = class.take_bucket(self.back.number);
            self.extents.release(&bucket);
        }
        self.stage = Stage::Initialise(0, 0);
        Ok(true)
    }

    fn take_arrivals(&mut self, may_wait: bool) -> Result<()> {
        match may_wait {
            true => self.disk.wait(&mut self.arrived)?,
            false => self.disk.poll(&mut self.arrived)?,
        }
        while let Some(read) = self.arrived.pop() {
            // Buffers go back before the next reads start, also after an error: the engine must be
            // able to finish what is in flight.
            let result = self.take_in(&read);
            self.disk.release(read.buf);
            if result.is_err() {
                self.arrived.drain(..).for_each(|read| self.disk.release(read.buf));
                return result;
            }
        }
        self.read_ahead(usize::MAX);
        Ok(())
    }

    fn take_in(&mut self, read: &Arrived) -> Result<()> {
        let (class, first, count) = read_parts(read.tag);
        let class = &mut self.classes[class];
        let stored_bytes = class.stored_bytes();
        let mut at = 0;
        for number in first..first + count {
            let bucket = class.bucket(self.back.number);
            let Some(&chunk) = bucket.and_then(|bucket| bucket.chunks.get(number)) else {
                panic!("a read arrived of chunk {number}, which the bucket does not have")
            };
            let bytes = &self.disk.bytes(read.buf)[at..at + chunk.len_bytes()];
            at += chunk.len_bytes();
            let rows = check_chunk(&chunk, bytes, stored_bytes)?;
            for (nth, (entry, record)) in rows_of(rows, stored_bytes).enumerate() {
                let soon = rows.get((nth + FETCH_AHEAD) * stored_bytes..);
                if let Some(soon) = soon.and_then(|row| row.first_chunk::<ENTRY_BYTES>()) {
                    self.back.expect(u32::from_le_bytes(*soon));
                }
                self.back.arrive_bytes(entry, record)?;
            }
            class.note_arrivals(u64::from(chunk.row_count), 0);
        }
        Ok(())
    }

    fn initialise(&mut self, at: usize, first: usize, rows_max: usize) -> Result<usize> {
        let plan = Arc::clone(&self.back.plan);
        let table = plan.tables().get(at).zip(self.homes.get(at));
        let (Some((table, home)), Ok(schema)) = (table, self.schema.table(table_id(at))) else {
            self.stage = Stage::Done;
            return Ok(0);
        };
        let end = first.saturating_add(rows_max.max(PIECE_ROWS)).min(table.count as usize);
        let mut made_count = 0;
        let piece = table.first + first as u32..table.first + end as u32;
        // Unpacking row ids costs more than looking: most pieces of later epochs have no new row.
        if piece.clone().any(|entry| self.back.presence(entry) == Presence::Absent) {
            let mut rows = plan.rows(table).skip(first);
            for entry in piece {
                let row = rows.next().ok_or_else(unplanned)?;
                let fill = |record: &mut [f32]| init_record(schema, row, record);
                made_count += u64::from(self.back.initialise(entry, fill));
            }
        }
        self.classes[home.class].note_arrivals(0, made_count);
        self.stage = match end == table.count as usize {
            true => Stage::Initialise(at + 1, 0),
            false => Stage::Initialise(at, end),
        };
        // Looking is much cheaper than making.
        Ok(made_count as usize + (end - first) / 8)
    }

    /// Finishes what is under way without writing anything: afterwards rows are in the window
    /// that comes, unless those of the window before have not left, or the coming span is split.
    ///
    /// # Errors
    /// As [`work`](Self::work).
    pub(crate) fn settle(&mut self) -> Result<()> {
        match self.stage {
            Stage::Leave(..) | Stage::Split(_) => Ok(()),
            _ => self.work(usize::MAX, true).map(|_| ()),
        }
    }

    /// Visits the used rows in the memory between the windows. After [`settle`](Self::settle).
    ///
    /// # Errors
    /// Those of `visit`, `Corruption` for a damaged plan.
    pub(crate) fn visit_back(&self, visit: &mut RowVisit<'_>) -> Result<()> {
        let number = self.back.number as u32;
        for (table, entries) in self.back.plan.tables().iter().enumerate() {
            if let Some(left) = self.left_of(table, entries.count as usize) {
                note_leaving(&self.back.plan, entries, left, self.current, |offset, to| {
                    let entry = entries.first + offset as u32;
                    let known_as = Place { window: number, entry };
                    visit(Spot { table, waits_for: to, known_as }, self.back.record(entry))
                })?;
                continue;
            }
            for entry in entries.first..entries.first + entries.count {
                if self.back.presence(entry) == Presence::Here {
                    let place = Place { window: number, entry };
                    let spot = Spot { table, waits_for: place, known_as: place };
                    visit(spot, self.back.record(entry))?;
                }
            }
        }
        Ok(())
    }

    // Before and while rows leave: the entries of a table that have not left yet.
    fn left_of(&self, table: usize, count: usize) -> Option<Range<usize>> {
        match self.stage {
            Stage::Leave(now, _) if table > now => Some(0..count),
            Stage::Leave(now, first) if table == now => Some(first..count),
            Stage::Split(_) => Some(0..count),
            Stage::Leave(..) => Some(0..0),
            _ => None,
        }
    }

    /// Returns the buckets of all size classes, window after window.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = &Bucket> {
        self.classes.iter().flat_map(SizeClass::all_buckets)
    }
}

// Visits the entries of `table` in `range` that do not go to window `carried`: offset in the
// table, and where they are needed next.
#[inline]
fn note_leaving(
    plan: &PlanWindow,
    table: &TableEntries,
    range: Range<usize>,
    carried: usize,
    mut note: impl FnMut(usize, Place) -> Result<()>,
) -> Result<()> {
    let next = plan.next_uses(table);
    for offset in range {
        let (window, entry) = next.get(offset).ok_or_else(unplanned)?;
        if window != carried {
            note(offset, Place { window: window as u32, entry })?;
        }
    }
    Ok(())
}

fn table_id(at: usize) -> tierbed_core::TableId {
    tierbed_core::TableId(at as u32)
}

#[cold]
fn unplanned() -> Error {
    Error::corruption("plan window ends too early")
}

/// Names a read of `count` chunks of a bucket from number `first` on (16, 32 and 16 bits); of no
/// chunk when it is that one of a span.
pub(super) fn read_tag(class: usize, first: usize, count: usize) -> u64 {
    let fits = class < 1 << 16 && first < 1 << 32 && count < 1 << 16;
    assert!(fits, "{count} chunks from {first} on of size class {class} cannot be named");
    (class as u64) << 48 | (first as u64) << 16 | count as u64
}

fn read_parts(tag: u64) -> (usize, usize, usize) {
    ((tag >> 48) as usize, (tag >> 16 & 0xFFFF_FFFF) as usize, (tag & 0xFFFF) as usize)
}
