//! Splitting of a span: its rows go to its windows chunk by chunk, while the span before is
//! trained on.
//!
//! Each window does its share of the span's bucket. A chunk comes into memory of its own, the
//! *staging buffer*, and is then nowhere else: its rows go from there to the lists of their
//! windows, as rows that leave a window do, and a checkpoint dumps those still staged.

#![expect(clippy::indexing_slicing, reason = "each size class has a share of the span that comes")]

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::{AlignedBuf, BufId};

use super::extents::Bucket;
use super::row_mover::{read_tag, RowMover, Stage, PIECE_ROWS};
use super::size_class::{check_chunk, Sink, SizeClass, SpanRows};
use super::spans::Spans;

/// Rows of a span on the way to their windows.
#[derive(Debug)]
pub(crate) struct Splitter {
    spans: Arc<Spans>,
    staging: AlignedBuf,
    /// Bytes of staged rows, and those of them that were dealt to their windows.
    len_bytes: usize,
    dealt_bytes: usize,
    /// Whose rows they are.
    class: usize,
    list: usize,
    /// Chunks of each size class that are for later windows.
    left: Vec<usize>,
    /// Where reads stand.
    asked: Asked,
    /// The list of the span that comes, while there is one.
    coming: Option<usize>,
    /// Whether all writes to its buckets are known to be done.
    is_written: bool,
}

/// How far the chunks of a size class have been asked for; reads go backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asked {
    class: usize,
    first_chunk: usize,
}

/// No size class has been asked for yet.
const NOTHING_ASKED: Asked = Asked { class: usize::MAX, first_chunk: 0 };

impl Splitter {
    /// Takes memory for chunks of at most `staging_bytes`.
    pub(crate) fn new(spans: Arc<Spans>, staging_bytes: usize) -> Self {
        Self {
            spans,
            staging: AlignedBuf::new(staging_bytes),
            len_bytes: 0,
            dealt_bytes: 0,
            class: 0,
            list: 0,
            left: Vec::new(),
            asked: NOTHING_ASKED,
            coming: None,
            is_written: false,
        }
    }

    pub(crate) fn spans(&self) -> &Arc<Spans> {
        &self.spans
    }

    /// Returns the staged rows, entry and record each, when they are those of a list.
    pub(crate) fn rows_of(&self, class: usize, list: usize) -> &[f32] {
        match (self.class, self.list) == (class, list) {
            true => self.staged_rows(usize::MAX),
            false => &[],
        }
    }

    // The first staged rows, at most so many bytes.
    fn staged_rows(&self, bytes_max: usize) -> &[f32] {
        let end = self.len_bytes.min(self.dealt_bytes.saturating_add(bytes_max));
        match &self.staging[self.dealt_bytes..end] {
            // An empty slice of bytes lies anywhere, words do not.
            [] => &[],
            bytes => bytemuck::cast_slice(bytes),
        }
    }

    // Decides which chunks are the share of window `now`.
    fn begin(&mut self, now: usize, classes: &[SizeClass]) {
        assert_eq!(self.dealt_bytes, self.len_bytes, "the share of the window before is not dealt");
        self.left.clear();
        self.asked = NOTHING_ASKED;
        let coming = self.spans.coming_list(now);
        self.is_written &= coming == self.coming;
        self.coming = coming;
        let Some(list) = coming else { return };
        let windows_left = self.spans.windows_left(now);
        self.left.extend(classes.iter().map(|class| {
            let count = class.bucket(list).map_or(0, |bucket| bucket.chunks.len());
            count - count.div_ceil(windows_left)
        }));
    }

    fn stage(&mut self, class: usize, list: usize, rows: &[u8]) {
        assert_eq!(self.dealt_bytes, self.len_bytes, "staged rows would be lost");
        self.staging[..rows.len()].copy_from_slice(rows);
        (self.class, self.list, self.len_bytes, self.dealt_bytes) = (class, list, rows.len(), 0);
    }
}

impl RowMover {
    /// Begins the share of the current window, and its first reads if nothing is being written.
    pub(super) fn begin_split(&mut self) {
        self.splitter.begin(self.current, &self.classes);
        if self.disk.writes_in_flight() > 0 {
            return;
        }
        self.splitter.is_written = true;
        let first = (0..self.classes.len()).find(|&at| self.has_chunks(at));
        if let Some(first) = first {
            self.read_chunks(first);
        }
    }

    /// Returns about how many rows the share of the current window has.
    pub(super) fn split_rows(&self) -> usize {
        let Some(list) = self.splitter.coming else { return 0 };
        let on_disk = |class: &SizeClass| class.bucket(list).map_or(0, |bucket| bucket.row_count);
        let waiting = |class: &SizeClass| class.lists().count(list);
        let stored_count = self.classes.iter().map(on_disk).sum::<usize>();
        stored_count / self.splitter.spans.windows_left(self.current)
            + self.classes.iter().map(waiting).sum::<usize>()
    }

    /// Moves some rows of the coming span on; `None` where that would mean waiting and `may_wait`
    /// is false.
    pub(super) fn split(&mut self, at: usize, may_wait: bool) -> Result<Option<usize>> {
        let coming = self.splitter.coming;
        let (Some(list), Some(class)) = (coming, self.classes.get_mut(at)) else {
            self.stage = Stage::Leave(0, 0);
            return Ok(Some(0));
        };
        if self.splitter.dealt_bytes < self.splitter.len_bytes {
            return self.deal(may_wait);
        }
        // What waits in memory first: near spans are not written to.
        let rows = class.lists().last_rows(list, usize::MAX);
        if !rows.is_empty() {
            let row_count = rows.len() / (1 + class.words());
            self.splitter.stage(at, list, bytemuck::cast_slice(rows));
            class.forget_last_rows(list, row_count);
            return Ok(Some(1));
        }
        if self.has_chunks(at) {
            return Ok(self.fetch(at, list, may_wait)?.then_some(1));
        }
        self.stage = Stage::Split(at + 1);
        Ok(Some(0))
    }

    // Tells whether a size class has chunks left of this window's share.
    fn has_chunks(&self, at: usize) -> bool {
        let bucket = self.coming_bucket(at);
        bucket.is_some_and(|bucket| bucket.chunks.len() > self.splitter.left[at])
    }

    fn coming_bucket(&self, at: usize) -> Option<&Bucket> {
        self.classes.get(at)?.bucket(self.splitter.coming?)
    }

    // Asks for some of the last chunks of a size class's share, while there are buffers: a quarter
    // of them, as half may be those of the coming window.
    fn read_chunks(&mut self, at: usize) {
        let Some(list) = self.splitter.coming else { return };
        let Some(bucket) = self.classes[at].bucket(list) else { return };
        let chunks = &bucket.chunks;
        let Asked { class, first_chunk } = self.splitter.asked;
        let mut first = if class == at { first_chunk.min(chunks.len()) } else { chunks.len() };
        let left = self.splitter.left[at];
        while first > left && chunks.len() - first < (self.disk.depth() / 4).max(1) {
            let chunk = chunks[first - 1];
            let tag = read_tag(at, first - 1, 0);
            if !self.disk.try_read(chunk.offset_bytes(), chunk.len_bytes(), tag) {
                break;
            }
            first -= 1;
        }
        self.splitter.asked = Asked { class: at, first_chunk: first };
    }

    // Stages the last chunk of a size class's share; false while it is not there.
    fn fetch(&mut self, at: usize, list: usize, may_wait: bool) -> Result<bool> {
        if !self.splitter.is_written && !self.disk.writes_done(may_wait)? {
            return Ok(false);
        }
        self.splitter.is_written = true;
        let chunk_count = self.coming_bucket(at).map_or(0, |bucket| bucket.chunks.len());
        assert!(chunk_count > 0, "size class {at} has no chunk of list {list}");
        let tag = read_tag(at, chunk_count - 1, 0);
        loop {
            self.read_chunks(at);
            self.disk.poll(&mut self.arrived)?;
            if let Some(nth) = self.arrived.iter().position(|read| read.tag == tag) {
                let read = self.arrived.swap_remove(nth);
                let result = self.take_chunk(at, list, read.buf);
                self.disk.release(read.buf);
                result?;
                self.read_chunks(at);
                return Ok(true);
            }
            if !may_wait {
                return Ok(false);
            }
            self.disk.wait(&mut self.arrived)?;
        }
    }

    // Stages what a read of the last chunk brought; the chunk is gone then.
    fn take_chunk(&mut self, at: usize, list: usize, buf: BufId) -> Result<()> {
        let class = &mut self.classes[at];
        let Some(chunk) = class.take_last_chunk(list, &mut self.extents) else {
            panic!("a read arrived of an empty bucket: list {list} of size class {at}")
        };
        let bytes = &self.disk.bytes(buf)[..chunk.len_bytes()];
        let rows = check_chunk(&chunk, bytes, class.stored_bytes())?;
        self.splitter.stage(at, list, rows);
        class.note_arrivals(u64::from(chunk.row_count), 0);
        Ok(())
    }

    // Staged rows go to the lists of their windows, some at a time.
    fn deal(&mut self, may_wait: bool) -> Result<Option<usize>> {
        let splitter = &mut self.splitter;
        let class = &mut self.classes[splitter.class];
        let stored_bytes = class.stored_bytes();
        let rows = splitter.staged_rows(PIECE_ROWS * stored_bytes);
        let rows = SpanRows { list: splitter.list as u32, rows };
        let mut sink = Sink { disk: &mut self.disk, extents: &mut self.extents };
        let kept = class.keep_split(self.current, rows, &mut sink, may_wait)?;
        splitter.dealt_bytes += kept * stored_bytes;
        assert!(splitter.dealt_bytes <= splitter.len_bytes, "more rows are dealt than were staged");
        Ok((kept > 0).then_some(kept))
    }
}
