//! Any store behind a look-ahead buffer that knows the next uses of its rows.
//!
//! While window `k` trains, the store's thread writes what left the buffer and reads what window
//! `k + 1` lacks. A row leaves when its next use is unknown (beyond the look-ahead) or, when slots
//! run short, when it is the farthest; only then it is written. This is stronger than what RecDB
//! does (every updated row is written every step) and is the same for every store: equal memory,
//! equal look-ahead. Source: RecDB §4.2 (EV buffer); Belady (1966).

use std::sync::Arc;

use serde_json::Value;
use tierbed_core::{Bags, Error, Result, RowId, RowKey, RowWrite, Schema, TableId};
use tierbed_io::WordBuf;
use tierbed_kernels::init_record;

use super::job::{features_of, Job};
use super::kernel::{Places, StepKernel};
use super::store_thread::{record_words, Request, StoreThread};
use super::stores::{self, AnyStore};
use super::system::System;
use super::timeline::{first_rows, Timeline, Window, NEVER};
use crate::meter::{thread_cpu_ns, Meter};

const NO_SLOT: u32 = u32::MAX;
/// Promised to the next window by the current one.
const PROMISED: u32 = u32::MAX - 1;
/// Share of the memory that the buffer takes; the store has the rest.
const BUFFER_SHARE: f64 = 0.5;
/// Rows written at once while loading.
const LOAD_ROWS: usize = 8192;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Keyed {
    store: StoreThread,
    kernel: StepKernel,
    timeline: Timeline,
    meter: Meter,
    horizon_windows: u32,
    batch_len: usize,
    words: usize,
    arena: WordBuf,
    row_of_slot: Vec<u32>,
    free: Vec<u32>,
    /// Rows in memory by the window of their next use: slot, entry there.
    lists: Vec<Vec<(u32, u32)>>,
    number: Option<u32>,
    batch: u32,
    current: Arc<Window>,
    slots: Vec<u32>,
    next: Arc<Window>,
    next_slots: Vec<u32>,
    /// Rows that left the buffer: number and slot's record copied.
    leaving: Vec<(u32, u32)>,
    leaving_records: Vec<f32>,
    spare: Request,
    is_asking: bool,
    settled: Option<(Vec<f32>, Request)>,
    train_cpu_ns: u64,
    blocked_us: u64,
}

impl Keyed {
    /// Opens the store, fills it with every row of `schema` and prepares the buffer.
    pub(crate) fn open(job: &Job, schema: Schema) -> Result<Self> {
        let path =
            job.timeline.as_ref().ok_or_else(|| Error::invalid("system needs a timeline"))?;
        let timeline = Timeline::open(path)?;
        let buffer_bytes = (job.dram_budget_bytes as f64 * BUFFER_SHARE) as u64;
        let mut store = stores::open(job, &schema, job.dram_budget_bytes - buffer_bytes)?;
        if !job.is_loaded {
            load(&mut store, &schema)?;
        }
        let words = record_words(&schema);
        // A slot costs its record, its row, its list entry and its place among the free.
        let slot_count = buffer_bytes as usize / (4 * words + 16);
        let mut row_counts = [0; super::job::FEATURE_COUNT];
        for (count, table) in row_counts.iter_mut().zip(schema.tables()) {
            *count = table.row_count;
        }
        let horizon_windows = job.look_ahead_batches.map_or(u32::MAX, |batches| {
            (batches / u64::from(timeline.window_batches())).clamp(1, u64::from(NEVER)) as u32
        });
        Ok(Self {
            store: StoreThread::start(store, first_rows(&row_counts))?,
            kernel: StepKernel::new(schema.clone(), features_of(&schema)?, job.batch_len),
            meter: Meter::new(),
            horizon_windows,
            batch_len: job.batch_len,
            words,
            arena: WordBuf::new(slot_count * words),
            row_of_slot: vec![0; slot_count],
            free: (0..slot_count as u32).rev().collect(),
            lists: vec![Vec::new(); timeline.window_count() as usize],
            timeline,
            number: None,
            batch: 0,
            current: Arc::default(),
            slots: Vec::new(),
            next: Arc::default(),
            next_slots: Vec::new(),
            leaving: Vec::new(),
            leaving_records: Vec::new(),
            spare: Request::default(),
            is_asking: false,
            settled: None,
            train_cpu_ns: 0,
            blocked_us: 0,
        })
    }

    // Makes window `number` the current one and asks for what the next one lacks.
    fn enter(&mut self, number: u32) -> Result<()> {
        if self.number.map(|known| known + 1) == Some(number) {
            self.leave_current();
            self.receive()?;
        } else if self.number.is_none() {
            self.next = Arc::new(self.timeline.read(number)?);
            self.next_slots = vec![NO_SLOT; self.next.rows.len()];
            self.ask(number)?;
            self.receive()?;
        } else {
            return Err(Error::invalid("windows come one after another").with("window", number));
        }
        self.number = Some(number);
        self.current = std::mem::take(&mut self.next);
        std::mem::swap(&mut self.slots, &mut self.next_slots);
        if number + 1 == self.timeline.window_count() {
            self.next = Arc::default();
            self.next_slots.clear();
            return self.ask(number + 1);
        }
        self.next = Arc::new(self.timeline.read(number + 1)?);
        self.next_slots.clear();
        self.next_slots.resize(self.next.rows.len(), NO_SLOT);
        self.promise(number + 1);
        self.ask(number + 1)
    }

    // Gives window `next` the rows that are in memory for it, or will be.
    fn promise(&mut self, next: u32) {
        let list = self.lists.get_mut(next as usize).map(std::mem::take).unwrap_or_default();
        for (slot, entry) in list {
            if let Some(place) = self.next_slots.get_mut(entry as usize) {
                *place = slot;
            }
        }
        let uses = self.current.next_windows.iter().zip(&self.current.next_entries);
        for (window, entry) in uses {
            if *window == next {
                if let Some(place) = self.next_slots.get_mut(*entry as usize) {
                    *place = PROMISED;
                }
            }
        }
    }

    // Sends the rows that left and those the next window lacks, in reserved slots.
    fn ask(&mut self, next: u32) -> Result<()> {
        let missing = self.next_slots.iter().filter(|slot| **slot == NO_SLOT).count();
        self.make_room(missing, next)?;
        let mut request = std::mem::take(&mut self.spare);
        request.read_rows.clear();
        let rows = self.next.rows.iter().zip(&mut self.next_slots);
        for (row, place) in rows.filter(|(_, place)| **place == NO_SLOT) {
            let Some(slot) = self.free.pop() else { break };
            *place = slot;
            if let Some(known) = self.row_of_slot.get_mut(slot as usize) {
                *known = *row;
            }
            request.read_rows.push(*row);
        }
        self.leaving.sort_unstable();
        request.write_rows.clear();
        request.write_records.clear();
        for (row, at) in &self.leaving {
            let first = *at as usize * self.words;
            request.write_rows.push(*row);
            let record = self.leaving_records.get(first..first + self.words).unwrap_or(&[]);
            request.write_records.extend_from_slice(record);
        }
        self.leaving.clear();
        self.leaving_records.clear();
        request.window = Some(self.next.clone());
        request.window_batches = self.timeline.window_batches();
        request.batch_len = self.batch_len;
        self.is_asking = true;
        self.store.begin(request)
    }

    // Waits for the rows asked for and puts them into their slots.
    fn receive(&mut self) -> Result<()> {
        let start_us = self.meter.now_us();
        self.settle()?;
        self.blocked_us += self.meter.now_us() - start_us;
        let Some((records, request)) = self.settled.take() else { return Ok(()) };
        let mut slots = request.read_rows.iter().zip(records.chunks_exact(self.words.max(1)));
        let mut wanted = slots.next();
        for (row, slot) in self.next.rows.iter().zip(&self.next_slots) {
            let Some((asked, record)) = wanted else { break };
            if asked == row {
                let first = *slot as usize * self.words;
                if let Some(place) = self.arena.get_mut(first..first + self.words) {
                    place.copy_from_slice(record);
                }
                wanted = slots.next();
            }
        }
        self.spare = request;
        self.spare.window = None;
        Ok(())
    }

    // Waits for the request under way, and keeps what it brought.
    fn settle(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_asking) {
            self.settled = Some(self.store.finish()?);
        }
        Ok(())
    }

    // Hands the rows of the current window on: to the next, to the list of their next use, or
    // out of the buffer.
    fn leave_current(&mut self) {
        let Some(number) = self.number else { return };
        let current = std::mem::take(&mut self.current);
        let slots = std::mem::take(&mut self.slots);
        let uses = current.next_windows.iter().zip(&current.next_entries);
        for ((window, entry), slot) in uses.zip(&slots) {
            let is_known = *window != NEVER && *window - number <= self.horizon_windows;
            if *window == number + 1 {
                if let Some(place) = self.next_slots.get_mut(*entry as usize) {
                    *place = *slot;
                }
            } else if let Some(list) = self.lists.get_mut(*window as usize).filter(|_| is_known) {
                list.push((*slot, *entry));
            } else {
                self.put_out(*slot);
            }
        }
        self.slots = slots;
    }

    fn put_out(&mut self, slot: u32) {
        let row = self.row_of_slot.get(slot as usize).copied().unwrap_or(0);
        self.leaving.push((row, self.leaving.len() as u32));
        let first = slot as usize * self.words;
        let record = self.arena.get(first..first + self.words).unwrap_or(&[]);
        self.leaving_records.extend_from_slice(record);
        self.free.push(slot);
    }

    // Puts out the rows with the farthest next use until `count` slots are free.
    fn make_room(&mut self, count: usize, next: u32) -> Result<()> {
        let mut farthest = self.lists.len();
        while self.free.len() < count {
            if farthest <= next as usize + 1 {
                return Err(Error::invalid("look-ahead buffer is too small for two windows")
                    .with("slots", self.row_of_slot.len())
                    .with("window_rows", self.next.rows.len())
                    .with("remedy", "make windows smaller or the budget larger"));
            }
            farthest -= 1;
            let mut list = self.lists.get_mut(farthest).map(std::mem::take).unwrap_or_default();
            while self.free.len() < count {
                let Some((slot, _)) = list.pop() else { break };
                self.put_out(slot);
            }
            if let Some(place) = self.lists.get_mut(farthest) {
                *place = list;
            }
        }
        Ok(())
    }
}

impl System for Keyed {
    fn prepare(&mut self, number: u64, _: &Bags<'_>) -> Result<()> {
        let (window, batch) = self.timeline.place(number)?;
        if self.number != Some(window) {
            self.enter(window)?;
        }
        self.batch = batch;
        Ok(())
    }

    fn lookup(&mut self, bags: &Bags<'_>) -> Result<()> {
        let start_ns = thread_cpu_ns();
        let entries = self.current.batch(self.batch, bags.indices.len());
        let places = Places { entries, slots: &self.slots };
        self.kernel.lookup(&self.arena, bags, places);
        self.train_cpu_ns += thread_cpu_ns() - start_ns;
        Ok(())
    }

    fn update(&mut self, bags: &Bags<'_>) -> Result<()> {
        let start_ns = thread_cpu_ns();
        let entries = self.current.batch(self.batch, bags.indices.len());
        let places = Places { entries, slots: &self.slots };
        self.kernel.update(&mut self.arena, bags, places)?;
        self.train_cpu_ns += thread_cpu_ns() - start_ns;
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<()> {
        self.settle()?;
        let slots = self.current.rows.iter().zip(&self.slots).map(|(row, slot)| (*row, *slot));
        let waiting =
            self.lists.iter().flatten().map(|(slot, _)| {
                (self.row_of_slot.get(*slot as usize).copied().unwrap_or(0), *slot)
            });
        let mut dirty: Vec<(u32, u32)> = slots.chain(waiting).collect();
        dirty.sort_unstable();
        let mut request = Request::default();
        for (row, slot) in dirty {
            let first = slot as usize * self.words;
            let record = self.arena.get(first..first + self.words).unwrap_or(&[]);
            request.write_rows.push(row);
            request.write_records.extend_from_slice(record);
        }
        self.store.begin(request)?;
        self.store.finish()?;
        self.store.commit()
    }

    fn counters(&mut self) -> Result<Value> {
        self.settle()?;
        let mut counters = self.store.counters()?;
        if let Some(counters) = counters.as_object_mut() {
            counters.insert("train_cpu_ns".to_owned(), self.train_cpu_ns.into());
            counters.insert("blocked_us".to_owned(), self.blocked_us.into());
        }
        Ok(counters)
    }

    #[cfg(test)]
    fn output(&self) -> &[f32] {
        self.kernel.output()
    }
}

/// Writes every row in order, as after an epoch that touched all, and commits.
fn load(store: &mut AnyStore, schema: &Schema) -> Result<()> {
    let words = record_words(schema);
    let mut records = vec![0.0f32; LOAD_ROWS * words];
    for (id, table) in (0..).map(TableId).zip(schema.tables()) {
        for first in (0..table.row_count).step_by(LOAD_ROWS) {
            let ids = first..(first + LOAD_ROWS as u64).min(table.row_count);
            for (row, record) in ids.clone().zip(records.chunks_exact_mut(words)) {
                init_record(table, row, record);
            }
            let rows = ids.zip(records.chunks_exact(words)).map(|(row, record)| RowWrite {
                key: RowKey::new(id, RowId(row)),
                record: bytemuck::cast_slice(record),
            });
            store.get().write(&rows.collect::<Vec<_>>())?;
        }
    }
    store.get().commit("loaded", &[])
}
