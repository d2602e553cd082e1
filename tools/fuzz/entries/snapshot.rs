//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! decodes them. Damage is an error, which is fine; anything else that goes wrong is a bug.
#![expect(clippy::indexing_slicing, reason = "pages and blocks have the length of a page")]

use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Budget, RowId, RowKey, Schema, TableId, TableSchema};
use tierbed_io::{Device, Folder, MemoryDevice, MemoryFolder, PAGE_BYTES};
use tierbed_kernels::Codec;

use crate::codecs::{TableCodecs, Tables};
use crate::forward_index::{ForwardIndex, IndexShape};
use crate::manifest::{
    Manifest, Placed, PlacementInfo, TableContents, TailInfo, INDEX_NAME, PLAIN_VERSION,
    SNAPSHOT_VERSION,
};
use crate::overlay::{Change, Overlay, OverlayParts};
use crate::page::{le_u64, PageShape, PageView};
use crate::places::{places_blocks, Places};
use crate::shards::{RowShards, ShardsManifest, SHARDS_VERSION};
use crate::tails::{TailShapes, Tails};

// Puts the checksum of the rest over the first four bytes.
fn mend(bytes: &mut [u8]) -> u32 {
    let crc = crc32c(&bytes[4..]);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    crc
}

// Makes `file` that many blocks with their numbers and checksums; returns the checksum over those.
fn mend_blocks(file: &mut Vec<u8>, block_count: u64) -> u32 {
    file.resize(block_count as usize * PAGE_BYTES, 0);
    let mut crc = 0;
    for (number, block) in (0u32..).zip(file.chunks_exact_mut(PAGE_BYTES)) {
        block[4..8].copy_from_slice(&number.to_le_bytes());
        crc = crc32c_append(crc, &mend(block).to_le_bytes());
    }
    crc
}

fn tables() -> Vec<TableSchema> {
    let table = |(name, dim, row_count): (&str, u32, u64)| TableSchema::plain(name, row_count, dim);
    [("narrow", 8, 3000), ("long", 3000, 40), ("wide", 4, 1 << 33)].map(table).to_vec()
}

/// A page of a snapshot.
pub fn page(bytes: &[u8]) {
    let mut page = bytes.to_vec();
    page.resize(PAGE_BYTES, 0);
    mend(&mut page);
    let page_id = le_u64(&page, 16);
    for codec in Codec::PER_ROW {
        let shapes: Vec<PageShape> =
            tables().iter().map(|table| PageShape::new(table, &codec)).collect();
        let Ok(view) = PageView::parse(&page, page_id, &shapes) else { continue };
        for slot in 0..view.row_count {
            assert!(view.find(view.row(slot)).is_some(), "a row that is there is found");
        }
        let _ = view.find(RowId(u64::MAX));
    }
}

/// The manifest of a snapshot.
pub fn manifest(bytes: &[u8]) {
    let _ = Manifest::decode(bytes);
    for version in PLAIN_VERSION..=SNAPSHOT_VERSION {
        let mended = crate::manifest::TEXT.encode(version, bytes);
        if let Ok(manifest) = Manifest::decode(&mended) {
            let again = manifest.encode().ok().and_then(|bytes| Manifest::decode(&bytes).ok());
            assert_eq!(again, Some(manifest), "comes back as it was");
        }
    }
}

/// Pages of a delta; the first two bytes say how many rows its first two tables have.
pub fn overlay(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<2>() else { return };
    let Ok(schema) = Schema::new(tables().into_iter().take(2).collect()) else { return };
    let (mut pages, mut pages_crc32c) = (rest.to_vec(), 0);
    pages.resize(rest.len().div_ceil(PAGE_BYTES).min(4) * PAGE_BYTES, 0);
    for page in pages.chunks_exact_mut(PAGE_BYTES) {
        pages_crc32c = crc32c_append(pages_crc32c, &mend(page).to_le_bytes());
    }
    let page_count = (pages.len() / PAGE_BYTES) as u64;
    let Ok(shape) = IndexShape::without(&schema, page_count, |_| false) else { return };
    let mut index = Vec::new();
    let index_crc32c = mend_blocks(&mut index, shape.block_count());
    let counts = head.map(|rows| TableContents { row_count: u64::from(rows), page_count: 0 });
    let manifest = Manifest {
        schema,
        row_count: counts.iter().map(|table| table.row_count).sum(),
        page_count,
        pages_crc32c,
        index_crc32c,
        tables: counts.to_vec(),
        attachments: Vec::new(),
        base: Some("base".to_owned()),
        base_delta: None,
        placed: None,
        codecs: TableCodecs::default(),
        is_sparse: false,
        tailed: None,
    };
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let device = Arc::new(MemoryDevice::new("rows.pages"));
    let written = device.write_at(0, &pages).and(folder.write_atomic(INDEX_NAME, &index));
    let memory = Budget::unlimited().reserve("deltas", Overlay::memory_bytes(&manifest));
    let (Ok(()), Ok(memory)) = (written, memory) else { return };
    let parts = OverlayParts { number: 1, folder, manifest, pages: device, memory };
    let Ok(overlay) = Overlay::open(parts) else { return };
    let keys: Vec<RowKey> = overlay.keys().collect();
    assert_eq!(keys.len() as u64, overlay.manifest.row_count, "as many rows as it says");
    for key in keys {
        let change = overlay.find(key);
        let is_there = match change {
            Some(Change::Page(page_id)) => page_id < page_count,
            Some(Change::Initial) => true,
            None => false,
        };
        assert!(is_there, "{key:?} is at {change:?}");
    }
}

/// The forward index of a snapshot; its first two bytes say how many pages there are.
pub fn index(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<2>() else { return };
    let page_count = u64::from(u16::from_le_bytes(*head));
    let small = tables().into_iter().take(2).collect();
    let Ok(schema) = Schema::new(small) else { return };
    let dense = IndexShape::without(&schema, page_count, |_| false);
    let sparse = IndexShape::sparse(&schema, page_count, [9, 5].into_iter());
    for shape in [dense, sparse].into_iter().flatten() {
        index_of(&schema, shape, page_count, rest);
    }
}

fn index_of(schema: &Schema, shape: IndexShape, page_count: u64, bytes: &[u8]) {
    let mut file = bytes.to_vec();
    let crc = mend_blocks(&mut file, shape.block_count());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new("rows.index"));
    if device.write_at(0, &file).is_err() {
        return;
    }
    let Ok(index) = ForwardIndex::load(shape, page_count, device.as_ref(), crc) else { return };
    for table in schema.tables() {
        let id = schema.id_of(&table.name).unwrap_or(TableId(0));
        for row in 0..table.row_count {
            if let Ok(Some(page)) = index.get(RowKey::new(id, RowId(row))) {
                assert!(page < page_count, "names a page that exists");
            }
        }
    }
}

/// The places of a snapshot's placement; the first three bytes say how many pages and seats.
pub fn places(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<3>() else { return };
    let [page_count, low, high] = *head;
    let tables = tables().into_iter().take(1).map(|table| TableSchema { row_count: 30, ..table });
    let Ok(schema) = Schema::new(tables.collect()) else { return };
    let placement = PlacementInfo {
        tables: vec![0],
        first_page: 0,
        page_count: u64::from(page_count),
        seat_count: u64::from(u16::from_le_bytes([low, high])),
    };
    let mut placed = Placed { places_crc32c: 0, placements: vec![placement] };
    let Ok(block_count) = places_blocks(&schema, &placed) else { return };
    let mut file = rest.to_vec();
    placed.places_crc32c = mend_blocks(&mut file, block_count);
    let device = MemoryDevice::new("rows.places");
    if device.write_at(0, &file).is_err() {
        return;
    }
    let Ok(places) = Places::load(&schema, &placed, &device, Some(3)) else { return };
    for placement in &places.placements {
        for item in 0..placement.numbering.item_count {
            let mut pages = placement.index.pages_of(item);
            assert!(pages.all(|page| page < u32::from(page_count)), "pages that exist");
        }
    }
}

/// The index of a tail; the first six bytes say how many rows are stored, and are of the head, of
/// tables of short and of long rows.
pub fn tails(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<6>() else { return };
    let [low, high, head_low, head_high, stored_long, head_long] = *head;
    let sizes = [
        (u16::from_le_bytes([low, high]), u16::from_le_bytes([head_low, head_high])),
        (u16::from(stored_long), u16::from(head_long)),
    ];
    let Ok(schema) = Schema::new(tables().into_iter().take(2).collect()) else { return };
    let codecs = TableCodecs::default();
    let (mut contents, mut infos, mut page_count) = (Vec::new(), Vec::new(), 0);
    for ((table, id), (stored, of_head)) in schema.tables().iter().zip(0..).zip(sizes) {
        let (row_count, head_rows) = (u64::from(stored), u64::from(of_head));
        let shape = PageShape::new(table, codecs.of(TableId(id)));
        let pages =
            |rows: u64| rows.div_ceil(shape.rows_per_page as u64) * shape.parts_per_row as u64;
        let own = pages(head_rows) + pages(row_count.saturating_sub(head_rows));
        contents.push(TableContents { row_count, page_count: own });
        infos.push(TailInfo { table: id, head_rows, first_page: page_count });
        page_count += own;
    }
    let tables = Tables { schema: &schema, codecs: &codecs };
    let Ok(shapes) = TailShapes::new(tables, &contents, &infos) else { return };
    let mut file = rest.to_vec();
    let crc = mend_blocks(&mut file, shapes.block_count());
    let device = MemoryDevice::new("rows.tails");
    if device.write_at(0, &file).is_err() {
        return;
    }
    let Ok(tails) = Tails::load(shapes, &device, crc) else { return };
    for ((table, id), contents) in schema.tables().iter().zip(0..).zip(&contents) {
        let mut stored = 0;
        for row in (0..table.row_count).map(RowId) {
            match tails.get(RowKey::new(TableId(id), row)) {
                Some(Ok(Some(page))) => assert!(page < page_count, "names a page that exists"),
                Some(Ok(None)) => continue,
                Some(Err(_)) => {}
                None => panic!("table {id} has a tail"),
            }
            stored += 1;
        }
        assert_eq!(stored, contents.row_count, "as many rows as are stored");
    }
}

/// The list of shards, and the shards of a placement.
pub fn shards(bytes: &[u8]) {
    let _ = ShardsManifest::decode(bytes);
    let text = crate::shards::TEXT.encode(SHARDS_VERSION, bytes);
    if let Ok(manifest) = ShardsManifest::decode(&text) {
        let again = manifest.encode().ok().and_then(|bytes| ShardsManifest::decode(&bytes).ok());
        assert_eq!(again, Some(manifest), "comes back as it was");
    }
    let _ = RowShards::decode(bytes);
    let mut mended = [&b"TBshards\0\0\0\0\0\0\0\0"[..], bytes].concat();
    let crc = crc32c(&mended[16..]);
    mended[8..12].copy_from_slice(&crc.to_le_bytes());
    if let Ok(shards) = RowShards::decode(&mended) {
        let is_fine = |&shard: &u16| u32::from(shard) < shards.shard_count();
        assert!(shards.shards().iter().all(is_fine), "a shard that exists");
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("snapshot_page", super::page);
        replay_seeds("snapshot_manifest", super::manifest);
        replay_seeds("snapshot_index", super::index);
        replay_seeds("snapshot_overlay", super::overlay);
        replay_seeds("snapshot_places", super::places);
        replay_seeds("snapshot_tails", super::tails);
        replay_seeds("snapshot_shards", super::shards);
    }
}
