//! Window after window: rows come when they are needed and go where they are needed next.

use std::sync::Arc;

use tierbed_core::{Error, Result, Schema};
use tierbed_io::PAGE_BYTES;
use tierbed_kernels::init_record;

use super::disk::{Arrived, Disk};
use super::extents::{Bucket, Extents};
use super::lists::Waiting;
use super::shelf::{open_chunk, Shelf, Sink};
use super::NO_SLOT;
use crate::plan::{Plan, WindowPlan};

/// A window whose rows are in memory, or on their way.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub(crate) number: usize,
    pub(crate) plan: WindowPlan,
    /// Slot of each entry; [`NO_SLOT`] while it is not in memory.
    pub(crate) slots: Vec<u32>,
}

impl Live {
    fn load(&mut self, plan: &Plan, number: usize) -> Result<()> {
        plan.load(number, &mut self.plan)?;
        self.number = number;
        self.slots.clear();
        self.slots.resize(self.plan.entry_count(), NO_SLOT);
        Ok(())
    }

    fn settle(&mut self, entry: u32, slot: u32) -> Result<()> {
        match self.slots.get_mut(entry as usize) {
            Some(place) if *place == NO_SLOT => {
                *place = slot;
                Ok(())
            }
            _ => Err(Error::corruption("a row came to a window twice, or to a wrong one")
                .with("at_window", self.number)
                .with("entry", entry)),
        }
    }
}

/// What of the next window's buckets has been asked for.
#[derive(Debug, Default)]
struct ReadAhead {
    shelf: usize,
    chunk: usize,
    /// Reads were queued that the I/O engine has not been told to start.
    is_queued: bool,
}

/// All rows of a store, along a plan.
#[derive(Debug)]
pub(crate) struct River {
    pub(crate) plan: Plan,
    pub(crate) schema: Arc<Schema>,
    pub(crate) shelf_of_table: Vec<usize>,
    pub(crate) shelves: Vec<Shelf>,
    // After the shelves: it owns buffers only.
    pub(crate) disk: Disk,
    pub(crate) extents: Extents,
    pub(crate) current: Live,
    next: Live,
    ahead: ReadAhead,
    arrived: Vec<Arrived>,
}

/// The parts a river is made of.
pub(crate) struct RiverParts {
    pub(crate) plan: Plan,
    pub(crate) schema: Arc<Schema>,
    pub(crate) shelf_of_table: Vec<usize>,
    pub(crate) shelves: Vec<Shelf>,
    pub(crate) disk: Disk,
    pub(crate) extents: Extents,
}

impl River {
    /// Wraps the parts; [`start`](Self::start) must follow.
    pub(crate) fn new(parts: RiverParts) -> Self {
        let RiverParts { plan, schema, shelf_of_table, shelves, disk, extents } = parts;
        Self {
            plan,
            schema,
            shelf_of_table,
            shelves,
            disk,
            extents,
            current: Live::default(),
            next: Live::default(),
            // Nothing is asked for before the start.
            ahead: ReadAhead { shelf: usize::MAX, ..ReadAhead::default() },
            arrived: Vec::new(),
        }
    }

    /// Begins at `window`, whose rows wait in memory or in its bucket, or were never used.
    pub(crate) fn start(&mut self, window: usize) -> Result<()> {
        self.next.load(&self.plan, window)?;
        for shelf in &mut self.shelves {
            let wanted = shelf.bucket(window).map_or(0, |bucket| bucket.row_count);
            let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
            shelf.make_room(window, wanted, &mut sink)?;
        }
        self.disk.finish_writes()?;
        self.ahead = ReadAhead::default();
        self.enter()
    }

    /// Lets a record wait for `window`, in memory or on disk, while no window is trained on.
    pub(crate) fn distribute(
        &mut self,
        shelf: usize,
        (window, entry): (usize, u32),
        record: &[u8],
    ) -> Result<()> {
        let Some(shelf) = self.shelves.get_mut(shelf) else { return Ok(()) };
        if shelf.free_count() == 0 {
            shelf.forget_horizon();
            let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
            shelf.make_room(0, 1, &mut sink)?;
        }
        let slot = shelf.admit(record)?;
        shelf.push(window, Waiting { slot, entry })
    }

    /// Lets a record wait in memory for `window`; for reopening, before [`start`](Self::start)
    /// at window `now`.
    pub(crate) fn restore(
        &mut self,
        shelf: usize,
        (now, window, entry): (usize, usize, u32),
        record: &[u8],
    ) -> Result<()> {
        let Some(shelf) = self.shelves.get_mut(shelf) else { return Ok(()) };
        if shelf.free_count() == 0 {
            let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
            shelf.make_room(now, 1, &mut sink)?;
        }
        let slot = shelf.admit(record)?;
        shelf.push(window, Waiting { slot, entry })
    }

    fn following(&self, window: usize) -> usize {
        (window + 1) % self.plan.window_count()
    }

    /// Ends the current window, sends each of its rows to its next use, and begins the next.
    pub(crate) fn advance(&mut self) -> Result<()> {
        self.leave()?;
        self.enter()
    }

    fn leave(&mut self) -> Result<()> {
        let Live { number, plan, slots } = &self.current;
        for (table, &shelf) in plan.tables().iter().zip(&self.shelf_of_table) {
            let Some(shelf) = self.shelves.get_mut(shelf) else { continue };
            let next = plan.next_uses(table);
            let first = table.first as usize;
            let slots = slots.get(first..first + table.count as usize).unwrap_or(&[]);
            for (at, &slot) in slots.iter().enumerate() {
                let Some((window, entry)) = next.get(at) else {
                    return Err(Error::corruption("plan window ends too early"));
                };
                shelf.push(window, Waiting { slot, entry })?;
            }
        }
        let number = *number;
        self.shelves.iter_mut().for_each(|shelf| shelf.move_horizon(number));
        Ok(())
    }

    // The window whose buckets were read becomes the current one.
    fn enter(&mut self) -> Result<()> {
        self.finish_reads()?;
        std::mem::swap(&mut self.current, &mut self.next);
        let now = self.current.number;
        for shelf in &mut self.shelves {
            let bucket = shelf.take_bucket(now);
            self.extents.release(&bucket);
            while let Some(Waiting { slot, entry }) = shelf.pop(now) {
                self.current.settle(entry, slot)?;
            }
        }
        let following = self.following(now);
        self.next.load(&self.plan, following)?;
        // What the last windows wrote may be read now.
        self.disk.finish_writes()?;
        self.initialise_new_rows(following)?;
        self.ahead = ReadAhead::default();
        self.read_ahead();
        Ok(())
    }

    // Makes room for the rows never seen and for the bucket of the following window.
    fn initialise_new_rows(&mut self, following: usize) -> Result<()> {
        let Live { number, plan, slots } = &mut self.current;
        let mut wanted: Vec<usize> = self
            .shelves
            .iter()
            .map(|shelf| shelf.bucket(following).map_or(0, |bucket| bucket.row_count))
            .collect();
        let slots_of = |table: &crate::plan::TableEntries| {
            table.first as usize..(table.first + table.count) as usize
        };
        for (table, &shelf) in plan.tables().iter().zip(&self.shelf_of_table) {
            let slots = slots.get(slots_of(table)).unwrap_or(&[]);
            let new_count = slots.iter().filter(|slot| **slot == NO_SLOT).count();
            if let Some(wanted) = wanted.get_mut(shelf) {
                *wanted += new_count;
            }
        }
        let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
        for (shelf, &wanted) in self.shelves.iter_mut().zip(&wanted) {
            shelf.make_room(*number, wanted, &mut sink)?;
        }
        let tables = plan.tables().iter().zip(&self.shelf_of_table).zip(self.schema.tables());
        for ((table, &shelf), schema) in tables {
            let Some(shelf) = self.shelves.get_mut(shelf) else { continue };
            let slots = slots.get_mut(slots_of(table)).unwrap_or(&mut []);
            if !slots.contains(&NO_SLOT) {
                continue;
            }
            let mut rows = plan.rows(table);
            for slot in slots {
                let row = rows.next();
                if *slot == NO_SLOT {
                    let row = row.ok_or_else(|| Error::corruption("plan window too short"))?;
                    *slot = shelf.initialise(|record| init_record(schema, row, record))?;
                }
            }
        }
        Ok(())
    }

    /// Asks for as much of the next window's buckets as there are buffers.
    fn read_ahead(&mut self) {
        let window = self.next.number;
        while let Some(shelf) = self.shelves.get(self.ahead.shelf) {
            let chunks = shelf.bucket(window).map_or(&[][..], |bucket| &bucket.chunks);
            let Some(first) = chunks.get(self.ahead.chunk) else {
                self.ahead.shelf += 1;
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
            let tag = read_tag(self.ahead.shelf, self.ahead.chunk, count);
            if !self.disk.try_read(first.offset_bytes(), len_bytes, tag) {
                return;
            }
            self.ahead.chunk += count;
            self.ahead.is_queued = true;
        }
    }

    /// Takes what has arrived of the next window, and asks for more; for between two batches.
    ///
    /// # Errors
    /// `Corruption` for chunks that fail their checksum, otherwise the device's.
    pub(crate) fn pump(&mut self) -> Result<()> {
        // Waiting starts what is queued and frees buffers for what is not; when all is under way
        // there is nothing to wait for before the window ends.
        let is_complete = self.ahead.shelf == self.shelves.len();
        if self.disk.reads_in_flight() > 0 && (self.ahead.is_queued || !is_complete) {
            self.take_arrivals()?;
        }
        self.read_ahead();
        Ok(())
    }

    /// Waits until all of the next window's rows are in memory.
    pub(crate) fn finish_reads(&mut self) -> Result<()> {
        self.read_ahead();
        // Without a read in flight, writes hold all the buffers: wait for those.
        while self.disk.reads_in_flight() > 0 || self.ahead.shelf < self.shelves.len() {
            self.take_arrivals()?;
            self.read_ahead();
        }
        Ok(())
    }

    fn take_arrivals(&mut self) -> Result<()> {
        self.ahead.is_queued = false;
        self.disk.wait(&mut self.arrived)?;
        while let Some(read) = self.arrived.pop() {
            let result = self.take_in(&read);
            self.disk.release(read.buf);
            if result.is_err() {
                self.arrived.drain(..).for_each(|read| self.disk.release(read.buf));
                return result;
            }
        }
        Ok(())
    }

    fn take_in(&mut self, read: &Arrived) -> Result<()> {
        let (shelf, first, count) = read_parts(read.tag);
        let Some(shelf) = self.shelves.get_mut(shelf) else { return Ok(()) };
        let stored_bytes = shelf.stored_bytes();
        let mut at = 0;
        for number in first..first + count {
            let chunk = shelf
                .bucket(self.next.number)
                .and_then(|bucket| bucket.chunks.get(number))
                .copied()
                .ok_or_else(|| Error::corruption("a read arrived that nobody asked for"))?;
            let bytes = self.disk.bytes(read.buf).get(at..at + chunk.len_bytes()).unwrap_or(&[]);
            at += chunk.len_bytes();
            for (entry, record) in open_chunk(&chunk, bytes, stored_bytes)? {
                let slot = shelf.admit(record)?;
                self.next.settle(entry, slot)?;
            }
        }
        Ok(())
    }

    /// Returns the buckets of all shelves, window after window.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = &Bucket> {
        self.shelves.iter().flat_map(Shelf::all_buckets)
    }
}

// A read of `count` chunks of a bucket from number `first` on: 16, 32 and 16 bits.
fn read_tag(shelf: usize, first: usize, count: usize) -> u64 {
    (shelf as u64) << 48 | (first as u64) << 16 | count as u64
}

fn read_parts(tag: u64) -> (usize, usize, usize) {
    ((tag >> 48) as usize, (tag >> 16 & 0xFFFF_FFFF) as usize, (tag & 0xFFFF) as usize)
}
