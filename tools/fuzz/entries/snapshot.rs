//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, and
//! decodes them. Damage is an error, which is fine; anything else that goes wrong is a bug.
#![expect(clippy::indexing_slicing, reason = "pages and blocks have the length of a page")]

use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{RowId, RowKey, Schema, TableId, TableSchema};
use tierbed_io::{Device, MemoryDevice, PAGE_BYTES};
use tierbed_kernels::Codec;

use crate::forward_index::{ForwardIndex, IndexShape};
use crate::manifest::{Manifest, Placed, PlacementInfo, PLAIN_VERSION, SNAPSHOT_VERSION};
use crate::page::{le_u64, PageShape, PageView};
use crate::places::{places_blocks, Places};

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

/// The forward index of a snapshot; its first two bytes say how many pages there are.
pub fn index(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<2>() else { return };
    let page_count = u64::from(u16::from_le_bytes(*head));
    let small = tables().into_iter().take(2).collect();
    let Ok(schema) = Schema::new(small) else { return };
    let Ok(shape) = IndexShape::without(&schema, page_count, |_| false) else { return };
    let mut file = rest.to_vec();
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
            let pages = placement.index.pages_of(item);
            assert!(pages.iter().all(|&page| page < u32::from(page_count)), "pages that exist");
        }
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
        replay_seeds("snapshot_places", super::places);
    }
}
