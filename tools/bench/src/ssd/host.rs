//! What does a host do around a simulated SSD? The systems of FlashEmbedding's figures.
//!
//! | system | rows come from |
//! |---|---|
//! | `memory` | one array |
//! | `blocks` | a page cache of 4 KiB pages (LRU), else a block read, one at a time |
//! | `vectors` | the vector interface, a batch at once |
//! | `vectors_cache` | a row cache behind the bitmap; the others as `vectors` |
//! | `vectors_cache_pipeline` | the same by sub-batches: the device works while the host prepares |
//!
//! Source: FlashEmbedding §3.3, §3.4, §5. Differs: one table, one host thread; the page cache
//! and the row cache have the same bytes.

use tierbed_cache::{AdmissionRule, PolicyKind, ReplayCache};
use tierbed_core::{Error, Result};
use tierbed_io::{MemoryDevice, PAGE_BYTES};
use tierbed_lab::vector_ssd::{Extent, Ticket};
use tierbed_lab::{SsdModel, VectorSsd, VectorTable};

use super::Options;

/// The systems, slowest idea first.
pub(super) const SYSTEMS: [System; 5] = [
    System::Blocks,
    System::Vectors,
    System::VectorsCache,
    System::VectorsCachePipeline,
    System::Memory,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum System {
    Memory,
    Blocks,
    Vectors,
    VectorsCache,
    VectorsCachePipeline,
}

impl System {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Blocks => "blocks",
            Self::Vectors => "vectors",
            Self::VectorsCache => "vectors_cache",
            Self::VectorsCachePipeline => "vectors_cache_pipeline",
        }
    }
}

/// One system with its device and caches, at an instant of simulated time.
#[derive(Debug)]
pub(super) struct Host {
    system: System,
    options: Options,
    ssd: VectorSsd<MemoryDevice>,
    cache: ReplayCache,
    now_ns: u64,
    hits: u64,
    asked: u64,
    missing: Vec<u64>,
}

impl Host {
    pub(super) fn new(system: System, options: &Options, row_count: usize) -> Result<Self> {
        let ssd = VectorSsd::new(
            MemoryDevice::new("simulated"),
            SsdModel::with_read_us(options.read_us),
        )?;
        let extents = vec![Extent { row_count: row_count as u64, offset_bytes: 0 }];
        ssd.add_table(VectorTable::new(options.vector_bytes, extents)?);
        let cache_bytes = row_count as f64 * f64::from(options.vector_bytes) * options.cache_share;
        let (lines, line_bytes) = match system {
            System::Blocks => (pages(row_count, options), PAGE_BYTES as u64),
            _ => (row_count, u64::from(options.vector_bytes)),
        };
        let capacity = ((cache_bytes / line_bytes as f64) as usize).max(1);
        let cache = ReplayCache::new(PolicyKind::Lru, lines, capacity)?;
        let threshold = options.admit_from;
        let cache = match system {
            System::VectorsCache | System::VectorsCachePipeline if threshold > 0 => {
                cache.with_admission(AdmissionRule::Bitmap { threshold, age_after: 0 })?
            }
            _ => cache,
        };
        Ok(Self {
            system,
            options: options.clone(),
            ssd,
            cache,
            now_ns: 0,
            hits: 0,
            asked: 0,
            missing: Vec::new(),
        })
    }

    /// Answers a batch of queries; returns the nanoseconds it took.
    pub(super) fn ask(&mut self, batch: &[&[u32]]) -> Result<u64> {
        let start_ns = self.now_ns;
        self.asked += batch.iter().map(|rows| rows.len() as u64).sum::<u64>();
        match self.system {
            System::Memory => {
                let rows: usize = batch.iter().map(|rows| rows.len()).sum();
                self.now_ns += rows as u64 * self.options.row_ns;
            }
            System::Blocks => self.by_blocks(batch)?,
            System::Vectors | System::VectorsCache => self.by_vectors(batch, batch.len().max(1))?,
            System::VectorsCachePipeline => {
                let part = batch.len().div_ceil(self.options.sub_batches.max(1)).max(1);
                self.by_vectors(batch, part)?;
            }
        }
        Ok(self.now_ns - start_ns)
    }

    /// Hits, rows asked for, bytes the device gave to the host, pages its flash read.
    pub(super) fn counts(&self) -> (u64, u64, u64, u64) {
        let counts = self.ssd.counts();
        (self.hits, self.asked, counts.host_bytes, counts.flash_pages)
    }

    /// Every row of a page that is not cached waits for its block.
    fn by_blocks(&mut self, batch: &[&[u32]]) -> Result<()> {
        for &row in batch.iter().copied().flatten() {
            let offset_bytes = u64::from(row) * u64::from(self.options.vector_bytes);
            let page = offset_bytes / PAGE_BYTES as u64;
            self.now_ns += self.options.row_ns;
            if self.cache.ask(&[narrow(page)?])? > 0 {
                self.hits += 1;
                continue;
            }
            let len_bytes = u64::from(self.options.vector_bytes).min(PAGE_BYTES as u64);
            let from_ns = self.now_ns + self.options.block_host_ns;
            let ticket = self.ssd.submit_blocks(from_ns, offset_bytes, len_bytes);
            self.now_ns = self.ssd.wait(ticket)?;
        }
        Ok(())
    }

    /// Sends parts of `part` queries to the device, and waits for all of the batch.
    fn by_vectors(&mut self, batch: &[&[u32]], part: usize) -> Result<()> {
        let mut tickets: Vec<Ticket> = Vec::new();
        for queries in batch.chunks(part) {
            self.missing.clear();
            for &row in queries.iter().copied().flatten() {
                self.now_ns += self.options.row_ns;
                if self.system != System::Vectors && self.cache.contains(row) {
                    self.hits += 1;
                } else {
                    self.missing.push(u64::from(row));
                }
            }
            if !self.missing.is_empty() {
                tickets.push(self.ssd.submit(self.now_ns, 0, &self.missing, None)?);
            }
            // What this part used is known, and in the cache, before the next part is prepared.
            if self.system != System::Vectors {
                for rows in queries {
                    self.cache.ask(rows)?;
                }
            }
        }
        for ticket in tickets {
            self.now_ns = self.now_ns.max(self.ssd.wait(ticket)?);
        }
        Ok(())
    }
}

fn pages(row_count: usize, options: &Options) -> usize {
    (row_count as u64 * u64::from(options.vector_bytes)).div_ceil(PAGE_BYTES as u64) as usize
}

fn narrow(page: u64) -> Result<u32> {
    u32::try_from(page).map_err(|_| Error::invalid("table too large to replay").with("page", page))
}
