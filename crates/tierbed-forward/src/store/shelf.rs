//! The rows of one record length: slots, lists and buckets.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::PAGE_BYTES;

use super::disk::Disk;
use super::extents::{Bucket, Chunk, Extents};
use super::lists::{Lists, Waiting};

/// Bytes of the entry number before each record on disk.
pub(crate) const ENTRY_BYTES: usize = 4;
/// Nearest window whose list may go to disk: the next one is being read.
const HORIZON_MIN: usize = 2;
/// Share of the slots, in tenths, that lists nearer than the horizon hold.
/// Source: the prototype's beta of 0.4.
const NEAR_TENTHS: usize = 6;

/// Slots, lists and buckets of one record length.
#[derive(Debug)]
pub(crate) struct Shelf {
    words: usize,
    arena: Vec<f32>,
    slot_count: usize,
    free: Vec<u32>,
    lists: Lists,
    buckets: Vec<Bucket>,
    /// Rows that wait for no window.
    parked: Bucket,
    /// Lists of windows this far ahead or farther may be flushed.
    horizon: usize,
    stats: ShelfStats,
}

/// What a shelf did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ShelfStats {
    pub(crate) rows_flushed: u64,
    pub(crate) chunks_written: u64,
    pub(crate) rows_read: u64,
    pub(crate) rows_initialised: u64,
}

/// Where a flush writes to.
pub(crate) struct Sink<'a> {
    pub(crate) disk: &'a mut Disk,
    pub(crate) extents: &'a mut Extents,
}

impl Shelf {
    pub(crate) fn new(words: usize, slot_count: usize, buckets: Vec<Bucket>) -> Self {
        let window_count = buckets.len();
        Self {
            words,
            arena: vec![0.0; words * slot_count],
            slot_count,
            free: (0..slot_count as u32).rev().collect(),
            lists: Lists::new(window_count, slot_count),
            buckets,
            parked: Bucket::default(),
            horizon: window_count.max(HORIZON_MIN),
            stats: ShelfStats::default(),
        }
    }

    pub(crate) fn words(&self) -> usize {
        self.words
    }

    pub(crate) fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Returns the bytes of a record on disk: entry number and record.
    pub(crate) fn stored_bytes(&self) -> usize {
        ENTRY_BYTES + 4 * self.words
    }

    pub(crate) fn arena(&self) -> &[f32] {
        &self.arena
    }

    pub(crate) fn arena_mut(&mut self) -> &mut [f32] {
        &mut self.arena
    }

    pub(crate) fn record(&self, slot: u32) -> &[f32] {
        let start = slot as usize * self.words;
        self.arena.get(start..start + self.words).unwrap_or(&[])
    }

    pub(crate) fn lists(&self) -> &Lists {
        &self.lists
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    pub(crate) fn parked(&self) -> &Bucket {
        &self.parked
    }

    pub(crate) fn set_parked(&mut self, parked: Bucket) {
        self.parked = parked;
    }

    /// Returns all that lies on disk.
    pub(crate) fn all_buckets(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().chain([&self.parked])
    }

    /// Lets every list be flushed, for when no window is trained on.
    pub(crate) fn forget_horizon(&mut self) {
        self.horizon = 0;
    }

    pub(crate) fn bucket(&self, window: usize) -> Option<&Bucket> {
        self.buckets.get(window)
    }

    pub(crate) fn take_bucket(&mut self, window: usize) -> Bucket {
        self.buckets.get_mut(window).map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn stats(&self) -> ShelfStats {
        self.stats
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Lets the row in `slot` wait for `window`.
    pub(crate) fn push(&mut self, window: usize, waiting: Waiting) -> Result<()> {
        match self.lists.push(window, waiting) {
            true => Ok(()),
            false => Err(Error::corruption("plan names a window that it does not have")
                .with("at_window", window)),
        }
    }

    pub(crate) fn pop(&mut self, window: usize) -> Option<Waiting> {
        self.lists.pop(window)
    }

    /// Puts a record into a free slot.
    ///
    /// # Errors
    /// `Corruption` when there is no free slot: more rows came than the plan promised.
    pub(crate) fn admit(&mut self, bytes: &[u8]) -> Result<u32> {
        self.stats.rows_read += 1;
        let (slot, place) = self.free_slot()?;
        let place: &mut [u8] = bytemuck::cast_slice_mut(place);
        assert_eq!(place.len(), bytes.len(), "a record is as long as its shelf's");
        place.copy_from_slice(bytes);
        Ok(slot)
    }

    /// Takes a free slot for a row that `fill` makes.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub(crate) fn initialise(&mut self, fill: impl FnOnce(&mut [f32])) -> Result<u32> {
        self.stats.rows_initialised += 1;
        let (slot, place) = self.free_slot()?;
        fill(place);
        Ok(slot)
    }

    #[inline]
    fn free_slot(&mut self) -> Result<(u32, &mut [f32])> {
        let full = || Error::corruption("more rows came than the plan promised");
        let slot = self.free.pop().ok_or_else(full)?;
        let start = slot as usize * self.words;
        self.arena.get_mut(start..start + self.words).map(|place| (slot, place)).ok_or_else(full)
    }

    /// Flushes lists that are far from window `now` until `wanted` slots are free.
    ///
    /// # Errors
    /// Those of the device, `NoSpace` on a full disk or quota.
    pub(crate) fn make_room(
        &mut self,
        now: usize,
        wanted: usize,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        while self.free.len() < wanted {
            let (window, count) = self.largest_far_list(now);
            let is_small = count * self.stored_bytes() < PAGE_BYTES;
            if is_small && self.horizon > HORIZON_MIN {
                self.horizon = (self.horizon * 3 / 4).max(HORIZON_MIN);
                continue;
            }
            if count == 0 {
                return Err(Error::corruption("no row can leave memory: more rows than planned")
                    .with("slots", self.slot_count)
                    .with("wanted", wanted));
            }
            self.flush(window, sink)?;
        }
        Ok(())
    }

    // Largest, not farthest: the farthest list alone would make flushes of single pages.
    fn largest_far_list(&self, now: usize) -> (usize, usize) {
        let counts = self.lists.counts();
        let (from, end) = (now + self.horizon, now + counts.len());
        if from >= end {
            return (0, 0);
        }
        let split = |at: usize| at.min(counts.len());
        let straight = split(from)..split(end);
        let wrapped = from.saturating_sub(counts.len())..end - split(end);
        let mut best = (0, 0);
        for range in [straight, wrapped] {
            let first = range.start;
            for (at, &count) in counts.get(range).unwrap_or(&[]).iter().enumerate() {
                if count as usize > best.1 {
                    best = (first + at, count as usize);
                }
            }
        }
        best
    }

    // Writes whole pages; what does not fill one stays in memory, unless it is all there is.
    fn flush(&mut self, window: usize, sink: &mut Sink<'_>) -> Result<()> {
        let stored_bytes = self.stored_bytes();
        let pages_min = stored_bytes.div_ceil(PAGE_BYTES);
        let buf_pages = sink.disk.buf_bytes() / PAGE_BYTES;
        let mut is_first = true;
        loop {
            let count = self.lists.count(window);
            let bytes = count * stored_bytes;
            if count == 0 || (bytes < PAGE_BYTES && !is_first) {
                return Ok(());
            }
            is_first = false;
            let pages_max = (bytes / PAGE_BYTES).max(pages_min).min(buf_pages);
            let Some(bucket) = self.buckets.get(window) else { return Ok(()) };
            let (page, page_count) =
                sink.extents.place(bucket, pages_min as u32, pages_max as u32)?;
            let row_count = count.min(page_count as usize * PAGE_BYTES / stored_bytes);
            self.write_chunk(window, page, row_count, sink)?;
        }
    }

    fn write_chunk(
        &mut self,
        window: usize,
        page: u32,
        row_count: usize,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let stored_bytes = self.stored_bytes();
        let page_count = (row_count * stored_bytes).div_ceil(PAGE_BYTES);
        let buf = sink.disk.write_buf()?;
        let Some(bytes) = sink.disk.bytes_mut(buf).get_mut(..page_count * PAGE_BYTES) else {
            return Err(Error::corruption("a chunk is longer than a buffer"));
        };
        let (records, rest) = bytes.split_at_mut(row_count * stored_bytes);
        for place in records.chunks_exact_mut(stored_bytes) {
            let Some(waiting) = self.lists.pop(window) else { break };
            let (entry, record) = place.split_at_mut(ENTRY_BYTES);
            entry.copy_from_slice(&waiting.entry.to_le_bytes());
            let start = waiting.slot as usize * self.words;
            let source = self.arena.get(start..start + self.words).unwrap_or(&[]);
            record.copy_from_slice(bytemuck::cast_slice(source));
            self.free.push(waiting.slot);
        }
        rest.fill(0);
        let chunk = Chunk {
            page,
            page_count: page_count as u32,
            row_count: row_count as u32,
            crc32c: crc32c(bytes),
        };
        sink.disk.write(buf, chunk.offset_bytes(), chunk.len_bytes());
        if let Some(bucket) = self.buckets.get_mut(window) {
            if bucket.chunks.len() == bucket.chunks.capacity() {
                bucket.chunks.reserve_exact(2 + bucket.chunks.len() / 2);
            }
            bucket.chunks.push(chunk);
            bucket.row_count += row_count;
        }
        self.stats.rows_flushed += row_count as u64;
        self.stats.chunks_written += 1;
        Ok(())
    }

    /// Moves the horizon so that the lists nearer than it hold their share of the slots.
    pub(crate) fn move_horizon(&mut self, now: usize) {
        let counts = self.lists.counts();
        let near_max = self.slot_count * NEAR_TENTHS / 10;
        let (mut sum, mut distance) = (0, 1);
        while distance < counts.len() {
            sum += counts.get((now + distance) % counts.len()).map_or(0, |&count| count as usize);
            if sum > near_max {
                break;
            }
            distance += 1;
        }
        self.horizon = distance.max(HORIZON_MIN);
    }
}

/// Checks the bytes of a chunk and splits them into entries and records.
///
/// # Errors
/// As [`open_rows`].
pub(crate) fn open_chunk<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    stored_bytes: usize,
) -> Result<impl Iterator<Item = (u32, &'a [u8])>> {
    let rows = open_rows(chunk, bytes, stored_bytes)?;
    Ok(rows.filter_map(|row| {
        let (entry, record) = row.split_first_chunk::<ENTRY_BYTES>()?;
        Some((u32::from_le_bytes(*entry), record))
    }))
}

/// Checks the bytes of a chunk and splits them into rows of `stored_bytes`.
///
/// # Errors
/// `Corruption` when they are not what was written.
pub(crate) fn open_rows<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    stored_bytes: usize,
) -> Result<impl Iterator<Item = &'a [u8]>> {
    let found = crc32c(bytes);
    let rows_bytes = chunk.row_count as usize * stored_bytes;
    if found != chunk.crc32c || bytes.len() < rows_bytes {
        return Err(Error::corruption("chunk checksum mismatch")
            .with("offset_bytes", chunk.offset_bytes())
            .with("expected", format_args!("{:08x}", chunk.crc32c))
            .with("found", format_args!("{found:08x}"))
            .with("remedy", "restore the store's folder from a copy"));
    }
    Ok(bytes.get(..rows_bytes).unwrap_or(&[]).chunks_exact(stored_bytes))
}
