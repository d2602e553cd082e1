//! Entries of the fuzz targets, compiled into the crate: page maps and pages of records.

use tierbed_core::checksum::crc32c;
use tierbed_core::{OptimizerKind, TableSchema};
use tierbed_io::{Folder, MemoryFolder, PAGE_BYTES};

use super::layout::{page_layout, seal, verify, PageName};
use super::map_file::{fill_header, read_map};

/// A page map: a table of as many pages as there are words.
pub fn map(bytes: &[u8]) {
    let words = bytes.as_chunks::<2>().0.as_flattened();
    let (page_count, crc) = (words.len() as u64 / 2, crc32c(words));
    let mut file = vec![0; PAGE_BYTES];
    fill_header(&mut file, page_count, crc);
    file.extend_from_slice(words);
    file.resize(file.len().next_multiple_of(PAGE_BYTES), 0);
    let folder = MemoryFolder::default();
    if folder.write_durable("map", &file).is_err() {
        return;
    }
    let Ok(map) = read_map(&folder, "map", page_count, crc) else { return };
    assert_eq!(map.page_count(), page_count);
    let committed: Vec<u8> = map.committed_words().flat_map(u16::to_le_bytes).collect();
    assert_eq!(committed, words, "comes back as it was");
}

/// A page of records, of several tables' layouts.
pub fn page(bytes: &[u8]) {
    for dim in [1, 8, 2000] {
        let layout = page_layout(&TableSchema {
            optimizer: OptimizerKind::Adam,
            ..TableSchema::plain("t", 5000, dim)
        });
        let mut page = bytes.to_vec();
        page.resize(layout.page_bytes, 0);
        let name = PageName { magic: *b"TBr1", owner: 0, page: 1, generation: 3 };
        let _ = verify(&page, name, "t.rows");
        seal(&mut page, name);
        assert!(verify(&page, name, "t.rows").is_ok(), "a sealed page is right");
        for slot in 0..layout.rows_per_page as usize {
            let record = layout.record(&page, slot);
            assert!(record.is_none_or(|record| record.len() == layout.record_bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("store_map", super::map);
        replay_seeds("store_page", super::page);
    }
}
