//! Flush of evicted rows to a delta run: sequential writes, then one registration.

#![expect(
    clippy::indexing_slicing,
    reason = "pages are cut to the table's page length, which holds the header"
)]

use crate::{seal, HEADER_BYTES};
use tierbed_core::{Result, RowKey};

use crate::cold::cost::PageRun;
use crate::cold::disk::Disk;
use crate::cold::run::{encode_keys, run_page, Run, DELTA_MAGIC, KEYS_MAGIC};
use crate::cold::table::{cut, key_extents, ColdTable};
use crate::cold::write_buffer::WriteBuffer;

/// Most bytes of an encoded key: row ids have 40 bits.
const KEY_BYTES_MAX: usize = 6;

/// Rows of one table in row order, with the places of their records in the write buffer.
pub(crate) type SortedRows<'a> = &'a [(RowKey, usize)];

/// What the pages of a run hold.
#[derive(Clone, Copy)]
struct RunContents<'a> {
    /// Encoded row ids.
    keys: &'a [u8],
    rows: SortedRows<'a>,
    /// Holds the records of `rows`.
    buffer: &'a WriteBuffer,
}

/// Pages found for a run, and what to give back if it is not written.
struct Placement {
    segments: Vec<PageRun>,
    taken: Vec<u32>,
    open: Option<(u32, u32)>,
}

/// A run that is being written.
pub(crate) struct BegunRun {
    run: Run,
    placement: Placement,
}

impl ColdTable {
    /// Begins to write `rows` as a new run. When no write is in flight any more,
    /// [`finish_run`](Self::finish_run) makes it the newest, or
    /// [`give_up_run`](Self::give_up_run) leaves the table as it was.
    ///
    /// # Errors
    /// `NoSpace`, `Io`: the table is as before.
    pub(crate) fn begin_run(
        &mut self,
        disk: &mut Disk,
        rows: SortedRows<'_>,
        buffer: &WriteBuffer,
    ) -> Result<BegunRun> {
        assert!(!rows.is_empty(), "a run has rows");
        let keys = encode_keys(rows.iter().map(|(key, _)| key.row.0));
        let version = self.take_version()?;
        let key_pages = keys.len().div_ceil(self.payload_bytes());
        let record_pages = rows.len().div_ceil(self.geometry.delta_slots as usize);
        let placement = self.place((key_pages + record_pages) as u32)?;
        let run = Run {
            version,
            row_count: rows.len() as u32,
            live_rows: rows.len() as u32,
            key_bytes: keys.len() as u32,
            segments: placement.segments.clone(),
        };
        let begun = BegunRun { run, placement };
        let contents = RunContents { keys: &keys, rows, buffer };
        if let Err(error) = self.write_pages(disk, &begun.run, contents) {
            // Writes still in flight must not meet the extent's next owner.
            let _ = disk.finish_writes();
            self.give_up_run(&begun);
            return Err(error.with("file", &self.file));
        }
        Ok(begun)
    }

    /// Makes a run whose pages are written, of `rows`, the newest; returns its bytes.
    pub(crate) fn finish_run(&mut self, begun: BegunRun, rows: SortedRows<'_>) -> u64 {
        let BegunRun { run, placement } = begun;
        assert!(run.row_count as usize == rows.len(), "the run was begun with these rows");
        self.is_dirty = true;
        let bytes = run.page_count() * self.geometry.page_bytes() as u64;
        self.register(run, rows, placement.open);
        bytes
    }

    /// Gives back what a run took that is not to be.
    pub(crate) fn give_up_run(&mut self, begun: &BegunRun) {
        begun.placement.taken.iter().for_each(|extent| self.extents.release(*extent));
    }

    /// Returns the most bytes of extents that a run of `row_count` rows may take.
    pub(crate) fn run_bytes_max(&self, row_count: usize) -> u64 {
        let key_pages = (KEY_BYTES_MAX * row_count).div_ceil(self.payload_bytes());
        let pages = key_pages + row_count.div_ceil(self.geometry.delta_slots as usize);
        (pages as u64).div_ceil(self.geometry.range_pages) * self.extent_bytes()
    }

    // Finds `page_count` pages: the rest of the open extent, then new extents.
    fn place(&mut self, page_count: u32) -> Result<Placement> {
        let range_pages = self.geometry.range_pages as u32;
        let mut placement = Placement { segments: Vec::new(), taken: Vec::new(), open: self.open };
        let mut left = page_count;
        while left > 0 {
            let (extent, used) = match placement.open.filter(|(_, used)| *used < range_pages) {
                Some(open) => open,
                None => match self.take_extent() {
                    Ok(extent) => {
                        placement.taken.push(extent);
                        (extent, 0)
                    }
                    Err(error) => {
                        placement.taken.iter().for_each(|extent| self.extents.release(*extent));
                        return Err(error);
                    }
                },
            };
            let count = left.min(range_pages - used);
            let first = self.geometry.first_page(extent) + used;
            placement.segments.push(PageRun { first, count });
            placement.open = Some((extent, used + count));
            left -= count;
        }
        Ok(placement)
    }

    fn write_pages(&self, disk: &mut Disk, run: &Run, contents: RunContents<'_>) -> Result<()> {
        let RunContents { keys, rows, buffer } = contents;
        let (page_bytes, slots) = (self.geometry.page_bytes(), self.geometry.delta_slots as usize);
        let pages_max = disk.pages_max(self.pages);
        let mut keys = keys.chunks(self.payload_bytes());
        let mut rows = rows.chunks(slots);
        for segment in &run.segments {
            for piece in cut(segment.first, segment.count, pages_max) {
                let buf = disk.write_buf()?;
                let bytes = disk.bytes_mut(buf);
                for (page, number) in
                    bytes.chunks_exact_mut(page_bytes).zip(piece.first..piece.end())
                {
                    page.fill(0);
                    let magic = match keys.next() {
                        Some(keys) => {
                            fill(page, keys);
                            KEYS_MAGIC
                        }
                        None => {
                            let Some(rows) = rows.next() else {
                                panic!("a run has as many pages as its keys and rows fill")
                            };
                            self.fill_records(page, rows, buffer);
                            DELTA_MAGIC
                        }
                    };
                    seal(page, run_page(magic, self.owner, number, run.version));
                }
                disk.write(self.pages, piece, buf);
            }
        }
        assert!(keys.next().is_none() && rows.next().is_none(), "every key and row has a page");
        Ok(())
    }

    fn fill_records(&self, page: &mut [u8], rows: SortedRows<'_>, buffer: &WriteBuffer) {
        let record_bytes = self.record_bytes();
        assert!(rows.len() <= self.geometry.delta_slots as usize, "a page has a slot per row");
        for (place, (_, at)) in page[HEADER_BYTES..].chunks_exact_mut(record_bytes).zip(rows) {
            place.copy_from_slice(buffer.record(*at, record_bytes));
        }
    }

    fn register(&mut self, run: Run, rows: SortedRows<'_>, open: Option<(u32, u32)>) {
        let version = run.version;
        for segment in &run.segments {
            let extent = self.geometry.extent_of(segment.first);
            self.add_part(extent, segment.first - self.geometry.first_page(extent), version);
        }
        // First the rows: an extent without any would be given back when the next one is opened.
        self.index_run(run, rows.iter().map(|(key, _)| key.row.0));
        self.set_open(open);
    }

    /// Makes `rows` of `run` known as the newest of all, except where the base is newer still.
    pub(crate) fn index_run(&mut self, mut run: Run, rows: impl Iterator<Item = u64>) {
        let slots = self.geometry.delta_slots;
        let key_pages = run.key_page_count(self.payload_bytes());
        let geometry = self.geometry;
        let places = run
            .pages()
            .skip(key_pages)
            .flat_map(|page| (0..slots).map(move |slot| page * slots + slot));
        let mut placed = rows
            .zip(places)
            .map(|(row, loc)| {
                let (range, at) = geometry.range_of(row);
                (range, at, loc)
            })
            .peekable();
        let (mut newer, mut replaced, mut live) = (Vec::new(), Vec::new(), 0);
        let mut owned = None;
        while let Some(&(range, _, _)) = placed.peek() {
            newer.clear();
            while let Some((_, at, loc)) = placed.next_if(|row| row.0 == range) {
                // In a run that was opened again, pages of outdated rows may be another's now.
                let page = geometry.delta_place(loc).0;
                if owned != Some(page) && self.version_of_page(page) != Some(run.version) {
                    continue;
                }
                owned = Some(page);
                newer.push((at, loc));
            }
            if self.range(range).version > run.version {
                continue;
            }
            live += newer.len() as u32;
            for (_, loc) in &newer {
                self.add_live(geometry.extent_of(geometry.delta_place(*loc).0), 1);
            }
            self.index.insert(range, &newer, &mut replaced);
        }
        drop(placed);
        run.live_rows = live;
        for extent in key_extents(&geometry, &run) {
            self.add_live(extent, 1);
        }
        let version = run.version;
        let before = self.runs.insert(version, run);
        assert!(before.is_none(), "version {version} is given once");
        if live == 0 {
            self.drop_run(version);
        }
        replaced.into_iter().for_each(|loc| self.kill(loc));
    }
}

// Puts `payload` behind the header.
fn fill(page: &mut [u8], payload: &[u8]) {
    page[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
}
