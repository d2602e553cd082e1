//! Extents, chunks and buckets: the division of the file of rows.
//!
//! The file is cut into *extents*. A *bucket* is a chain of *chunks*, each a run of pages inside
//! one extent, written once and never changed, with its checksum kept in memory and in the
//! checkpoint: a lost or misdirected write is found because the checksum is elsewhere. Extents of
//! a consumed bucket that the last checkpoint needs are *quarantined* until the next one.

use std::ops::Range;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::PAGE_BYTES;
use tierbed_store::ExtentPool;

/// Space of the file is taken ahead of need: the file's length divided by this.
const RESERVE_SHARE: u32 = 64;
/// A bucket has memory for a few chunks more, and for its chunks divided by this.
const CHUNKS_SPARE_SHARE: usize = 8;

/// A run of records written at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// First page in the file.
    pub(crate) page: u32,
    /// Pages.
    pub(crate) page_count: u32,
    /// Records.
    pub(crate) row_count: u32,
    /// CRC32C of all pages.
    pub(crate) crc32c: u32,
}

impl Chunk {
    pub(crate) fn offset_bytes(&self) -> u64 {
        u64::from(self.page) * PAGE_BYTES as u64
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.page_count as usize * PAGE_BYTES
    }

    fn end_page(&self) -> u32 {
        self.page + self.page_count
    }
}

/// The rows on disk that wait for one window.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bucket {
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) row_count: usize,
}

/// The extents of the file.
#[derive(Debug)]
pub(crate) struct Extents {
    extent_pages: u32,
    /// Most bytes of the folder, and what its other files take.
    quota_bytes: Option<u64>,
    other_bytes: u64,
    /// Extents whose disk space was asked for.
    reserved_count: u32,
    pool: ExtentPool,
}

impl Bucket {
    /// Adds a chunk. Memory grows by little at a time: it counts against the budget, and doubling
    /// would take too much of it.
    pub(crate) fn push(&mut self, chunk: Chunk) {
        let count = self.chunks.len();
        if count == self.chunks.capacity() {
            self.chunks.reserve_exact(spare_chunks(count));
        }
        self.chunks.push(chunk);
        self.row_count += chunk.row_count as usize;
    }

    /// Takes the last chunk out, and gives memory back: what was read fills again slowly.
    ///
    /// # Panics
    /// When the chunk has more rows than the bucket.
    pub(crate) fn pop(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.pop()?;
        let row_count = chunk.row_count as usize;
        assert!(row_count <= self.row_count, "{chunk:?} is more than the bucket has");
        self.row_count -= row_count;
        let count = self.chunks.len();
        if self.chunks.capacity() > count + 2 * spare_chunks(count) {
            self.chunks.shrink_to(count + spare_chunks(count));
        }
        Some(chunk)
    }
}

// Chunks more than there are, so that few of them are copied for each that is added.
fn spare_chunks(count: usize) -> usize {
    2 + count / CHUNKS_SPARE_SHARE
}

impl Extents {
    /// Starts with the extents that `chunks` of the last checkpoint lie in.
    pub(crate) fn new<'a>(
        extent_bytes: usize,
        quota_bytes: Option<u64>,
        chunks: impl Iterator<Item = &'a Chunk> + 'a,
    ) -> Self {
        let extent_pages = (extent_bytes / PAGE_BYTES) as u32;
        assert!(extent_pages > 0, "an extent of {extent_bytes} bytes has no page");
        let pool = ExtentPool::new(extents_of(extent_pages, chunks));
        Self { extent_pages, quota_bytes, other_bytes: 0, reserved_count: pool.count(), pool }
    }

    /// Takes note that the other files of the folder take `bytes`: the quota is for all.
    pub(crate) fn set_other_bytes(&mut self, bytes: u64) {
        self.other_bytes = bytes;
    }

    // Most extents the file may have.
    fn count_max(&self) -> u32 {
        let most = u32::MAX / self.extent_pages;
        let Some(quota) = self.quota_bytes else { return most };
        let count = quota.saturating_sub(self.other_bytes) / self.extent_bytes();
        u32::try_from(count).map_or(most, |count| count.min(most))
    }

    fn extent_bytes(&self) -> u64 {
        u64::from(self.extent_pages) * PAGE_BYTES as u64
    }

    /// Returns the bytes of the file whose disk space was taken.
    pub(crate) fn taken_bytes(&self) -> u64 {
        u64::from(self.reserved_count.max(self.pool.count())) * self.extent_bytes()
    }

    /// Returns the pages that `bucket` may still fill behind its last chunk.
    fn room(&self, bucket: &Bucket) -> Option<(u32, u32)> {
        let end = bucket.chunks.last()?.end_page();
        let left = end.next_multiple_of(self.extent_pages) - end;
        (left > 0).then_some((end, left))
    }

    /// Finds a place for at most `pages_max` pages, at least 1, behind `bucket`'s chunks or in a
    /// new extent: first page and number of pages. `pages_min` pages must lie together.
    ///
    /// # Errors
    /// `NoSpace` when the quota is reached.
    ///
    /// # Panics
    /// When an extent is shorter than `pages_min`.
    pub(crate) fn place(
        &mut self,
        bucket: &Bucket,
        pages_min: u32,
        pages_max: u32,
    ) -> Result<(u32, u32)> {
        let fits = 1 <= pages_min && pages_min <= pages_max.min(self.extent_pages);
        assert!(fits, "{pages_min} to {pages_max} pages in extents of {}", self.extent_pages);
        if let Some((page, left)) = self.room(bucket).filter(|(_, left)| *left >= pages_min) {
            return Ok((page, left.min(pages_max)));
        }
        let extent = self.pool.take(self.count_max()).ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "disk quota reached")
                .with("extents", self.pool.count())
                .with("extent_bytes", self.extent_bytes())
                .with("other_bytes", self.other_bytes)
                .with("remedy", "raise disk_quota")
        })?;
        Ok((extent * self.extent_pages, self.extent_pages.min(pages_max)))
    }

    /// Returns the range of the file whose space is to be taken now, when it grew: what is needed
    /// and a [`RESERVE_SHARE`] more, within the quota.
    pub(crate) fn take_growth(&mut self) -> Option<Range<u64>> {
        let count = self.pool.count();
        if count <= self.reserved_count {
            return None;
        }
        let spare = (count / RESERVE_SHARE).max(1);
        let end = count.saturating_add(spare).min(self.count_max()).max(count);
        let start = std::mem::replace(&mut self.reserved_count, end);
        Some(u64::from(start) * self.extent_bytes()..u64::from(end) * self.extent_bytes())
    }

    /// Takes the extents of a consumed bucket back, at once or after the next checkpoint.
    ///
    /// # Panics
    /// When one was never taken.
    pub(crate) fn release(&mut self, bucket: &Bucket) {
        for extent in extents_of(self.extent_pages, bucket.chunks.iter()) {
            self.pool.release(extent);
        }
    }

    /// Takes the extent of a consumed chunk back, unless the chunks before it in its bucket lie
    /// there too.
    pub(crate) fn release_last(&mut self, chunk: Chunk, before: &Bucket) {
        let is_shared = before
            .chunks
            .last()
            .is_some_and(|last| last.page / self.extent_pages == chunk.page / self.extent_pages);
        if !is_shared {
            self.release(&Bucket { chunks: vec![chunk], row_count: 0 });
        }
    }

    /// A checkpoint that needs `chunks`, which are all there are, came into force.
    pub(crate) fn commit<'a>(&mut self, chunks: impl Iterator<Item = &'a Chunk> + 'a) {
        self.pool.commit();
        let mut needed = extents_of(self.extent_pages, chunks);
        debug_assert!(needed.all(|at| self.pool.is_committed(at)), "a free extent is needed");
    }

    /// Returns the bytes up to the end of the last extent that the last checkpoint needs.
    pub(crate) fn committed_bytes(&self) -> u64 {
        let last = (0..self.pool.count()).rev().find(|&at| self.pool.is_committed(at));
        last.map_or(0, |last| u64::from(last) + 1) * self.extent_bytes()
    }

    /// Returns the bytes of all extents ever used.
    pub(crate) fn file_bytes(&self) -> u64 {
        u64::from(self.pool.count()) * self.extent_bytes()
    }

    /// Returns the extents that only the last checkpoint needs.
    pub(crate) fn quarantined_count(&self) -> u32 {
        self.pool.quarantined_count()
    }

    /// Returns the extents in use or quarantined.
    pub(crate) fn used_count(&self) -> u32 {
        self.pool.used_count()
    }
}

// Chunks of one bucket fill extent after extent, so equal ones follow each other.
fn extents_of<'a>(
    extent_pages: u32,
    chunks: impl Iterator<Item = &'a Chunk> + 'a,
) -> impl Iterator<Item = u32> + 'a {
    let mut last = None;
    chunks.filter_map(move |chunk| {
        let extent = Some(chunk.page / extent_pages);
        let is_new = extent != last;
        last = extent;
        extent.filter(|_| is_new)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(extents: &mut Extents, bucket: &mut Bucket, pages: u32) {
        let (page, page_count) = extents.place(bucket, 1, pages).unwrap();
        bucket.chunks.push(Chunk { page, page_count, row_count: 1, crc32c: 0 });
    }

    #[test]
    fn lists_of_chunks_take_little_more_memory_than_chunks() {
        let mut bucket = Bucket::default();
        let chunk = Chunk { page: 0, page_count: 1, row_count: 3, crc32c: 0 };
        let has_little_spare = |bucket: &Bucket| {
            let count = bucket.chunks.len();
            bucket.chunks.capacity() <= count + 2 * spare_chunks(count)
        };
        let counts = [500, 20, 501, 0, 3, 0];
        for count in counts {
            while bucket.chunks.len() < count {
                bucket.push(chunk);
                assert!(has_little_spare(&bucket));
            }
            while bucket.chunks.len() > count {
                assert_eq!(bucket.pop(), Some(chunk));
                assert!(has_little_spare(&bucket), "{}", bucket.chunks.capacity());
            }
            assert_eq!(bucket.row_count, 3 * count);
        }
        assert!(bucket.pop().is_none());
    }

    #[test]
    fn a_bucket_fills_its_extent_before_it_takes_another() {
        let mut extents = Extents::new(4 * PAGE_BYTES, None, [].iter());
        let (mut a, mut b) = (Bucket::default(), Bucket::default());
        fill(&mut extents, &mut a, 3);
        fill(&mut extents, &mut b, 2);
        fill(&mut extents, &mut a, 3);
        fill(&mut extents, &mut a, 3);
        let pages: Vec<_> = a.chunks.iter().map(|chunk| (chunk.page, chunk.page_count)).collect();
        assert_eq!(pages, [(0, 3), (3, 1), (8, 3)]);
        assert_eq!(extents.used_count(), 3);
        extents.release(&a);
        assert_eq!(extents.used_count(), 1);
    }

    #[test]
    fn what_a_checkpoint_needs_waits_for_the_next_one() {
        let mut extents = Extents::new(PAGE_BYTES, None, [].iter());
        let (mut a, mut b) = (Bucket::default(), Bucket::default());
        fill(&mut extents, &mut a, 1);
        fill(&mut extents, &mut b, 1);
        extents.commit(a.chunks.iter().chain(&b.chunks));
        extents.release(&a);
        assert_eq!((extents.used_count(), extents.quarantined_count()), (2, 1));
        extents.commit(b.chunks.iter());
        assert_eq!(extents.used_count(), 1);
        let reopened = Extents::new(PAGE_BYTES, None, b.chunks.iter());
        assert_eq!(reopened.used_count(), 1);
    }

    #[test]
    fn space_is_taken_a_little_ahead_and_within_the_quota() {
        let page = PAGE_BYTES as u64;
        let mut extents = Extents::new(PAGE_BYTES, Some(130 * page), [].iter());
        let mut bucket = Bucket::default();
        assert_eq!(extents.take_growth(), None);
        fill(&mut extents, &mut bucket, 1);
        assert_eq!(extents.take_growth(), Some(0..2 * page));
        fill(&mut extents, &mut bucket, 1);
        assert_eq!(extents.take_growth(), None);
        (2..129).for_each(|_| fill(&mut extents, &mut bucket, 1));
        assert_eq!(extents.take_growth(), Some(2 * page..130 * page));
    }

    #[test]
    fn the_quota_is_kept() {
        let mut extents = Extents::new(PAGE_BYTES, Some(2 * PAGE_BYTES as u64 + 5), [].iter());
        let bucket = Bucket::default();
        assert!(extents.place(&bucket, 1, 1).is_ok());
        assert!(extents.place(&bucket, 1, 1).is_ok());
        assert_eq!(extents.place(&bucket, 1, 1).unwrap_err().kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn other_files_leave_less_of_the_quota() {
        let page = PAGE_BYTES as u64;
        let mut extents = Extents::new(PAGE_BYTES, Some(3 * page), [].iter());
        extents.set_other_bytes(page + 1);
        let bucket = Bucket::default();
        assert!(extents.place(&bucket, 1, 1).is_ok());
        assert_eq!(extents.place(&bucket, 1, 1).unwrap_err().kind(), ErrorKind::NoSpace);
        extents.set_other_bytes(0);
        assert!(extents.place(&bucket, 1, 1).is_ok());
    }
}
