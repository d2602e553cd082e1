//! An open delta upon a snapshot: which rows it has, and on which of its pages.
//!
//! Opening reads every page once and checks it, so a delta that was damaged on its way is refused
//! before anybody asks it. What is kept in memory is twelve bytes a row; the pages stay on disk.

use std::sync::Arc;

use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Reservation, Result, RowId, RowKey, TableId};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_kernels::{fill_initial, Codec, Kernels};

use crate::blocks::{check_crc, read_blocks};
use crate::codecs::InitialCode;
use crate::manifest::{Manifest, INDEX_NAME};
use crate::page::PageView;
use crate::places::Places;
use crate::reader::PageTable;

/// Pages read at once.
const SCAN_PAGES: usize = 16;
/// Bytes of a row's place.
const PLACE_BYTES: u64 = size_of::<RowPlace>() as u64;

/// High and low half of a row's number, and its first page: in this order places are sorted.
type RowPlace = [u32; 3];

/// The page of rows that have their initial weights: none needs to be read.
const INITIAL: u32 = u32::MAX;

/// What a delta says of a row that it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Its first page.
    Page(u64),
    /// It has its initial weights again, or a code of them.
    Initial,
}

/// Takes a row and its code.
pub(crate) type CodeSink<'a> = dyn FnMut(RowKey, &[u8]) -> Result<()> + 'a;

/// A delta whose rows are looked up.
#[derive(Debug)]
pub(crate) struct Overlay {
    /// Generation that it came with: no other has it.
    pub(crate) number: u64,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) manifest: Manifest,
    pub(crate) identity: String,
    pub(crate) pages: Arc<dyn Device>,
    pub(crate) page_table: PageTable,
    /// By table, ascending.
    rows: Vec<Vec<RowPlace>>,
    kernels: Kernels,
    memory: Reservation,
}

/// Takes a row, its first page and its code.
type PlaceSink<'a> = dyn FnMut(RowKey, u64, &[u8]) -> Result<()> + 'a;

/// What an overlay is made of.
pub(crate) struct OverlayParts {
    pub(crate) number: u64,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) manifest: Manifest,
    /// The page file, of the manifest's length.
    pub(crate) pages: Arc<dyn Device>,
    /// As many bytes as [`Overlay::memory_bytes`] says.
    pub(crate) memory: Reservation,
}

impl Overlay {
    /// Returns the bytes that a delta takes in memory.
    pub(crate) fn memory_bytes(manifest: &Manifest) -> u64 {
        manifest.row_count.saturating_mul(PLACE_BYTES) + (SCAN_PAGES * PAGE_BYTES) as u64
    }

    /// Reads and checks a delta.
    ///
    /// # Errors
    /// `Unsupported` for one whose tables share pages, or with 2^32 pages; `Corruption` when a
    /// page, the index or an attachment is not what was written, `Io` from the folder.
    pub(crate) fn open(parts: OverlayParts) -> Result<Self> {
        let OverlayParts { number, folder, manifest, pages, memory } = parts;
        if manifest.placed.is_some() || manifest.page_count > u64::from(u32::MAX) {
            return Err(Error::unsupported("delta has pages that tables share, or too many")
                .with("pages", manifest.page_count)
                .with("remedy", "publish in full"));
        }
        let memory_bytes = Self::memory_bytes(&manifest);
        assert!(memory.bytes() >= memory_bytes, "{} of {memory_bytes} bytes", memory.bytes());
        let rows = manifest.tables.iter().map(|table| {
            let row_count = usize::try_from(table.row_count).unwrap_or(usize::MAX);
            Vec::with_capacity(row_count)
        });
        let mut overlay = Self {
            number,
            identity: manifest.identity()?,
            rows: rows.collect(),
            page_table: PageTable::new(&manifest, &Places::default(), pages.name())?,
            folder,
            manifest,
            pages,
            kernels: Kernels::detect(),
            memory,
        };
        let mut rows = std::mem::take(&mut overlay.rows);
        overlay.read_places(&mut rows)?;
        overlay.rows = rows;
        overlay.check_index()?;
        for attachment in &overlay.manifest.attachments {
            overlay.manifest.read_attachment(overlay.folder.as_ref(), &attachment.name)?;
        }
        Ok(overlay)
    }

    /// Returns the bytes held: what counts against the budget.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Returns what the delta says of a row; `None` when it has it not.
    pub(crate) fn find(&self, key: RowKey) -> Option<Change> {
        let rows = self.rows.get(key.table.0 as usize)?;
        let wanted = halves(key.row);
        let at = rows.binary_search_by_key(&wanted, |&[high, low, _]| [high, low]).ok()?;
        rows.get(at).map(|&[_, _, page]| match page {
            INITIAL => Change::Initial,
            page => Change::Page(u64::from(page)),
        })
    }

    /// Returns the rows of the delta, table by table.
    pub(crate) fn keys(&self) -> impl Iterator<Item = RowKey> + '_ {
        self.rows.iter().zip(0..).flat_map(|(rows, table)| {
            rows.iter().map(move |&[high, low, _]| {
                let row = RowId((u64::from(high) << 32) | u64::from(low));
                RowKey::new(TableId(table), row)
            })
        })
    }

    /// Reads and checks all pages again, in order; hands each row's code to `sink`.
    ///
    /// # Errors
    /// `Corruption` and `Io` as when it was opened; errors of `sink` pass through.
    pub(crate) fn scan(&self, sink: &mut CodeSink<'_>) -> Result<()> {
        self.scan_pages(&mut |key, _, code| sink(key, code))
    }

    /// Writes the weights of a row whose code was scanned to `out`.
    pub(crate) fn weights(&self, key: RowKey, code: &[u8], out: &mut Vec<f32>) -> Result<()> {
        let table = self.manifest.schema.table(key.table)?;
        out.resize(table.dim as usize, 0.0);
        let codec = self.manifest.codecs.of(key.table);
        assert_eq!(code.len(), codec.code_bytes(out.len()), "bytes of the code of {key:?}");
        match (self.find(key), codec) {
            (Some(Change::Initial), _) => fill_initial(&table.init, table.seed, key.row.0, out),
            (_, Codec::F32) => bytemuck::cast_slice_mut(out).copy_from_slice(code),
            (_, codec) => self.kernels.decode_row(codec, code, out),
        }
        Ok(())
    }

    fn read_places(&self, rows: &mut [Vec<RowPlace>]) -> Result<()> {
        let mut initial = InitialCode::default();
        self.scan_pages(&mut |key, page_id, code| {
            let [high, low] = halves(key.row);
            let Some(rows) = rows.get_mut(key.table.0 as usize) else {
                panic!("{key:?} is of no table of the delta");
            };
            if rows.len() == rows.capacity() {
                return Err(self.damaged("delta has more rows than its manifest says"));
            }
            let (table, codec) =
                (self.manifest.schema.table(key.table)?, self.manifest.codecs.of(key.table));
            // As a whole snapshot does: a code of the initial weights stands for these themselves.
            let is_initial = initial.is(table, codec, key.row, code);
            assert!(page_id < u64::from(INITIAL), "page {page_id} of a delta");
            rows.push([high, low, if is_initial { INITIAL } else { page_id as u32 }]);
            Ok(())
        })?;
        for (rows, table) in rows.iter_mut().zip(&self.manifest.tables) {
            rows.sort_unstable();
            let is_twice = rows.windows(2).any(|pair| match pair {
                [[high, low, _], [next_high, next_low, _]] => (high, low) == (next_high, next_low),
                _ => false,
            });
            if is_twice || rows.len() as u64 != table.row_count {
                return Err(self.damaged("delta has other rows than its manifest says"));
            }
        }
        Ok(())
    }

    fn check_index(&self) -> Result<()> {
        let shape = self.manifest.index_shape()?;
        let device = self.folder.open(INDEX_NAME, OpenMode::ReadOnly)?;
        if device.len_bytes()? != shape.block_count() * PAGE_BYTES as u64 {
            return Err(self.damaged("index of the delta has the wrong length"));
        }
        let found = read_blocks(device.as_ref(), shape.block_count(), |_| ())?;
        check_crc(device.as_ref(), self.manifest.index_crc32c, found)
    }

    /// Hands every row, its first page and its code to `sink`.
    fn scan_pages(&self, sink: &mut PlaceSink<'_>) -> Result<()> {
        let mut buffer = AlignedBuf::new(SCAN_PAGES * PAGE_BYTES);
        let (mut crc, mut gathering) = (0, Gathering::default());
        for first in (0..self.manifest.page_count).step_by(SCAN_PAGES) {
            let count = (self.manifest.page_count - first).min(SCAN_PAGES as u64) as usize;
            let (bytes, _) = buffer.split_at_mut(count * PAGE_BYTES);
            self.pages.read_at(first * PAGE_BYTES as u64, bytes)?;
            for (bytes, page_id) in bytes.chunks_exact(PAGE_BYTES).zip(first..) {
                let page = PageView::parse(bytes, page_id, &self.page_table.shapes);
                let page = page.map_err(|error| error.with("path", &self.page_table.path))?;
                crc = crc32c_append(crc, &page.crc.to_le_bytes());
                self.scan_page(&page, &mut gathering, sink)?;
            }
        }
        if !gathering.is_done() || crc != self.manifest.pages_crc32c {
            return Err(self.damaged("page file belongs to another delta"));
        }
        Ok(())
    }

    fn scan_page(
        &self,
        page: &PageView<'_>,
        gathering: &mut Gathering,
        sink: &mut PlaceSink<'_>,
    ) -> Result<()> {
        let table = self.manifest.schema.table(page.owner)?;
        let Some(shape) = self.page_table.shapes.get(page.owner.0 as usize) else {
            panic!("page of table {} was checked", page.owner.0);
        };
        for slot in 0..page.row_count {
            let key = RowKey::new(page.owner, page.row(slot));
            if key.row.0 >= table.row_count || !gathering.takes(key, page) {
                return Err(self.damaged("page of the delta is not where it belongs"));
            }
            gathering.code.extend_from_slice(page.code(slot));
            if page.part + 1 == shape.parts_per_row {
                let first_page = page.page_id - page.part as u64;
                sink(key, first_page, &gathering.code)?;
                gathering.code.clear();
            }
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> Error {
        Error::corruption(what)
            .with("path", &self.page_table.path)
            .with("remedy", "copy or publish the delta again")
    }
}

/// The code of a row, as its parts come page by page.
#[derive(Debug, Default)]
struct Gathering {
    key: Option<RowKey>,
    /// Parts that have come of it.
    part_count: usize,
    code: Vec<u8>,
}

impl Gathering {
    /// Tells whether the next part is one of `page`.
    fn takes(&mut self, key: RowKey, page: &PageView<'_>) -> bool {
        let is_next = match page.part {
            0 => self.code.is_empty(),
            part => self.key == Some(key) && self.part_count == part && !self.code.is_empty(),
        };
        (self.key, self.part_count) = (Some(key), page.part + 1);
        is_next
    }

    fn is_done(&self) -> bool {
        self.code.is_empty()
    }
}

fn halves(row: RowId) -> [u32; 2] {
    [(row.0 >> 32) as u32, row.0 as u32]
}
