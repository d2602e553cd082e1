//! A deterministic model of an SSD that reads vectors, over any device's bytes.
//!
//! It serves real bytes and reports **simulated** time; nothing here waits.
//!
//! ```text
//! registers, DMA ─▶ translator ─▶ striping ─▶ channels, dies ─▶ merger ─▶ status, DMA
//!   table, count      row ─▶        all         whole pages to    vectors   ready?
//!   indices           extents       channels    the buffer, only  from
//!                                               pieces onwards    pieces
//! blocks ─▶ controller ───────────▶ the same flash, 4 KiB at least ─▶ DMA
//! ```
//!
//! [`VectorSsd::submit`] begins a lookup at an instant of the host's time and
//! [`VectorSsd::wait`] lets time pass until its vectors are with the host. Lookups in flight
//! share the flash. Source: FlashEmbedding §3.2, §4.
//! Differs: pages of one die are read in the order of coming; the merger and DMA of different
//! lookups do not delay each other.

mod flash;
mod model;
mod table;
#[cfg(test)]
mod tests;

pub use model::SsdModel;
pub use table::{Extent, VectorTable};

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};

use flash::{Flash, Piece};
use tierbed_io::{Device, PAGE_BYTES};

/// Bytes of an index sent to the device.
const INDEX_BYTES: u64 = 8;

/// What a device did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SsdCounts {
    /// Flash pages read into a buffer.
    pub flash_pages: u64,
    /// Bytes that went over flash channels.
    pub channel_bytes: u64,
    /// Bytes given to the host.
    pub host_bytes: u64,
    /// Vectors looked up.
    pub vectors: u64,
    /// Blocks read.
    pub blocks: u64,
}

/// A lookup that has been submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Flight {
    pieces_left: u64,
    /// When the last piece came out of the flash.
    flash_ns: u64,
    /// What comes after the flash: merging and the way to the host.
    after_ns: u64,
}

#[derive(Debug)]
struct State {
    flash: Flash,
    tables: Vec<VectorTable>,
    flights: BTreeMap<u64, Flight>,
    ticket_count: u64,
    counts: SsdCounts,
    /// The host's time for calls that tell none: those of [`Device`].
    host_ns: u64,
}

/// A simulated SSD in front of `D`, which holds the bytes.
#[derive(Debug)]
pub struct VectorSsd<D> {
    bytes: D,
    model: SsdModel,
    state: Mutex<State>,
}

impl<D: Device> VectorSsd<D> {
    /// Builds an idle device at time 0.
    ///
    /// # Errors
    /// `Invalid` for a model with a part of size 0.
    pub fn new(bytes: D, model: SsdModel) -> Result<Self> {
        model.check()?;
        let state = State {
            flash: Flash::new(model),
            tables: Vec::new(),
            flights: BTreeMap::new(),
            ticket_count: 0,
            counts: SsdCounts::default(),
            host_ns: 0,
        };
        Ok(Self { bytes, model, state: Mutex::new(state) })
    }

    /// Makes a table known; returns its number.
    pub fn add_table(&self, table: VectorTable) -> usize {
        let mut state = self.lock();
        state.tables.push(table);
        state.tables.len() - 1
    }

    /// Returns what it did so far.
    #[must_use]
    pub fn counts(&self) -> SsdCounts {
        self.lock().counts
    }

    /// Returns the host's time after the last call that told none.
    #[must_use]
    pub fn host_ns(&self) -> u64 {
        self.lock().host_ns
    }

    /// Begins the lookup of `rows`, in any order and with repetitions, at the host's time
    /// `at_ns`; copies their vectors to `out`, `[rows * vector_bytes]`, where they count as
    /// present when [`wait`](Self::wait) says. `None` for `out` simulates time alone.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or row, or `out` of another length; as
    /// [`Device::read_at`].
    pub fn submit(
        &self,
        at_ns: u64,
        table: usize,
        rows: &[u64],
        out: Option<&mut [u8]>,
    ) -> Result<Ticket> {
        let mut state = self.lock();
        let table =
            state.tables.get(table).cloned().ok_or_else(|| {
                Error::invalid("unknown table of a simulated SSD").with("at", table)
            })?;
        let vector_bytes = u64::from(table.vector_bytes());
        let places: Vec<(u64, u64)> =
            rows.iter().map(|&row| table.locate(row)).collect::<Result<_>>()?;
        if let Some(out) = out {
            self.copy(&places, vector_bytes as usize, out)?;
        }
        state.pass_until(at_ns);
        // Table and batch size into registers, indices by DMA.
        let index_bytes = rows.len() as u64 * INDEX_BYTES;
        let mut time_ns = at_ns + 2 * self.model.register_ns + self.model.dma_ns(index_bytes);
        let ticket = state.open(rows.len() as u64 * self.model.merge_ns);
        for &(offset_bytes, compared) in &places {
            time_ns += compared * self.model.compare_ns;
            self.read_range(&mut state, time_ns, ticket, offset_bytes..offset_bytes + vector_bytes);
        }
        let host_bytes = rows.len() as u64 * vector_bytes;
        state.counts.vectors += rows.len() as u64;
        state.counts.host_bytes += host_bytes;
        let after_ns = self.model.register_ns + self.model.dma_ns(host_bytes);
        state.promise(ticket, time_ns, after_ns);
        Ok(Ticket(ticket))
    }

    /// Begins the read of the blocks of [`PAGE_BYTES`] that hold `len_bytes` from `offset_bytes`,
    /// as the NVMe controller does; simulates time alone.
    pub fn submit_blocks(&self, at_ns: u64, offset_bytes: u64, len_bytes: u64) -> Ticket {
        let page_bytes = PAGE_BYTES as u64;
        let mut state = self.lock();
        state.pass_until(at_ns);
        let ticket = state.open(0);
        let time_ns = at_ns + self.model.register_ns + self.model.block_command_ns;
        let first = offset_bytes / page_bytes;
        let end = offset_bytes.saturating_add(len_bytes).div_ceil(page_bytes).max(first);
        for block in first..end {
            self.read_range(
                &mut state,
                time_ns,
                ticket,
                block * page_bytes..(block + 1) * page_bytes,
            );
        }
        state.counts.blocks += end - first;
        state.counts.host_bytes += (end - first) * page_bytes;
        let after_ns = self.model.dma_ns((end - first) * page_bytes);
        state.promise(ticket, time_ns, after_ns);
        Ticket(ticket)
    }

    /// Tells whether the status register says ready at `at_ns`.
    ///
    /// # Errors
    /// `Invalid` for a lookup that has been waited for.
    pub fn is_ready(&self, at_ns: u64, ticket: Ticket) -> Result<bool> {
        let mut state = self.lock();
        state.pass_until(at_ns);
        let flight = state.flights.get(&ticket.0).ok_or_else(|| gone(ticket))?;
        Ok(flight.pieces_left == 0 && flight.flash_ns <= at_ns)
    }

    /// Lets time pass until the lookup's vectors are with the host; returns that time.
    ///
    /// # Errors
    /// `Invalid` for a lookup that has been waited for.
    pub fn wait(&self, ticket: Ticket) -> Result<u64> {
        let mut state = self.lock();
        while state.flights.get(&ticket.0).ok_or_else(|| gone(ticket))?.pieces_left > 0 {
            if !state.pass_one() {
                return Err(gone(ticket));
            }
        }
        let flight = state.flights.remove(&ticket.0).ok_or_else(|| gone(ticket))?;
        Ok(flight.flash_ns + flight.after_ns)
    }

    /// Reads a range of the device's bytes: on every channel a piece of each flash page it
    /// touches.
    fn read_range(&self, state: &mut State, at_ns: u64, ticket: u64, range: std::ops::Range<u64>) {
        let stripe_bytes = self.model.stripe_bytes();
        let mut from = range.start;
        while from < range.end {
            let page = from / stripe_bytes;
            let to = range.end.min((page + 1) * stripe_bytes);
            let bytes = self.model.piece_bytes(to - from);
            let die = (page % u64::from(self.model.dies_per_channel)) as u32;
            for channel in 0..self.model.channels {
                state.flash.add(at_ns, Piece { ticket, channel, die, bytes });
            }
            let pieces = u64::from(self.model.channels);
            state.counts.flash_pages += pieces;
            state.counts.channel_bytes += pieces * bytes;
            if let Some(flight) = state.flights.get_mut(&ticket) {
                flight.pieces_left += pieces;
            }
            from = to;
        }
    }

    fn copy(&self, places: &[(u64, u64)], vector_bytes: usize, out: &mut [u8]) -> Result<()> {
        if out.len() != places.len() * vector_bytes {
            return Err(Error::invalid("output does not hold the vectors asked for")
                .with("expected_bytes", places.len() * vector_bytes)
                .with("found_bytes", out.len()));
        }
        for (&(offset_bytes, _), vector) in places.iter().zip(out.chunks_exact_mut(vector_bytes)) {
            self.bytes.read_at(offset_bytes, vector)?;
        }
        Ok(())
    }

    // Nothing panics while the state is half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn open(&mut self, merge_ns: u64) -> u64 {
        let ticket = self.ticket_count;
        self.ticket_count += 1;
        self.flights.insert(ticket, Flight { pieces_left: 0, flash_ns: 0, after_ns: merge_ns });
        ticket
    }

    /// Notes when a flight is over at the earliest, and what follows.
    fn promise(&mut self, ticket: u64, flash_ns: u64, after_ns: u64) {
        if let Some(flight) = self.flights.get_mut(&ticket) {
            flight.flash_ns = flight.flash_ns.max(flash_ns);
            flight.after_ns += after_ns;
        }
    }

    /// Lets all events before `time_ns` happen.
    fn pass_until(&mut self, time_ns: u64) {
        while self.flash.next_ns().is_some_and(|next_ns| next_ns <= time_ns) {
            self.pass_one();
        }
    }

    fn pass_one(&mut self) -> bool {
        let Some(sent) = self.flash.step() else { return false };
        if let Some((piece, time_ns)) = sent {
            if let Some(flight) = self.flights.get_mut(&piece.ticket) {
                flight.pieces_left -= 1;
                flight.flash_ns = flight.flash_ns.max(time_ns);
            }
        }
        true
    }
}

fn gone(ticket: Ticket) -> Error {
    Error::invalid("no such lookup is in flight").with("ticket", ticket.0)
}

/// Block reads and writes. Reads take simulated time, one after the other; writes take none.
impl<D: Device> Device for VectorSsd<D> {
    fn name(&self) -> &str {
        self.bytes.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.bytes.len_bytes()
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.bytes.set_len(len_bytes)
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.bytes.read_at(offset_bytes, out)?;
        let at_ns = self.host_ns();
        let ticket = self.submit_blocks(at_ns, offset_bytes, out.len() as u64);
        let done_ns = self.wait(ticket)?;
        let mut state = self.lock();
        state.host_ns = state.host_ns.max(done_ns);
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.bytes.write_at(offset_bytes, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.bytes.sync()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.bytes.allocated_bytes()
    }
}
