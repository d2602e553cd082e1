//! Page reader of one call: an I/O engine, one or two scratches, and page selection.
//!
//! ```text
//! plain tables   rows by page ────────────────┐
//! placements     rows ─▶ choose a page ─▶ submit it, choose the next ─▶ … ─▶ land: check, copy out
//!                              ▲                                                  │ bad page
//!                              └──────────── another page of the same row ◀───────┘
//! ```
//!
//! Choosing goes on while what was chosen flies (MaxEmbed §6.2), and a reader with two scratches
//! lets pages of one fly while the rows of the other are dealt with (FlashEmbedding §3.4).
#![expect(
    clippy::indexing_slicing,
    reason = "selection answers with positions of what it was asked"
)]

mod flights;

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::select;
use tierbed_core::stats::IoStats;
use tierbed_core::{Result, RowId, RowKey, TableId};
use tierbed_io::{open_engine, Device, EngineOptions};
use tierbed_kernels::Codec;

use self::flights::{Flights, Wanting};
use crate::layers::Layers;
use crate::manifest::Manifest;
use crate::page::PageShape;
use crate::places::Places;
use crate::scratch::{AskedItem, Scratch, Wanted};
use crate::snapshot::SelectOptions;

/// What a reader must know of a snapshot.
pub(crate) struct Source<'a> {
    pub(crate) pages: &'a PageTable,
    pub(crate) places: &'a Places,
    pub(crate) options: SelectOptions,
    /// Deltas upon the snapshot.
    pub(crate) layers: &'a Layers,
}

/// What a reader must know of the page file.
#[derive(Debug)]
pub(crate) struct PageTable {
    /// By owner: the tables, then the placements.
    pub(crate) shapes: Vec<PageShape>,
    /// By owner.
    pub(crate) codecs: Vec<Codec>,
    pub(crate) path: String,
}

impl PageTable {
    /// Takes the shapes and codecs of all owners of the page file `path`.
    pub(crate) fn new(manifest: &Manifest, places: &Places, path: &str) -> Result<Self> {
        let codecs_of = &manifest.codecs;
        let (mut shapes, mut codecs) = (Vec::new(), Vec::new());
        for (table, id) in manifest.schema.tables().iter().zip(0..) {
            let codec = codecs_of.of(TableId(id));
            shapes.push(PageShape::new(table, codec));
            codecs.push(codec.clone());
        }
        for placement in &places.placements {
            shapes.push(placement.numbering.shape(codecs_of)?);
            codecs.push(placement.numbering.codec(codecs_of)?.clone());
        }
        Ok(Self { shapes, codecs, path: path.to_owned() })
    }
}

impl PageTable {
    /// Returns how the rows of a table are cut into pages.
    ///
    /// # Panics
    /// When there is no such table.
    pub(crate) fn shape(&self, table: TableId) -> &PageShape {
        let at = table.0 as usize;
        assert!(at < self.shapes.len(), "table {at} of {} owners", self.shapes.len());
        &self.shapes[at]
    }
}

impl<'a> Source<'a> {
    /// Returns what there is to know of the pages of a layer.
    pub(crate) fn page_table(&self, layer: usize) -> &'a PageTable {
        if layer == 0 {
            self.pages
        } else {
            &self.layers.overlay(layer).page_table
        }
    }

    /// Returns how pages of a layer name a row: their owner, and its number there.
    fn seat_of(&self, layer: usize, key: RowKey) -> (TableId, RowId) {
        // Only tables of the snapshot itself share pages.
        if layer > 0 {
            return (key.table, key.row);
        }
        match self.places.starts.find(key) {
            None => (key.table, key.row),
            Some((placement, item)) => {
                assert!(
                    (placement as usize) < self.places.placements.len(),
                    "placement {placement} of {}",
                    self.places.placements.len()
                );
                let table_count = self.pages.shapes.len() - self.places.placements.len();
                (TableId(table_count as u32 + placement), RowId(u64::from(item)))
            }
        }
    }

    /// Returns the pages of a row that may be read, the most useful first; none for rows of
    /// tables with pages of their own.
    fn pages_of(&self, key: RowKey) -> impl Iterator<Item = u64> + '_ {
        let found = self.places.starts.find(key);
        let found = found.map(|(at, item)| (self.places.at(at), item));
        found.into_iter().flat_map(|(placement, item)| {
            let pages = placement.index.pages_of(item);
            pages.map(|page| placement.first_page + u64::from(page))
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

/// An engine over the page file, and a scratch or two.
pub(crate) struct Reader {
    /// Its place among the readers of a snapshot.
    pub(crate) number: usize,
    /// What waits for the ring on behalf of a caller; dropped before the ring is closed.
    notifier: Option<Box<dyn Any + Send + Sync>>,
    flights: Flights,
    /// Rows that are dealt with now.
    pub(crate) scratch: Scratch,
    /// Other rows, whose pages may fly meanwhile.
    other: Option<Scratch>,
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
        other: Option<Scratch>,
    ) -> Result<Self> {
        let flights = Flights::new(open_engine(options)?, pages, options.queue_depth);
        let choice = Choice::default();
        Ok(Self { number, notifier: None, flights, scratch, other, choice })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        let other_bytes = self.other.as_ref().map_or(0, Scratch::memory_bytes);
        self.flights.memory_bytes() + self.scratch.memory_bytes() + other_bytes
    }

    /// Tells whether pages of one scratch can fly while rows of another are dealt with.
    pub(crate) fn has_two(&self) -> bool {
        self.other.is_some()
    }

    /// Begins a call in `layers`: failures of earlier ones are forgotten.
    pub(crate) fn begin(&mut self, layers: &Layers) {
        self.flights.begin(layers);
    }

    /// Reads pages of `layers`, and of no other deltas, from now on.
    pub(crate) fn attach(&mut self, layers: &Layers) {
        self.flights.attach(layers);
    }

    /// Deals with the other scratch from now on; `false` when there is none.
    pub(crate) fn turn(&mut self) -> bool {
        let Some(other) = &mut self.other else { return false };
        std::mem::swap(&mut self.scratch, other);
        self.flights.turn();
        true
    }

    /// Returns how many pages the reader lets fly at once, as it found out.
    pub(crate) fn queue_depth(&self) -> u32 {
        self.flights.depth()
    }

    pub(crate) fn io_stats(&self) -> IoStats {
        self.flights.stats()
    }

    /// Asks for the pages named in the scratch's `wanted`, and the pages it chooses for the rows
    /// in `asked`, each once; rows of pages that have come are copied into the scratch's words.
    pub(crate) fn submit(&mut self, source: &Source<'_>) {
        let Self { flights, scratch, other, choice, .. } = self;
        flights.begin_part();
        scratch.wanted.sort_unstable();
        let mut wanting = Wanting { scratch, other: other.as_mut() };
        flights.submit_from(&mut wanting, 0, source);
        let mut asked = std::mem::take(&mut wanting.scratch.asked);
        asked.sort_unstable_by_key(|asked| asked.placement);
        let chosen_from = wanting.scratch.wanted.len();
        for asked in asked.chunk_by(|a, b| a.placement == b.placement) {
            choice.choose(asked, source, |page_id, served| {
                let wanted = &mut wanting.scratch.wanted;
                let first = wanted.len();
                let rows = served.iter().map(|&position| asked[position as usize]);
                wanted.extend(rows.map(|asked| Wanted { page_id, at: asked.at, part: 0 }));
                if source.options.is_pipelined {
                    flights.submit(&mut wanting, first, source);
                    flights.hand_over(&mut wanting, source, asked.len());
                }
            });
        }
        if !source.options.is_pipelined {
            flights.submit_from(&mut wanting, chosen_from, source);
        }
        wanting.scratch.asked = asked;
    }

    /// Lets all pages fly that were asked for, for when the caller does something else first.
    pub(crate) fn hand_over(&mut self, source: &Source<'_>) {
        let Self { flights, scratch, other, .. } = self;
        flights.hand_over_all(&mut Wanting { scratch, other: other.as_mut() }, source);
    }

    /// Waits for the pages of the scratch that deals now, failed pages' substitutes included.
    ///
    /// # Errors
    /// `Corruption` for a page that fails its checks or lacks a row the index promised, `Io`
    /// from the device; not when other pages have the rows. Pages may be flying still then: see
    /// [`land_all`](Self::land_all).
    pub(crate) fn finish(&mut self, source: &Source<'_>) -> Result<PagesRead> {
        let Self { flights, scratch, other, .. } = self;
        flights.finish(&mut Wanting { scratch, other: other.as_mut() }, source)
    }

    /// Tells whether a caller may wait for pages and for other things at once.
    pub(crate) fn has_ring(&self) -> bool {
        self.flights.ring().is_some()
    }

    /// Returns what waits for the ring; makes it where `is_of` does not know what there is.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn notifier<T: Any + Send + Sync, E>(
        &mut self,
        is_of: impl FnOnce(&T) -> bool,
        make: impl FnOnce(BorrowedFd<'_>) -> std::result::Result<T, E>,
    ) -> std::result::Result<&T, E> {
        let known = self.notifier.take().and_then(|known| known.downcast::<T>().ok());
        let notifier = match known.filter(|known| is_of(known)) {
            Some(known) => known,
            None => {
                let Some(ring) = self.flights.ring() else {
                    panic!("reader {} has no ring", self.number);
                };
                Box::new(make(ring)?)
            }
        };
        let Some(notifier) = self.notifier.insert(notifier).downcast_ref() else {
            panic!("a notifier changes its type");
        };
        Ok(notifier)
    }

    /// Returns how many pages may be asked for without waiting for one.
    pub(crate) fn room(&self) -> usize {
        self.flights.room()
    }

    /// Takes the rows out of the pages that have come, without waiting; returns whether all have
    /// come, or one has failed: [`finish`](Self::finish) does not wait then.
    pub(crate) fn land_ready(&mut self, source: &Source<'_>) -> bool {
        let Self { flights, scratch, other, .. } = self;
        flights.land_ready(&mut Wanting { scratch, other: other.as_mut() }, source)
    }

    /// Tells whether no page is on its way any more for a caller who left.
    pub(crate) fn has_landed(&mut self) -> bool {
        self.flights.has_landed()
    }

    /// Waits for all pages, takes nothing out of them and forgets failures: a call has failed, and
    /// the engine is used by the next.
    pub(crate) fn land_all(&mut self) {
        self.flights.land_all();
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
        let Some(first) = asked.first() else { return };
        let is_one = asked.last().is_some_and(|last| last.placement == first.placement);
        assert!(is_one, "pages are chosen for one placement at a time");
        let placement = source.places.at(first.placement);
        self.items.clear();
        self.items.extend(asked.iter().map(|asked| asked.item));
        let (index, first_page) = (&placement.index, placement.first_page);
        source.options.selection.select(index, &self.items, &mut self.scratch, |page, served| {
            take(first_page + u64::from(page), served)
        });
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("number", &self.number).finish_non_exhaustive()
    }
}
