//! How do the pages of one call come in? One engine and one scratch per concurrent call.
//!
//! ```text
//! plain tables   rows by page ────────────────┐
//! placements     rows ─▶ choose a page ─▶ submit it, choose the next ─▶ … ─▶ land: check, copy out
//!                              ▲                                                  │ bad page
//!                              └──────────── another page of the same row ◀───────┘
//! ```
//!
//! Choosing goes on while what was chosen flies. Source: MaxEmbed §6.2.

use std::sync::Arc;

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, ErrorKind, Result, RowId, RowKey, TableId};
use tierbed_io::{
    open_engine, Completion, Depth, Device, DeviceId, EngineOptions, IoEngine, Op, Request,
    PAGE_BYTES,
};
use tierbed_placement::select;

use crate::page::{PageShape, PageView};
use crate::places::Places;
use crate::scratch::{AskedItem, Filled, Scratch, Wanted};
use crate::snapshot::SelectOptions;

/// Chosen pages that share a system call; the first of a call goes at once.
const HAND_OVER_PAGES: usize = 4;

/// What a reader must know of a snapshot.
pub(crate) struct Source<'a> {
    pub(crate) pages: &'a PageTable,
    pub(crate) places: &'a Places,
    pub(crate) options: SelectOptions,
}

/// What a reader must know of the page file.
#[derive(Debug)]
pub(crate) struct PageTable {
    /// By owner: the tables, then the placements.
    pub(crate) shapes: Vec<PageShape>,
    pub(crate) path: String,
}

impl Source<'_> {
    /// Returns how pages name a row: their owner, and its number there.
    fn seat_of(&self, key: RowKey) -> (TableId, RowId) {
        match self.places.starts.find(key) {
            None => (key.table, key.row),
            Some((placement, item)) => {
                let table_count = self.pages.shapes.len() - self.places.placements.len();
                (TableId(table_count as u32 + placement), RowId(u64::from(item)))
            }
        }
    }

    /// Returns the pages of a row that may be read, the most useful first; none for rows of
    /// tables with pages of their own.
    fn pages_of(&self, key: RowKey) -> impl Iterator<Item = u64> + '_ {
        let found = self.places.starts.find(key);
        let found = found.and_then(|(at, item)| Some((self.places.get(at)?, item)));
        found.into_iter().flat_map(|(placement, item)| {
            let pages = placement.index.pages_of(item);
            pages.iter().map(|&page| placement.first_page + u64::from(page))
        })
    }
}

/// Pages that a call read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PagesRead {
    pub(crate) pages_read: u64,
    /// Of these, pages that could not be read or failed their checks.
    pub(crate) pages_failed: u64,
    /// Rows of such pages that other pages gave.
    pub(crate) rows_recovered: u64,
}

/// An engine over the page file, and a scratch.
pub(crate) struct Reader {
    /// Its place among the readers of a snapshot.
    pub(crate) number: usize,
    flights: Flights,
    pub(crate) scratch: Scratch,
    choice: Choice,
}

/// Memory for choosing pages.
#[derive(Default)]
struct Choice {
    items: Vec<u32>,
    scratch: select::Scratch,
}

/// Bytes of a [`Choice`] per row.
pub(crate) const CHOICE_BYTES_PER_ROW: usize = size_of::<u32>() + select::Scratch::BYTES_PER_ROW;

impl Reader {
    pub(crate) fn new(
        number: usize,
        options: &EngineOptions,
        pages: &Arc<dyn Device>,
        scratch: Scratch,
    ) -> Result<Self> {
        let mut engine = open_engine(options)?;
        let device = engine.attach(Arc::clone(pages));
        let flights = Flights {
            engine,
            device,
            depth: Depth::new(options.queue_depth, options.queue_depth),
            clock: SystemClock::default(),
            done: Vec::new(),
            queued_count: 0,
            failed: None,
            failed_pages: Vec::new(),
            retries: Vec::new(),
            counts: PagesRead::default(),
        };
        Ok(Self { number, flights, scratch, choice: Choice::default() })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.flights.engine.memory_bytes() + self.scratch.memory_bytes()
    }

    /// Returns how many pages the reader lets fly at once, as it found out.
    pub(crate) fn queue_depth(&self) -> u32 {
        self.flights.depth.limit()
    }

    pub(crate) fn io_stats(&self) -> IoStats {
        self.flights.engine.stats()
    }

    /// Reads the pages named in the scratch's `wanted`, and the pages it chooses for the rows in
    /// `asked`, each once, and copies the rows out into the scratch's words.
    ///
    /// # Errors
    /// `Corruption` for a page that fails its checks or lacks a row the index promised, `Io`
    /// from the device; not when other pages have the rows.
    pub(crate) fn read(&mut self, source: &Source<'_>) -> Result<PagesRead> {
        let Self { flights, scratch, choice, .. } = self;
        (flights.counts, flights.queued_count) = (PagesRead::default(), 0);
        flights.failed_pages.clear();
        scratch.wanted.sort_unstable();
        flights.submit_from(scratch, 0, source);
        let mut asked = std::mem::take(&mut scratch.asked);
        asked.sort_unstable_by_key(|asked| asked.placement);
        let chosen_from = scratch.wanted.len();
        for asked in asked.chunk_by(|a, b| a.placement == b.placement) {
            choice.choose(asked, source, |page_id, served| {
                let first = scratch.wanted.len();
                let rows = served.iter().filter_map(|&position| asked.get(position as usize));
                scratch.wanted.extend(rows.map(|asked| Wanted { page_id, at: asked.at, part: 0 }));
                if source.options.is_pipelined {
                    flights.submit(scratch, first, source);
                    flights.hand_over(scratch, source);
                }
            });
        }
        scratch.asked = asked;
        if !source.options.is_pipelined {
            flights.submit_from(scratch, chosen_from, source);
        }
        flights.finish(scratch, source)
    }
}

impl Choice {
    /// Chooses pages of one placement; `take` is given the page and positions in `asked`.
    fn choose(
        &mut self,
        asked: &[AskedItem],
        source: &Source<'_>,
        mut take: impl FnMut(u64, &[u32]),
    ) {
        let placement = asked.first().and_then(|asked| source.places.get(asked.placement));
        let Some(placement) = placement else { return };
        self.items.clear();
        self.items.extend(asked.iter().map(|asked| asked.item));
        let (index, first_page) = (&placement.index, placement.first_page);
        source.options.selection.select(index, &self.items, &mut self.scratch, |page, served| {
            take(first_page + u64::from(page), served)
        });
    }
}

/// The pages of a call on their way.
struct Flights {
    engine: Box<dyn IoEngine>,
    device: DeviceId,
    depth: Depth,
    clock: SystemClock,
    done: Vec<Completion>,
    /// Submitted since the last system call.
    queued_count: usize,
    /// After a failure nothing new is submitted, but what flies must land: the engine is used by
    /// the next call.
    failed: Option<Error>,
    failed_pages: Vec<u64>,
    /// First wanted rows of pages to be read in place of failed ones.
    retries: Vec<usize>,
    counts: PagesRead,
}

impl Flights {
    /// Submits the pages of all wanted rows from `first` on.
    fn submit_from(&mut self, scratch: &mut Scratch, first: usize, source: &Source<'_>) {
        let (mut next, end) = (first, scratch.wanted.len());
        while next < end && self.failed.is_none() {
            self.submit(scratch, next, source);
            next += group_len(&scratch.wanted, next);
        }
    }

    /// Tells whether as many pages fly as the device needs.
    fn is_full(&self) -> bool {
        self.engine.in_flight_count() >= self.depth.limit() as usize
    }

    /// Submits the page of the wanted row `first`, for it and those behind it on the same page.
    fn submit(&mut self, scratch: &mut Scratch, first: usize, source: &Source<'_>) {
        let buf = loop {
            if self.failed.is_some() {
                return;
            }
            match if self.is_full() { None } else { self.engine.acquire() } {
                Some(buf) => break buf,
                None => self.land(scratch, source, true),
            }
        };
        let page_id = scratch.wanted.get(first).map_or(0, |wanted| wanted.page_id);
        self.engine.submit(Request {
            device: self.device,
            op: Op::Read,
            offset_bytes: page_id * PAGE_BYTES as u64,
            len_bytes: PAGE_BYTES as u32,
            buf,
            tag: first as u64,
        });
        self.counts.pages_read += 1;
        self.queued_count += 1;
    }

    /// Hands queued pages to the kernel when the device has nothing else to do, or there are
    /// enough of them for a system call.
    fn hand_over(&mut self, scratch: &mut Scratch, source: &Source<'_>) {
        let is_idle = self.queued_count == self.engine.in_flight_count();
        if self.queued_count > 0 && (is_idle || self.queued_count >= HAND_OVER_PAGES) {
            self.land(scratch, source, false);
        }
    }

    /// Waits for everything, failed pages' substitutes included.
    fn finish(&mut self, scratch: &mut Scratch, source: &Source<'_>) -> Result<PagesRead> {
        loop {
            while let Some(first) = self.retries.pop() {
                self.submit(scratch, first, source);
            }
            if self.engine.in_flight_count() == 0 {
                break;
            }
            self.land(scratch, source, true);
        }
        self.failed.take().map_or(Ok(self.counts), Err)
    }

    /// Takes the rows out of the pages that have come; waits for one if told so.
    fn land(&mut self, scratch: &mut Scratch, source: &Source<'_>, is_waiting: bool) {
        self.queued_count = 0;
        let is_busy = !is_waiting || self.is_full();
        let mut done = std::mem::take(&mut self.done);
        let landed =
            if is_waiting { self.engine.wait(&mut done) } else { self.engine.poll(&mut done) };
        if let Err(error) = landed {
            self.failed.get_or_insert(error);
        }
        match is_busy {
            true => self.depth.landed(done.len() as u32, self.clock.now_us()),
            false => self.depth.idle(),
        }
        for completion in done.drain(..) {
            let first = completion.tag as usize;
            let read = completion.result.map_err(|error| {
                // The device names its file.
                error.with("page_id", scratch.wanted.get(first).map_or(0, |wanted| wanted.page_id))
            });
            let taken = read.and_then(|()| {
                let bytes = self.engine.bytes(completion.buf).get(..PAGE_BYTES).unwrap_or_default();
                take_rows(scratch, first, bytes, source)
            });
            self.engine.release(completion.buf);
            if let Err(error) = taken {
                if self.failed.is_none() && !self.recover(scratch, first, source, &error) {
                    self.failed = Some(error);
                }
            }
        }
        self.done = done;
    }

    /// Looks for other pages of the rows wanted from a failed page; `false` when a row has none.
    fn recover(
        &mut self,
        scratch: &mut Scratch,
        first: usize,
        source: &Source<'_>,
        error: &Error,
    ) -> bool {
        let page_id = scratch.wanted.get(first).map_or(0, |wanted| wanted.page_id);
        self.failed_pages.push(page_id);
        self.counts.pages_failed += 1;
        if !matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Io) {
            return false;
        }
        let start = scratch.wanted.len();
        for entry in first..first + group_len(&scratch.wanted, first) {
            let at = scratch.wanted.get(entry).map_or(0, |wanted| wanted.at);
            if scratch.filled.get(at as usize) == Some(&Filled::Read) {
                continue;
            }
            let key = scratch.keys.get(at as usize);
            let other = key.and_then(|&key| {
                source.pages_of(key).find(|page_id| !self.failed_pages.contains(page_id))
            });
            let Some(page_id) = other else { return false };
            scratch.wanted.push(Wanted { page_id, at, part: 0 });
            self.counts.rows_recovered += 1;
        }
        scratch.wanted.get_mut(start..).unwrap_or_default().sort_unstable();
        let mut next = start;
        while next < scratch.wanted.len() {
            self.retries.push(next);
            next += group_len(&scratch.wanted, next);
        }
        true
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("number", &self.number).finish_non_exhaustive()
    }
}

fn group_len(wanted: &[Wanted], first: usize) -> usize {
    let rest = wanted.get(first..).unwrap_or_default();
    let page = rest.first().map(|wanted| wanted.page_id);
    rest.iter().take_while(|wanted| Some(wanted.page_id) == page).count()
}

fn take_rows(scratch: &mut Scratch, first: usize, bytes: &[u8], source: &Source<'_>) -> Result<()> {
    let pages = source.pages;
    let page_id = scratch.wanted.get(first).map_or(0, |wanted| wanted.page_id);
    let named =
        |error: Error| error.with("path", &pages.path).with("remedy", "publish the snapshot again");
    let page = PageView::parse(bytes, page_id, &pages.shapes).map_err(named)?;
    for entry in first..first + group_len(&scratch.wanted, first) {
        let Some(wanted) = scratch.wanted.get(entry).copied() else { break };
        let at = wanted.at as usize;
        let Some(key) = scratch.keys.get(at).copied() else { break };
        let (owner, row) = source.seat_of(key);
        let weights = (page.owner == owner && page.part == wanted.part as usize)
            .then(|| page.find(row))
            .flatten();
        let Some(weights) = weights else {
            return Err(named(
                Error::corruption("page lacks a row that the forward index puts there")
                    .with("page_id", page_id)
                    .with("table_id", key.table.0)
                    .with("row", key.row.0),
            ));
        };
        let shape = pages.shapes.get(owner.0 as usize);
        let (before, count) = shape.map_or((0, 0), |shape| shape.part_words(page.part));
        let out: &mut [u8] = bytemuck::cast_slice_mut(scratch.row_mut(at, before, count));
        if out.len() == weights.len() {
            out.copy_from_slice(weights);
        }
        scratch.mark(at, Filled::Read);
    }
    Ok(())
}
