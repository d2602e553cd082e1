//! The page map file of a commit.
//!
//! One file per table and commit, little-endian, whole 4 KiB blocks; normative text:
//! `docs/reference/formats/store.md`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | magic `TBpagmap` |
//! | 8..12 | version, 1 |
//! | 12..16 | crc32c of all words |
//! | 16..24 | page count |
//! | 24..28 | crc32c of bytes 0..24 |
//! | 28..4096 | zero |
//! | 4096.. | one u16 word per page, then zeros to the end of the block |

#![expect(
    clippy::indexing_slicing,
    reason = "chunks hold whole blocks of at most CHUNK_WORDS words"
)]

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Folder, OpenMode, PAGE_BYTES};

use super::page_map::PageMap;

const MAGIC: [u8; 8] = *b"TBpagmap";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 24;
/// Bytes moved at once; counted against the budget as `commit buffer`.
pub(super) const CHUNK_BYTES: usize = 64 * 1024;
const CHUNK_WORDS: u64 = CHUNK_BYTES as u64 / 2;

/// Writes `map` durably as `name`; returns the checksum of its words.
///
/// # Errors
/// `NoSpace`, `Io`.
pub(super) fn write_map(folder: &dyn Folder, name: &str, map: &PageMap) -> Result<u32> {
    let device = folder.open(name, OpenMode::Create)?;
    device.set_len(0)?;
    let mut chunk = AlignedBuf::new(CHUNK_BYTES);
    let mut words = map.committed_words();
    let (mut left, mut at, mut crc) = (map.page_count(), PAGE_BYTES as u64, 0);
    while left > 0 {
        let count = left.min(CHUNK_WORDS) as usize;
        for (place, word) in chunk.chunks_exact_mut(2).zip(words.by_ref().take(count)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let (data, padding) = chunk.split_at_mut(2 * count);
        crc = crc32c_append(crc, data);
        padding.fill(0);
        let len_bytes = (2 * count).next_multiple_of(PAGE_BYTES);
        device.write_at(at, &chunk[..len_bytes])?;
        at += len_bytes as u64;
        left -= count as u64;
    }
    let mut header = AlignedBuf::new(PAGE_BYTES);
    fill_header(&mut header, map.page_count(), crc);
    device.write_at(0, &header)?;
    device.sync()?;
    Ok(crc)
}

pub(super) fn fill_header(block: &mut [u8], page_count: u64, words_crc: u32) {
    assert!(block.len() >= PAGE_BYTES, "a header fills a block");
    let fields = MAGIC
        .into_iter()
        .chain(VERSION.to_le_bytes())
        .chain(words_crc.to_le_bytes())
        .chain(page_count.to_le_bytes());
    for (place, byte) in block.iter_mut().zip(fields) {
        *place = byte;
    }
    let crc = crc32c(&block[..HEADER_BYTES]);
    block[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Reads the map `name` of a table of `page_count` pages, whose words have checksum `crc`.
///
/// # Errors
/// `Corruption` when the file is missing, short, damaged, or of another table.
pub(super) fn read_map(
    folder: &dyn Folder,
    name: &str,
    page_count: u64,
    crc: u32,
) -> Result<PageMap> {
    let damaged = |what: &str| Error::corruption(format!("page map {what}")).with("file", name);
    let device = folder
        .open(name, OpenMode::ReadOnly)
        .map_err(|error| damaged("cannot be opened").with("cause", error))?;
    let mut header = AlignedBuf::new(PAGE_BYTES);
    device.read_at(0, &mut header)?;
    let mut wanted = AlignedBuf::new(PAGE_BYTES);
    fill_header(&mut wanted, page_count, crc);
    if header[..] != wanted[..] {
        return Err(damaged("header differs from the manifest"));
    }
    let capacity = usize::try_from(page_count).map_err(|_| damaged("is too large"))?;
    let mut words = Vec::with_capacity(capacity);
    let mut chunk = AlignedBuf::new(CHUNK_BYTES);
    let (mut left, mut at, mut found) = (page_count, PAGE_BYTES as u64, 0);
    while left > 0 {
        let count = left.min(CHUNK_WORDS) as usize;
        let len_bytes = (2 * count).next_multiple_of(PAGE_BYTES);
        device.read_at(at, &mut chunk[..len_bytes])?;
        let data = &chunk[..2 * count];
        found = crc32c_append(found, data);
        words.extend(data.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)));
        at += len_bytes as u64;
        left -= count as u64;
    }
    if found != crc {
        return Err(damaged("checksum mismatch")
            .with("expected", format_args!("{crc:08x}"))
            .with("found", format_args!("{found:08x}")));
    }
    PageMap::from_words(words).map_err(|error| error.with("file", name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_io::MemoryFolder;

    #[test]
    fn a_map_comes_back_and_damage_is_noticed() {
        let folder = MemoryFolder::default();
        let mut map = PageMap::new(70_000).unwrap();
        for page in [0, 5, 32_767, 32_768, 69_999] {
            map.set(page, map.get(page).next_write());
        }
        let crc = write_map(&folder, "m", &map).unwrap();
        let read = read_map(&folder, "m", 70_000, crc).unwrap();
        assert!((0..70_000).all(|page| read.get(page).is_written() == map.get(page).is_written()));
        assert!(read_map(&folder, "m", 70_001, crc).is_err());
        let device = folder.open("m", OpenMode::ReadWrite).unwrap();
        for at in [0u64, 9, 4096 + 1, 4096 + 139_999] {
            let mut block = AlignedBuf::new(PAGE_BYTES);
            let start = at / 4096 * 4096;
            device.read_at(start, &mut block).unwrap();
            block[(at - start) as usize] ^= 4;
            device.write_at(start, &block).unwrap();
            assert!(read_map(&folder, "m", 70_000, crc).is_err(), "byte {at}");
            block[(at - start) as usize] ^= 4;
            device.write_at(start, &block).unwrap();
        }
        read_map(&folder, "m", 70_000, crc).unwrap();
    }
}
