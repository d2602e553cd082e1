//! Page reads in flight, and the rows that wait for each of them.
#![expect(
    clippy::indexing_slicing,
    reason = "entries are those that were wanted when a page was submitted"
)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Completion, Depth, Device, DeviceId, IoEngine, Op, Request, PAGE_BYTES};

use super::{PagesRead, Source};
use crate::layers::{Layers, PagePlace};
use crate::page::PageView;
use crate::scratch::{Filled, RowPart, Scratch, Wanted};

/// Chosen pages that share a system call; the first of many goes at once.
const HAND_OVER_PAGES: usize = 4;
/// Pages for so few rows are chosen sooner than a system call returns: they go together.
const FEW_ROWS: usize = 16;

/// The scratches that pages are wanted for: the one that deals now, and the other.
pub(super) struct Wanting<'a> {
    pub(super) scratch: &'a mut Scratch,
    pub(super) other: Option<&'a mut Scratch>,
}

/// The pages of one scratch on their way.
#[derive(Default)]
struct Part {
    flying_count: usize,
    /// First wanted rows of pages to be read in place of failed ones.
    retries: Vec<usize>,
    counts: PagesRead,
}

/// Where a request's tag says for which scratch it is; the bits above are the first wanted row.
const TURN_MASK: u64 = 1;

/// A page on its way.
#[derive(Debug, Clone, Copy)]
struct Flight {
    /// First wanted row that it brings.
    first: usize,
    /// The scratch that wants it.
    turn: u64,
}

impl Flight {
    fn of_tag(tag: u64) -> Self {
        Self { first: (tag >> 1) as usize, turn: tag & TURN_MASK }
    }

    fn tag(self) -> u64 {
        assert!(self.turn <= TURN_MASK, "scratch {} of two", self.turn);
        ((self.first as u64) << 1) | self.turn
    }
}

/// When pages are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Landing {
    /// When more are handed over: the device has enough to do.
    HandOver,
    /// When the ring tells that some have come.
    Ready,
    /// When there is nothing else to do: one is waited for.
    Wait,
}

/// The pages of a call on their way.
pub(super) struct Flights {
    engine: Box<dyn IoEngine>,
    device: DeviceId,
    /// Generation and page file of each delta.
    overlays: Vec<(u64, DeviceId)>,
    depth: Depth,
    clock: SystemClock,
    done: Vec<Completion>,
    /// Submitted since the last system call.
    queued_count: usize,
    /// After a failure nothing new is submitted, but what flies must land: the engine is used by
    /// the next call.
    failed: Option<Error>,
    failed_pages: Vec<u64>,
    /// The engine could not wait for what flies: it takes nothing new.
    is_stuck: bool,
    /// The scratch that deals now.
    turn: u64,
    /// By scratch.
    parts: [Part; 2],
}

impl Flights {
    pub(super) fn new(mut engine: Box<dyn IoEngine>, pages: &Arc<dyn Device>, depth: u32) -> Self {
        Self {
            device: engine.attach(Arc::clone(pages)),
            overlays: Vec::new(),
            engine,
            depth: Depth::new(depth, depth),
            clock: SystemClock::default(),
            done: Vec::new(),
            queued_count: 0,
            failed: None,
            failed_pages: Vec::new(),
            is_stuck: false,
            turn: 0,
            parts: Default::default(),
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.engine.memory_bytes()
    }

    /// Returns how many pages fly at once, as found out.
    pub(super) fn depth(&self) -> u32 {
        self.depth.limit()
    }

    pub(super) fn stats(&self) -> IoStats {
        self.engine.stats()
    }

    /// Forgets which pages failed.
    pub(super) fn begin(&mut self, layers: &Layers) {
        self.failed_pages.clear();
        self.attach(layers);
    }

    /// Opens the page files of `layers`, and closes those of other deltas.
    pub(super) fn attach(&mut self, layers: &Layers) {
        let attached = self.overlays.iter().map(|(number, _)| *number);
        if attached.eq(layers.overlays.iter().map(|overlay| overlay.number)) {
            return;
        }
        self.overlays.drain(..).for_each(|(_, device)| self.engine.detach(device));
        for overlay in &layers.overlays {
            let device = self.engine.attach(Arc::clone(&overlay.pages));
            self.overlays.push((overlay.number, device));
        }
    }

    /// Returns the page file of a layer.
    fn device_of(&self, layer: usize) -> DeviceId {
        match layer.checked_sub(1) {
            None => self.device,
            Some(at) => self.overlays[at].1,
        }
    }

    /// Counts pages of the scratch that deals now from 0 on.
    pub(super) fn begin_part(&mut self) {
        self.part_mut().counts = PagesRead::default();
    }

    /// Notes that the two scratches change places.
    pub(super) fn turn(&mut self) {
        self.turn ^= TURN_MASK;
    }

    /// Hands queued pages to the kernel.
    pub(super) fn hand_over_all(&mut self, wanting: &mut Wanting<'_>, source: &Source<'_>) {
        if self.queued_count > 0 {
            self.land(wanting, source, Landing::HandOver);
        }
    }

    fn part_mut(&mut self) -> &mut Part {
        self.part_of(self.turn)
    }

    /// Returns what is known of the pages of a scratch.
    fn part_of(&mut self, turn: u64) -> &mut Part {
        let [first, second] = &mut self.parts;
        if turn & TURN_MASK == 0 {
            first
        } else {
            second
        }
    }

    /// Submits the pages of all wanted rows from `first` on.
    pub(super) fn submit_from(
        &mut self,
        wanting: &mut Wanting<'_>,
        first: usize,
        source: &Source<'_>,
    ) {
        let (mut next, end) = (first, wanting.scratch.wanted.len());
        while next < end && self.failed.is_none() {
            self.submit(wanting, next, source);
            next += group_len(&wanting.scratch.wanted, next);
        }
    }

    /// Tells whether as many pages fly as the device needs.
    fn is_full(&self) -> bool {
        self.engine.in_flight_count() >= self.depth.limit() as usize
    }

    /// Submits the page of the wanted row `first`, for it and those behind it on the same page.
    pub(super) fn submit(&mut self, wanting: &mut Wanting<'_>, first: usize, source: &Source<'_>) {
        if self.is_stuck {
            let stuck =
                Error::new(ErrorKind::Poisoned, "reads of an earlier call did not come back");
            self.failed.get_or_insert(stuck.with("remedy", "open the snapshot again"));
        }
        let buf = loop {
            if self.failed.is_some() {
                return;
            }
            match if self.is_full() { None } else { self.engine.acquire() } {
                Some(buf) => break buf,
                None => self.land(wanting, source, Landing::Wait),
            }
        };
        let PagePlace { layer, page_id } = wanting.scratch.wanted[first].place();
        self.engine.submit(Request {
            device: self.device_of(layer),
            op: Op::Read,
            offset_bytes: page_id * PAGE_BYTES as u64,
            len_bytes: PAGE_BYTES as u32,
            buf,
            tag: Flight { first, turn: self.turn }.tag(),
        });
        self.queued_count += 1;
        let part = self.part_mut();
        part.counts.pages_read += 1;
        part.flying_count += 1;
    }

    /// Hands queued pages to the kernel when there are enough of them for a system call, or the
    /// device has nothing else to do and choosing among `row_count` rows takes longer than a call.
    pub(super) fn hand_over(
        &mut self,
        wanting: &mut Wanting<'_>,
        source: &Source<'_>,
        row_count: usize,
    ) {
        let is_idle = self.queued_count == self.engine.in_flight_count();
        let goes_at_once = is_idle && row_count > FEW_ROWS;
        if self.queued_count > 0 && (goes_at_once || self.queued_count >= HAND_OVER_PAGES) {
            self.land(wanting, source, Landing::HandOver);
        }
    }

    pub(super) fn finish(
        &mut self,
        wanting: &mut Wanting<'_>,
        source: &Source<'_>,
    ) -> Result<PagesRead> {
        loop {
            while let Some(first) = self.part_mut().retries.pop() {
                self.submit(wanting, first, source);
            }
            if self.failed.is_some() || self.part_mut().flying_count == 0 {
                break;
            }
            self.land(wanting, source, Landing::Wait);
        }
        let counts = self.part_mut().counts;
        self.failed.take().map_or(Ok(counts), Err)
    }

    /// Returns how many pages may be asked for without waiting for one.
    pub(super) fn room(&self) -> usize {
        let in_flight = self.engine.in_flight_count();
        if self.is_stuck {
            return 0;
        }
        (self.depth.limit() as usize).saturating_sub(in_flight)
    }

    /// Takes the rows out of the pages that have come, without waiting; returns whether those of
    /// the scratch that deals now have all come, or one has failed.
    pub(super) fn land_ready(&mut self, wanting: &mut Wanting<'_>, source: &Source<'_>) -> bool {
        loop {
            self.land(wanting, source, Landing::Ready);
            // Their places are free: the pages that they stand for have come.
            let retries = std::mem::take(&mut self.part_mut().retries);
            if retries.is_empty() || self.failed.is_some() {
                break;
            }
            retries.into_iter().for_each(|first| self.submit(wanting, first, source));
        }
        self.failed.is_some() || self.part_mut().flying_count == 0
    }

    /// Lets go of the pages that have come for a caller who left; `false` while others fly.
    pub(super) fn has_landed(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.is_stuck |= self.engine.poll(&mut done).is_err();
        done.drain(..).for_each(|completion| self.engine.release(completion.buf));
        self.done = done;
        // A ring that fails is not used again: others are made.
        let has_landed = self.engine.in_flight_count() == 0 && !self.is_stuck;
        if has_landed {
            self.land_all();
        }
        has_landed
    }

    /// Returns what becomes readable when a page comes.
    pub(super) fn ring(&self) -> Option<BorrowedFd<'_>> {
        self.engine.ring()
    }

    pub(super) fn land_all(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        while self.engine.in_flight_count() > 0 && !self.is_stuck {
            self.is_stuck = self.engine.wait(&mut done).is_err();
            done.drain(..).for_each(|completion| self.engine.release(completion.buf));
        }
        (self.done, self.queued_count, self.failed) = (done, 0, None);
        self.parts = Default::default();
    }

    /// Hands queued pages over, and takes the rows out of the pages that have come.
    fn land(&mut self, wanting: &mut Wanting<'_>, source: &Source<'_>, landing: Landing) {
        self.queued_count = 0;
        let is_busy = landing == Landing::HandOver || self.is_full();
        let mut done = std::mem::take(&mut self.done);
        let landed = match landing {
            Landing::Wait => self.engine.wait(&mut done),
            Landing::HandOver | Landing::Ready => self.engine.poll(&mut done),
        };
        if let Err(error) = landed {
            self.failed.get_or_insert(error);
        }
        match is_busy {
            true => self.depth.landed(done.len() as u32, self.clock.now_us()),
            false => self.depth.idle(),
        }
        for completion in done.drain(..) {
            self.take(completion, wanting, source);
        }
        self.done = done;
    }

    /// Takes the rows out of a page that has come.
    fn take(&mut self, completion: Completion, wanting: &mut Wanting<'_>, source: &Source<'_>) {
        let flight = Flight::of_tag(completion.tag);
        let Flight { first, turn } = flight;
        let part = self.part_of(turn);
        assert!(part.flying_count > 0, "a page came back that was not in flight");
        part.flying_count -= 1;
        let scratch = match &mut wanting.other {
            Some(other) if turn != self.turn => other,
            _ => &mut *wanting.scratch,
        };
        let read = completion.result.map_err(|error| {
            // The device names its file.
            error.with("page_id", scratch.wanted[first].place().page_id)
        });
        let taken = read.and_then(|()| {
            take_rows(scratch, first, &self.engine.bytes(completion.buf)[..PAGE_BYTES], source)
        });
        self.engine.release(completion.buf);
        if let Err(error) = taken {
            if self.failed.is_none() && !self.recover(scratch, flight, source, &error) {
                self.failed = Some(error);
            }
        }
    }

    /// Looks for other pages of the rows wanted from a failed page; `false` when a row has none.
    ///
    /// Rows that the page gave before it failed are whole, and are not wanted again. A row of which
    /// only other parts have come is not: it has no other page, so its lookup fails.
    fn recover(
        &mut self,
        scratch: &mut Scratch,
        flight: Flight,
        source: &Source<'_>,
        error: &Error,
    ) -> bool {
        let Flight { first, turn } = flight;
        self.failed_pages.push(scratch.wanted[first].page_id);
        self.part_of(turn).counts.pages_failed += 1;
        // Other pages of a row that a delta has hold what it was before.
        let is_changed = scratch.wanted[first].place().layer > 0;
        if is_changed || !matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Io) {
            return false;
        }
        let start = scratch.wanted.len();
        for entry in first..first + group_len(&scratch.wanted, first) {
            let at = scratch.wanted[entry].at;
            if scratch.filled[at as usize] == Filled::Read {
                continue;
            }
            let mut pages = source.pages_of(scratch.keys[at as usize]);
            let other = pages.find(|page_id| !self.failed_pages.contains(page_id));
            let Some(page_id) = other else { return false };
            scratch.wanted.push(Wanted { page_id, at, part: 0 });
            self.part_of(turn).counts.rows_recovered += 1;
        }
        scratch.wanted[start..].sort_unstable();
        let mut next = start;
        while next < scratch.wanted.len() {
            self.part_of(turn).retries.push(next);
            next += group_len(&scratch.wanted, next);
        }
        true
    }
}

/// Returns how many wanted rows, from `first` on, are on the same page.
fn group_len(wanted: &[Wanted], first: usize) -> usize {
    assert!(first < wanted.len(), "wanted row {first} of {}", wanted.len());
    let page_id = wanted[first].page_id;
    wanted[first..].iter().take_while(|wanted| wanted.page_id == page_id).count()
}

/// Copies the rows wanted from a page, or their parts, out of it.
///
/// # Errors
/// `Corruption` when the page fails its checks or lacks one of them; rows before that one are
/// there then.
fn take_rows(scratch: &mut Scratch, first: usize, bytes: &[u8], source: &Source<'_>) -> Result<()> {
    let PagePlace { layer, page_id } = scratch.wanted[first].place();
    let pages = source.page_table(layer);
    let named =
        |error: Error| error.with("path", &pages.path).with("remedy", "publish the snapshot again");
    let page = PageView::parse(bytes, page_id, &pages.shapes).map_err(named)?;
    for entry in first..first + group_len(&scratch.wanted, first) {
        let wanted = scratch.wanted[entry];
        let at = wanted.at as usize;
        let key = scratch.keys[at];
        let (owner, row) = source.seat_of(layer, key);
        let found = (page.owner == owner && page.part == wanted.part as usize)
            .then(|| page.find(row))
            .flatten();
        let Some(bytes) = found else {
            return Err(named(
                Error::corruption("page lacks a row that the forward index puts there")
                    .with("page_id", page_id)
                    .with("table_id", key.table.0)
                    .with("row", key.row.0),
            ));
        };
        let (shape, codec) = (pages.shapes[owner.0 as usize], &pages.codecs[owner.0 as usize]);
        scratch.take_part(at, RowPart { codec, shape, part: page.part, bytes });
    }
    Ok(())
}
