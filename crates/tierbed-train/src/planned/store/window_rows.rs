//! Rows of one window: side by side in memory, entry after entry, while it is trained on.
//!
//! A window owns the memory its rows are in, so the thread that owns the window owns its rows: the
//! training thread has the current one, storage work has the one that comes or has just ended.
//! A row needs no slot number: its place follows from its entry.

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::WordBuf;
use tierbed_kernels::prefetch;

use crate::planned::device::{Carried, DeviceWindows, HostWindow, WindowChange, WindowTable};
use crate::planned::plan::{EpochPlan, PlanWindow, TableEntries};

/// How many rows ahead the processor is asked to fetch a place.
const FETCH_AHEAD: usize = 6;

/// Where the rows of a table wait, and how long their records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) class: usize,
    pub(crate) words: usize,
}

/// An entry of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) window: u32,
    pub(crate) entry: u32,
}

/// A row in a window's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spot {
    pub(crate) table: usize,
    /// Where it is needed next.
    pub(crate) waits_for: Place,
    /// By which entry the plan tells which row it is, without looking into another window.
    pub(crate) known_as: Place,
}

/// Takes rows in windows' memory.
pub(crate) type RowVisit<'a> = dyn FnMut(Spot, &[f32]) -> Result<()> + 'a;

/// How far a row is on its way to a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// On disk, in a list, or never used.
    Absent,
    /// In its place.
    Here,
    /// In the window before, to be carried over when that one ends.
    Carried,
    /// In its place, with its initial value: never used before.
    Fresh,
}

/// Who has the newest rows of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Newest {
    /// The host.
    #[default]
    Host,
    /// Both: the device has a copy of them.
    Both,
    /// The device, and the host must not read its own.
    Device,
}

/// Neighbouring tables with records of one length.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: u32,
    end: u32,
    start: usize,
    words: usize,
}

/// A window whose rows are in memory, or on their way.
#[derive(Debug, Default)]
pub(crate) struct WindowRows {
    pub(crate) number: usize,
    pub(crate) plan: Arc<PlanWindow>,
    arena: WordBuf,
    presence: Vec<Presence>,
    runs: Vec<Run>,
    /// Per table: the first word of its first entry's record.
    starts: Vec<usize>,
    newest: Newest,
}

impl WindowRows {
    /// Takes the memory for windows of at most `words_max` words and `entries_max` entries.
    pub(crate) fn new(words_max: usize, entries_max: usize) -> Self {
        Self {
            arena: WordBuf::new(words_max),
            presence: Vec::with_capacity(entries_max),
            ..Self::default()
        }
    }

    /// Returns the bytes that one such window takes, its block of the plan not counted.
    pub(crate) fn memory_bytes(words_max: usize, entries_max: usize) -> u64 {
        (4 * words_max + entries_max) as u64
    }

    /// Becomes window `number`, with no row in it.
    pub(crate) fn load(&mut self, plan: &EpochPlan, number: usize, homes: &[Home]) -> Result<()> {
        if Arc::get_mut(&mut self.plan).is_none() {
            self.plan = Arc::default();
        }
        let Some(window) = Arc::get_mut(&mut self.plan) else {
            panic!("the window was just made and is shared")
        };
        plan.load(number, window)?;
        self.number = number;
        self.newest = Newest::Host;
        self.runs.clear();
        self.starts.clear();
        let mut start = 0;
        for (table, home) in self.plan.tables().iter().zip(homes) {
            self.starts.push(start);
            let end = table.first + table.count;
            match self.runs.last_mut().filter(|run| run.words == home.words) {
                Some(run) => run.end = end,
                None => self.runs.push(Run { first: table.first, end, start, words: home.words }),
            }
            start += table.count as usize * home.words;
        }
        if start > self.arena.len() || self.starts.len() != homes.len() {
            return Err(Error::corruption("plan window is larger than its directory says")
                .with("at_window", number));
        }
        self.presence.clear();
        self.presence.resize(self.plan.entry_count(), Presence::Absent);
        let end = self.runs.last().map_or(0, |run| run.end as usize);
        assert_eq!(end, self.presence.len(), "an entry of window {number} has no place");
        Ok(())
    }

    /// Returns the first word of the first record of `table`.
    #[expect(clippy::indexing_slicing, reason = "a loaded window has every table of the plan")]
    pub(crate) fn table_start(&self, table: usize) -> usize {
        self.starts[table]
    }

    pub(crate) fn arena(&self) -> &[f32] {
        self.check_here();
        &self.arena
    }

    /// Returns the memory to change rows in; a device's copy of them is no longer one.
    pub(crate) fn arena_mut(&mut self) -> &mut [f32] {
        self.check_here();
        self.newest = Newest::Host;
        &mut self.arena
    }

    /// Returns all memory, whatever it holds: it stays where it is as long as this lives.
    pub(crate) fn memory(&self) -> &[f32] {
        &self.arena
    }

    /// Panics unless the host has the newest rows.
    pub(crate) fn check_here(&self) {
        assert_ne!(self.newest, Newest::Device, "rows of a device were not brought back");
    }

    pub(crate) fn newest(&self) -> Newest {
        self.newest
    }

    /// Notes that the device has stepped rows.
    pub(crate) fn note_stepped_away(&mut self) {
        assert_ne!(self.newest, Newest::Host, "a device steps rows that it does not have");
        self.newest = Newest::Device;
    }

    fn words_len(&self) -> usize {
        let words = |run: &Run| run.start + (run.end - run.first) as usize * run.words;
        self.runs.last().map_or(0, words)
    }

    fn tables(&self, homes: &[Home]) -> Vec<WindowTable> {
        let tables = self.plan.tables().iter().zip(homes).zip(&self.starts);
        let table = |((table, home), &first_word): ((&TableEntries, &Home), &usize)| WindowTable {
            first_entry: table.first,
            entry_count: table.count,
            first_word,
            record_words: home.words,
        };
        tables.map(table).collect()
    }

    /// Lets `device` have a copy of the rows, unless it has one.
    ///
    /// # Errors
    /// The device's.
    #[expect(clippy::indexing_slicing, reason = "a loaded window fits its memory")]
    pub(crate) fn upload(&mut self, device: &dyn DeviceWindows, homes: &[Home]) -> Result<()> {
        if self.newest == Newest::Host {
            let words = &self.arena[..self.words_len()];
            device.upload(HostWindow { words, tables: &self.tables(homes) })?;
            self.newest = Newest::Both;
        }
        Ok(())
    }

    /// Brings back what `device` has newer. Returns how many rows it has stepped.
    ///
    /// # Errors
    /// The device's: its rows stay the newest.
    #[expect(clippy::indexing_slicing, reason = "a loaded window fits its memory")]
    pub(crate) fn download(&mut self, device: &dyn DeviceWindows) -> Result<u64> {
        if self.newest != Newest::Device {
            return Ok(0);
        }
        let len = self.words_len();
        let row_count = device.download(&mut self.arena[..len])?;
        self.newest = Newest::Both;
        Ok(row_count)
    }

    #[expect(clippy::indexing_slicing, reason = "entries are those of the window")]
    pub(crate) fn presence(&self, entry: u32) -> Presence {
        self.presence[entry as usize]
    }

    #[inline]
    fn words_of(&self, entry: u32) -> Option<Range<usize>> {
        let run = match self.runs.as_slice() {
            [only] => only,
            runs => runs.get(runs.partition_point(|run| run.end <= entry))?,
        };
        let start = run.start + entry.checked_sub(run.first)? as usize * run.words;
        Some(start..start + run.words)
    }

    /// Returns the record of `entry`, whatever it holds.
    ///
    /// # Panics
    /// When there is no such entry.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a loaded window fits its memory")]
    pub(crate) fn record(&self, entry: u32) -> &[f32] {
        debug_assert_ne!(self.newest, Newest::Device, "rows of a device were not brought back");
        let Some(words) = self.words_of(entry) else { panic!("the window has no entry {entry}") };
        &self.arena[words]
    }

    /// Tells whether every row is in its place: training may begin.
    fn is_complete(&self) -> bool {
        let is_there = |row: &Presence| matches!(row, Presence::Here | Presence::Fresh);
        self.presence.iter().all(is_there)
    }

    /// Asks the processor to bring the place of `entry` near.
    #[inline]
    pub(crate) fn expect(&self, entry: u32) {
        if let Some(words) = self.words_of(entry) {
            prefetch(&self.arena, words.start, words.len());
        }
    }

    /// Puts the row of `entry` into its place.
    ///
    /// # Errors
    /// `Corruption` when it is there already, or does not belong here.
    #[inline]
    pub(crate) fn arrive(&mut self, entry: u32, record: &[f32]) -> Result<()> {
        self.place(entry, Presence::Absent, Presence::Here, record.len())?.copy_from_slice(record);
        Ok(())
    }

    /// As [`arrive`](Self::arrive), from bytes as they are on disk.
    #[inline]
    pub(crate) fn arrive_bytes(&mut self, entry: u32, record: &[u8]) -> Result<()> {
        let place = self.place(entry, Presence::Absent, Presence::Here, record.len() / 4)?;
        let place: &mut [u8] = bytemuck::cast_slice_mut(place);
        match place.len() == record.len() {
            true => place.copy_from_slice(record),
            false => return Err(Error::corruption("a record is not as long as its table's")),
        }
        Ok(())
    }

    /// Puts rows into their places that the window before, `from`, had.
    ///
    /// # Errors
    /// As [`arrive`](Self::arrive).
    pub(crate) fn carry_all(&mut self, from: &Self, rows: &[Carried]) -> Result<()> {
        assert!(rows.len() <= self.presence.len(), "more rows are carried than the window has");
        from.check_here();
        for (at, row) in rows.iter().enumerate() {
            if let Some(soon) = rows.get(at + FETCH_AHEAD) {
                from.expect(soon.from);
                self.expect(soon.to);
            }
            let record = from.record(row.from);
            let place = self.place(row.to, Presence::Carried, Presence::Here, record.len())?;
            place.copy_from_slice(record);
        }
        debug_assert!(self.is_complete(), "window {} begins without a row", self.number);
        Ok(())
    }

    /// As [`carry_all`](Self::carry_all), by the device that has the rows of `from`: it goes on to
    /// this window, and `from` gets its rows back. Returns how many rows it has stepped.
    ///
    /// # Errors
    /// The device's, and as [`arrive`](Self::arrive).
    #[expect(clippy::indexing_slicing, reason = "a loaded window fits its memory")]
    pub(crate) fn carry_on_device(
        &mut self,
        from: &mut Self,
        rows: &[Carried],
        device: &dyn DeviceWindows,
        homes: &[Home],
    ) -> Result<u64> {
        let (len, ended_len) = (self.words_len(), from.words_len());
        let begun = HostWindow { words: &self.arena[..len], tables: &self.tables(homes) };
        let ended = &mut from.arena[..ended_len];
        let row_count = device.advance(WindowChange { ended, begun, carried: rows })?;
        for row in rows {
            let len = self.words_of(row.to).map_or(0, |words| words.len());
            self.place(row.to, Presence::Carried, Presence::Here, len)?;
        }
        from.newest = Newest::Both;
        // What was carried is in the device's memory alone.
        self.newest = if rows.is_empty() { Newest::Both } else { Newest::Device };
        debug_assert!(self.is_complete(), "window {} begins without a row", self.number);
        Ok(row_count)
    }

    /// Notes that the window before has the row of `entry`.
    ///
    /// # Errors
    /// As [`arrive`](Self::arrive).
    pub(crate) fn await_carried(&mut self, entry: u32) -> Result<()> {
        match self.presence.get_mut(entry as usize) {
            Some(presence) if *presence == Presence::Absent => *presence = Presence::Carried,
            _ => return Err(self.misplaced(entry)),
        }
        Ok(())
    }

    /// Gives `fill` the place of `entry` if its row is nowhere else: it was never used.
    #[expect(clippy::indexing_slicing, reason = "entries are those of the window")]
    pub(crate) fn initialise(&mut self, entry: u32, fill: impl FnOnce(&mut [f32])) -> bool {
        if self.presence(entry) != Presence::Absent {
            return false;
        }
        let Some(words) = self.words_of(entry) else { panic!("the window has no entry {entry}") };
        fill(&mut self.arena[words]);
        self.presence[entry as usize] = Presence::Fresh;
        true
    }

    #[inline]
    fn place(
        &mut self,
        entry: u32,
        from: Presence,
        to: Presence,
        word_count: usize,
    ) -> Result<&mut [f32]> {
        let words = self.words_of(entry).filter(|words| words.len() == word_count);
        let (Some(words), Some(presence)) = (words, self.presence.get_mut(entry as usize)) else {
            return Err(self.misplaced(entry));
        };
        if *presence != from {
            return Err(self.misplaced(entry));
        }
        *presence = to;
        self.arena.get_mut(words).ok_or_else(|| Error::corruption("an entry has no place"))
    }

    #[cold]
    fn misplaced(&self, entry: u32) -> Error {
        Error::corruption("a row came to a window twice, or to a wrong one")
            .with("at_window", self.number)
            .with("entry", entry)
            .with("entries", self.presence.len())
    }
}
