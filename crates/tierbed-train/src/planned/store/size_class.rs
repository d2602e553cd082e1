//! The rows of one record length: lists in memory, buckets on disk.

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, BufId, Device, PAGE_BYTES};

use super::disk::Disk;
use super::extents::{Bucket, Chunk, Extents};
use super::lists::{split_rows, BlockShape, Lists};
use super::spans::{ListPlace, Spans};
use super::window_rows::{Place, WindowRows};

/// Bytes of the entry number before each record on disk.
pub(crate) const ENTRY_BYTES: usize = 4;
/// Nearest window whose list may go to disk: the next one is read when the last rows have left.
const HORIZON_MIN: usize = 1;
/// How many rows ahead the processor is asked to fetch a row's place.
const FETCH_AHEAD: usize = 8;
/// Share of the memory, in tenths, that lists nearer than the horizon hold.
/// Source: the prototype's beta of 0.4.
const NEAR_TENTHS: usize = 6;

/// Lists and buckets of one record length.
#[derive(Debug)]
pub(crate) struct SizeClass {
    words: usize,
    /// Rows that fit into memory.
    rows_max: usize,
    lists: Lists,
    /// One per list.
    buckets: Vec<Bucket>,
    spans: Arc<Spans>,
    /// Rows that wait for no window.
    unplanned: Bucket,
    /// Lists of windows this far ahead or farther may be flushed.
    horizon: usize,
    stats: SizeClassStats,
}

/// What a size class did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SizeClassStats {
    pub(crate) rows_flushed: u64,
    pub(crate) chunks_written: u64,
    pub(crate) rows_read: u64,
    pub(crate) rows_initialised: u64,
}

impl SizeClassStats {
    pub(crate) fn add(&mut self, other: &Self) {
        self.rows_flushed += other.rows_flushed;
        self.chunks_written += other.chunks_written;
        self.rows_read += other.rows_read;
        self.rows_initialised += other.rows_initialised;
    }
}

/// A row that leaves its window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaving {
    /// First word of its record in the window's memory.
    pub(crate) start: usize,
    /// The list of the window that needs it next.
    pub(crate) list: u32,
    /// Its entry there.
    pub(crate) entry: u32,
}

/// Rows that leave a window, and the memory of that window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeavingRows<'a> {
    pub(crate) rows: &'a [Leaving],
    pub(crate) arena: &'a [f32],
}

/// Rows of a span's list, entry and record each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpanRows<'a> {
    pub(crate) list: u32,
    pub(crate) rows: &'a [f32],
}

/// The last rows of a list.
#[derive(Debug, Clone, Copy)]
struct ListTail {
    list: usize,
    row_count: usize,
}

/// Where a flush writes to.
pub(crate) struct Sink<'a> {
    pub(crate) disk: &'a mut Disk,
    pub(crate) extents: &'a mut Extents,
}

impl SizeClass {
    pub(crate) fn new(
        words: usize,
        shape: BlockShape,
        buckets: Vec<Bucket>,
        spans: Arc<Spans>,
    ) -> Self {
        assert_eq!(buckets.len(), spans.list_count(), "every list has a bucket");
        Self {
            words,
            rows_max: shape.row_count(),
            lists: Lists::new(buckets.len(), 1 + words, shape),
            buckets,
            unplanned: Bucket::default(),
            horizon: spans.window_count().max(HORIZON_MIN),
            spans,
            stats: SizeClassStats::default(),
        }
    }

    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// Returns the bytes of a record on disk: entry number and record.
    pub(crate) fn stored_bytes(&self) -> usize {
        ENTRY_BYTES + 4 * self.words
    }

    pub(crate) fn lists(&self) -> &Lists {
        &self.lists
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    pub(crate) fn unplanned(&self) -> &Bucket {
        &self.unplanned
    }

    pub(crate) fn set_unplanned(&mut self, unplanned: Bucket) {
        assert!(self.unplanned.chunks.is_empty(), "unplanned rows would be lost");
        self.unplanned = unplanned;
    }

    /// Returns all that lies on disk.
    pub(crate) fn all_buckets(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().chain([&self.unplanned])
    }

    /// Lets every list be flushed, for when no window is trained on.
    pub(crate) fn forget_horizon(&mut self) {
        self.horizon = 0;
    }

    pub(crate) fn bucket(&self, list: usize) -> Option<&Bucket> {
        self.buckets.get(list)
    }

    /// Forgets the last rows of a list, which lie in one block.
    pub(crate) fn forget_last_rows(&mut self, list: usize, row_count: usize) {
        self.lists.forget_last(list, row_count);
    }

    /// Takes the last chunk of a bucket out of it, and gives its extent back when it was the only
    /// one there.
    ///
    /// # Panics
    /// When there is no such list.
    #[expect(clippy::indexing_slicing, reason = "every list has a bucket")]
    pub(crate) fn take_last_chunk(&mut self, list: usize, extents: &mut Extents) -> Option<Chunk> {
        let bucket = &mut self.buckets[list];
        let chunk = bucket.pop()?;
        extents.release_last(chunk, bucket);
        Some(chunk)
    }

    #[expect(clippy::indexing_slicing, reason = "every list has a bucket")]
    pub(crate) fn take_bucket(&mut self, window: usize) -> Bucket {
        std::mem::take(&mut self.buckets[window])
    }

    pub(crate) fn stats(&self) -> SizeClassStats {
        self.stats
    }

    /// Counts rows that came to their window from disk, and rows made there.
    pub(crate) fn note_arrivals(&mut self, read_count: u64, initialised_count: u64) {
        self.stats.rows_read += read_count;
        self.stats.rows_initialised += initialised_count;
    }

    /// Lets a row wait for `place`, while window `now` is trained on.
    ///
    /// # Errors
    /// As [`make_room`](Self::make_room).
    ///
    /// # Panics
    /// When there is no such window, or the record has another length than the size class's.
    pub(crate) fn keep(
        &mut self,
        now: usize,
        place: Place,
        record: &[f32],
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let ListPlace { list, entry } = self.spans.list_of(now, place);
        let list = list as usize;
        if !self.lists.has_room(list) {
            self.make_room(now, sink, true)?;
        }
        self.put(list, entry, record);
        Ok(())
    }

    #[inline]
    fn put(&mut self, list: usize, entry: u32, record: &[f32]) {
        let Some(place) = self.lists.push(list, entry) else {
            panic!("list {list} takes a row and has no room for it")
        };
        place.copy_from_slice(record);
    }

    /// Lets rows of a window's memory wait, while window `now` is trained on; returns how many: all
    /// of them, unless room could only be made by waiting and `may_wait` is false.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    #[expect(clippy::indexing_slicing, reason = "rows are those of the arena")]
    pub(crate) fn keep_all(
        &mut self,
        now: usize,
        leaving: LeavingRows<'_>,
        sink: &mut Sink<'_>,
        may_wait: bool,
    ) -> Result<usize> {
        let LeavingRows { rows, arena } = leaving;
        for (at, row) in rows.iter().enumerate() {
            if let Some(soon) = rows.get(at + FETCH_AHEAD) {
                self.lists.expect(soon.list as usize);
            }
            let list = row.list as usize;
            if !self.lists.has_room(list) && !self.make_room(now, sink, may_wait)? {
                return Ok(at);
            }
            self.put(list, row.entry, &arena[row.start..row.start + self.words]);
        }
        Ok(rows.len())
    }

    /// Lets rows of a span's list wait in the lists of their windows; returns how many, as
    /// [`keep_all`](Self::keep_all).
    ///
    /// # Errors
    /// `Corruption` when the span has no such entry, otherwise as [`keep`](Self::keep).
    pub(crate) fn keep_split(
        &mut self,
        now: usize,
        SpanRows { list, rows }: SpanRows<'_>,
        sink: &mut Sink<'_>,
        may_wait: bool,
    ) -> Result<usize> {
        let mut kept = 0;
        for (entry, record) in split_rows(rows, 1 + self.words) {
            let place = self.spans.place_in(ListPlace { list, entry });
            let Place { window, entry } =
                place.ok_or_else(|| Error::corruption("a span has no such entry"))?;
            let window = window as usize;
            if !self.lists.has_room(window) && !self.make_room(now, sink, may_wait)? {
                break;
            }
            self.put(window, entry, record);
            kept += 1;
        }
        Ok(kept)
    }

    /// Lets at most `rows_max` rows that wait in memory for `window` go there; returns how
    /// many there were.
    ///
    /// # Errors
    /// `Corruption` when a row is there already.
    pub(crate) fn send_waiting(
        &mut self,
        window: &mut WindowRows,
        rows_max: usize,
    ) -> Result<usize> {
        let row_words = 1 + self.words;
        let mut sent = 0;
        loop {
            let rows = self.lists.last_rows(window.number, rows_max - sent);
            if rows.is_empty() {
                return Ok(sent);
            }
            let row_count = rows.len() / row_words;
            assert!(sent + row_count <= rows_max, "{row_count} rows are sent behind {sent}");
            let mut soon = split_rows(rows, row_words).skip(FETCH_AHEAD);
            for (entry, _) in split_rows(rows, row_words).take(FETCH_AHEAD) {
                window.expect(entry);
            }
            for (entry, record) in split_rows(rows, row_words) {
                if let Some((entry, _)) = soon.next() {
                    window.expect(entry);
                }
                window.arrive(entry, record)?;
            }
            drop(soon);
            self.lists.forget_last(window.number, row_count);
            sent += row_count;
        }
    }

    /// Flushes lists that are far from window `now` until a row of any window fits; `false` when
    /// that would mean waiting for the device and `may_wait` is false.
    ///
    /// # Errors
    /// Those of the device, `NoSpace` on a full disk or quota.
    fn make_room(&mut self, now: usize, sink: &mut Sink<'_>, may_wait: bool) -> Result<bool> {
        while !self.lists.has_free_block() {
            let (list, count) = self.largest_far_list(now);
            let is_small = count * self.stored_bytes() < PAGE_BYTES;
            if is_small && self.horizon > HORIZON_MIN {
                self.horizon = (self.horizon * 3 / 4).max(HORIZON_MIN);
                continue;
            }
            if count == 0 {
                return Err(Error::corruption("no row can leave memory: more rows than planned")
                    .with("rows_in_memory", self.rows_max));
            }
            if !self.flush(list, sink, may_wait)? {
                break;
            }
        }
        Ok(self.lists.has_free_block())
    }

    // Largest, not farthest: the farthest list alone would make flushes of single pages. Lists of
    // spans are all far, but for the one that is split: what is read must not be written to.
    #[expect(clippy::indexing_slicing, reason = "the horizon is at most the windows there are")]
    fn largest_far_list(&self, now: usize) -> (usize, usize) {
        let (counts, spans) = self.lists.counts().split_at(self.spans.window_count());
        assert!(now < counts.len(), "window {now} of {}", counts.len());
        let (from, end) = (now + self.horizon, now + counts.len());
        let split = |at: usize| at.min(counts.len());
        let straight = split(from)..split(end);
        let wrapped = from.saturating_sub(counts.len())..end - split(end);
        let coming = self.spans.coming_list(now);
        let spans = (counts.len()..).zip(spans.iter().map(|&count| count as usize));
        let spans = spans.filter(|(list, _)| Some(*list) != coming);
        let mut best = spans.max_by_key(|(_, count)| *count).unwrap_or((0, 0));
        for range in [straight, wrapped] {
            let first = range.start;
            for (at, &count) in counts[range].iter().enumerate() {
                if count as usize > best.1 {
                    best = (first + at, count as usize);
                }
            }
        }
        best
    }

    // Writes whole pages; what does not fill one stays in memory, unless it is all there is.
    // False when no buffer is free and `may_wait` is false.
    #[expect(clippy::indexing_slicing, reason = "every list has a bucket")]
    fn flush(&mut self, list: usize, sink: &mut Sink<'_>, may_wait: bool) -> Result<bool> {
        let stored_bytes = self.stored_bytes();
        let pages_min = stored_bytes.div_ceil(PAGE_BYTES);
        let buf_pages = sink.disk.buf_bytes() / PAGE_BYTES;
        let mut is_first = true;
        loop {
            let count = self.lists.count(list);
            let bytes = count * stored_bytes;
            if count == 0 || (bytes < PAGE_BYTES && !is_first) {
                // Starts the writes.
                sink.disk.poll_writes()?;
                return Ok(true);
            }
            is_first = false;
            let buf = match may_wait {
                true => sink.disk.write_buf()?,
                false => match sink.disk.try_write_buf()? {
                    Some(buf) => buf,
                    None => return Ok(false),
                },
            };
            let pages_max = (bytes / PAGE_BYTES).max(pages_min).min(buf_pages);
            let bucket = &self.buckets[list];
            let place = sink.extents.place(bucket, pages_min as u32, pages_max as u32);
            let (page, page_count) = place.inspect_err(|_| sink.disk.release(buf))?;
            sink.disk.take_space(sink.extents);
            let row_count = count.min(page_count as usize * PAGE_BYTES / stored_bytes);
            self.write_chunk(ListTail { list, row_count }, page, buf, sink);
        }
    }

    // Moves the last rows of a list into a buffer and starts writing it to `page`.
    #[expect(clippy::indexing_slicing, reason = "every list has a bucket, a chunk fits a buffer")]
    fn write_chunk(&mut self, tail: ListTail, page: u32, buf: BufId, sink: &mut Sink<'_>) {
        let ListTail { list, row_count } = tail;
        assert!(row_count > 0, "a chunk of list {list} has no row");
        let stored_bytes = self.stored_bytes();
        let page_count = (row_count * stored_bytes).div_ceil(PAGE_BYTES);
        let bytes = &mut sink.disk.bytes_mut(buf)[..page_count * PAGE_BYTES];
        let (records, rest) = bytes.split_at_mut(row_count * stored_bytes);
        self.lists.take(list, records);
        rest.fill(0);
        let chunk = Chunk {
            page,
            page_count: page_count as u32,
            row_count: row_count as u32,
            crc32c: crc32c(bytes),
        };
        sink.disk.write(buf, chunk.offset_bytes(), chunk.len_bytes());
        self.buckets[list].push(chunk);
        self.stats.rows_flushed += row_count as u64;
        self.stats.chunks_written += 1;
    }

    /// Moves the horizon so that the lists nearer than it hold their share of the memory.
    #[expect(clippy::indexing_slicing, reason = "windows come around")]
    pub(crate) fn move_horizon(&mut self, now: usize) {
        let (counts, _) = self.lists.counts().split_at(self.spans.window_count());
        let near_max = self.rows_max * NEAR_TENTHS / 10;
        let (mut sum, mut distance) = (0, 1);
        while distance < counts.len() {
            sum += counts[(now + distance) % counts.len()] as usize;
            if sum > near_max {
                break;
            }
            distance += 1;
        }
        self.horizon = distance.max(HORIZON_MIN);
    }
}

/// Reads the bytes of a chunk, unchecked, into `buf`.
///
/// # Errors
/// `Corruption` when it is longer than any that was stored, otherwise the device's.
pub(crate) fn read_chunk<'a>(
    device: &dyn Device,
    chunk: &Chunk,
    buf: &'a mut AlignedBuf,
) -> Result<&'a [u8]> {
    let bytes = buf.get_mut(..chunk.len_bytes());
    let bytes = bytes.ok_or_else(|| Error::corruption("a chunk is too long"))?;
    device.read_at(chunk.offset_bytes(), bytes)?;
    Ok(bytes)
}

/// Checks the bytes of a chunk; returns those of its rows, entry and record each.
///
/// # Errors
/// `Corruption` when they are not what was written.
pub(crate) fn check_chunk<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    stored_bytes: usize,
) -> Result<&'a [u8]> {
    let found = crc32c(bytes);
    let rows_bytes = chunk.row_count as usize * stored_bytes;
    match bytes.get(..rows_bytes) {
        Some(rows) if found == chunk.crc32c => Ok(rows),
        _ => Err(Error::corruption("chunk checksum mismatch")
            .with("offset_bytes", chunk.offset_bytes())
            .with("expected", format_args!("{:08x}", chunk.crc32c))
            .with("found", format_args!("{found:08x}"))
            .with("remedy", "restore the store's folder from a copy")),
    }
}

/// Splits the rows of a chunk into entries and records.
pub(crate) fn rows_of(rows: &[u8], stored_bytes: usize) -> impl Iterator<Item = (u32, &[u8])> {
    rows.chunks_exact(stored_bytes).filter_map(|row| {
        let (entry, record) = row.split_first_chunk::<ENTRY_BYTES>()?;
        Some((u32::from_le_bytes(*entry), record))
    })
}

/// Checks the bytes of a chunk and splits them into entries and records.
///
/// # Errors
/// As [`check_chunk`].
pub(crate) fn open_chunk<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    stored_bytes: usize,
) -> Result<impl Iterator<Item = (u32, &'a [u8])>> {
    Ok(rows_of(check_chunk(chunk, bytes, stored_bytes)?, stored_bytes))
}

/// Checks the bytes of a chunk and splits them into rows of `stored_bytes`.
///
/// # Errors
/// As [`check_chunk`].
pub(crate) fn open_rows<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    stored_bytes: usize,
) -> Result<impl Iterator<Item = &'a [u8]>> {
    Ok(check_chunk(chunk, bytes, stored_bytes)?.chunks_exact(stored_bytes))
}
