//! File format of a placement.
//!
//! ```text
//! magic │ crc32c │ 0 │ row_count rows_per_page page_count home_page_count │ seat_count
//! rows on each page │ homes on each home page │ rows of all pages │ pages of all rows
//! ```
//! The last part is the forward index: each row's most useful page first. It is stored because its
//! order is learnt from a log that may be gone. Format: `docs/reference/formats/placement.md`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::Placement;
use crate::index::{Lists, PageIndex};

const MAGIC: [u8; 8] = *b"TBplace1";
/// Magic, checksum, four zero bytes: what the checksum does not cover.
const PREFIX_BYTES: usize = 16;
/// Numbers of 4 bytes before the parts; the seat count takes two.
const HEADER_WORDS: usize = 6;

/// Writes `placement` to `path`, with the pages of each row in the order of `index`.
///
/// The file appears whole or not at all.
///
/// # Errors
/// `Invalid` when `index` is that of another placement; `Io` and `NoSpace`.
pub fn write_placement(placement: &Placement, index: &PageIndex, path: &Path) -> Result<()> {
    check_index(placement, index)?;
    let mut bytes = vec![0; PREFIX_BYTES];
    let mut put = |word: u32| bytes.extend(word.to_le_bytes());
    let homes = homes_per_page(placement);
    let seat_count = u64::from(placement.row_count()) + placement.replica_count();
    put(placement.row_count());
    put(placement.rows_per_page());
    put(placement.page_count());
    put(placement.home_page_count());
    put(seat_count as u32);
    put((seat_count >> 32) as u32);
    placement.pages().for_each(|page| put(page.len() as u32));
    homes.iter().for_each(|count| put(*count));
    placement.pages().flatten().for_each(|row| put(*row));
    index.forward().items().iter().for_each(|page| put(*page));
    let (prefix, rest) = bytes.split_at_mut(PREFIX_BYTES);
    let checksum = crc32c(rest);
    for (place, byte) in prefix.iter_mut().zip(MAGIC.iter().chain(&checksum.to_le_bytes())) {
        *place = *byte;
    }
    let temporary = path.with_extension("tmp");
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(&temporary)?);
        file.write_all(&bytes)?;
        file.into_inner()?.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|cause| Error::os("cannot write placement", cause).with("path", path.display()))
}

/// Reads the placement at `path`, and its index.
///
/// # Errors
/// `Corruption` for a damaged file or none of ours, naming it; `Io`.
pub fn read_placement(path: &Path) -> Result<(Placement, PageIndex)> {
    let bytes = std::fs::read(path).map_err(|cause| Error::os("cannot read placement", cause));
    bytes
        .and_then(|bytes| decode_placement(&bytes))
        .map_err(|error| error.with("path", path.display()))
}

/// Decodes a placement file.
///
/// # Errors
/// `Corruption` for any bytes that are none.
pub fn decode_placement(bytes: &[u8]) -> Result<(Placement, PageIndex)> {
    let wrong = |what: &str| Error::corruption(what).with("file_bytes", bytes.len());
    let (prefix, rest) = bytes
        .split_at_checked(PREFIX_BYTES)
        .filter(|(prefix, _)| prefix.starts_with(&MAGIC))
        .ok_or_else(|| wrong("file is no placement"))?;
    let (_, checksum) = prefix.split_at(MAGIC.len());
    if !checksum.starts_with(&crc32c(rest).to_le_bytes()) {
        return Err(wrong("placement checksum mismatch"));
    }
    let (words, tail) = rest.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let parts = if tail.is_empty() { Parts::of(&words) } else { None };
    let parts = parts.ok_or_else(|| wrong("placement has another length than it says"))?;
    parts.build().map_err(|error| wrong("placement contradicts itself").with("cause", error))
}

/// Counts how many rows have their home on each home page.
#[expect(clippy::indexing_slicing, reason = "every home is a home page")]
fn homes_per_page(placement: &Placement) -> Vec<u32> {
    let mut counts = vec![0; placement.home_page_count() as usize];
    for home in placement.home_pages() {
        counts[*home as usize] += 1;
    }
    counts
}

/// Compares the pages of every row, whatever their order.
fn check_index(placement: &Placement, index: &PageIndex) -> Result<()> {
    let expected = PageIndex::new(placement.row_count(), placement.pages())?;
    let is_same = !index.is_limited()
        && expected.forward().starts() == index.forward().starts()
        && expected.forward().iter().zip(index.forward().iter()).all(|(expected, found)| {
            let mut found = found.to_vec();
            found.sort_unstable();
            found == expected
        });
    if is_same {
        return Ok(());
    }
    Err(Error::invalid("index is not that of the placement, or is limited"))
}

/// The parts of a file, cut but not yet compared.
struct Parts<'a> {
    row_count: u32,
    rows_per_page: u32,
    page_sizes: &'a [u32],
    home_counts: &'a [u32],
    rows: &'a [u32],
    pages: &'a [u32],
}

impl<'a> Parts<'a> {
    fn of(words: &'a [u32]) -> Option<Self> {
        let (header, rest) = words.split_at_checked(HEADER_WORDS)?;
        let &[row_count, rows_per_page, page_count, home_count, low, high] = header else {
            return None;
        };
        let seat_count = usize::try_from(u64::from(low) | (u64::from(high) << 32)).ok()?;
        let (page_sizes, rest) = rest.split_at_checked(page_count as usize)?;
        let (home_counts, rest) = rest.split_at_checked(home_count as usize)?;
        let (rows, pages) = rest.split_at_checked(seat_count)?;
        let is_whole = pages.len() == seat_count && row_count as usize <= seat_count;
        is_whole.then_some(Self { row_count, rows_per_page, page_sizes, home_counts, rows, pages })
    }

    fn build(&self) -> Result<(Placement, PageIndex)> {
        let mut builder = Placement::builder(self.row_count, self.rows_per_page)?;
        let short = || Error::corruption("pages have more rows than there are seats");
        let mut rest = self.rows;
        let mut homes = self.home_counts.iter();
        for size in self.page_sizes {
            let (page, behind) = rest.split_at_checked(*size as usize).ok_or_else(short)?;
            match homes.next() {
                Some(count) => {
                    let (homes, replicas) =
                        page.split_at_checked(*count as usize).ok_or_else(short)?;
                    builder.push_home_page(homes, replicas)?;
                }
                None => builder.push_replica_page(page)?,
            }
            rest = behind;
        }
        if !rest.is_empty() || homes.next().is_some() {
            return Err(Error::corruption("seats or homes are on no page"));
        }
        let placement = builder.finish()?;
        // Before anything is as large as the largest page number.
        if self.pages.iter().any(|page| *page >= placement.page_count()) {
            return Err(Error::corruption("row is on a page that does not exist"));
        }
        let in_page_order = PageIndex::new(placement.row_count(), placement.pages())?;
        let starts = in_page_order.forward().starts().to_vec();
        let index = PageIndex::from_forward(Lists::from_parts(starts, self.pages.to_vec())?);
        check_index(&placement, &index)?;
        Ok((placement, index))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::Served;

    fn example() -> (Placement, PageIndex) {
        let mut builder = Placement::builder(6, 4).unwrap();
        builder.push_home_page(&[3, 1, 4, 0], &[]).unwrap();
        builder.push_home_page(&[2, 5], &[1]).unwrap();
        builder.push_replica_page(&[4, 2, 5]).unwrap();
        let placement = builder.finish().unwrap();
        let index = PageIndex::new(placement.row_count(), placement.pages()).unwrap();
        let mut served = Served::new(&index);
        for (row, page) in [(4, 2), (2, 2), (5, 2), (1, 1)] {
            served.add(&index, row, page);
        }
        (placement, index.ordered_by(&served))
    }

    fn bytes() -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (placement, index) = example();
        write_placement(&placement, &index, file.path()).unwrap();
        std::fs::read(file.path()).unwrap()
    }

    /// Replaces a word behind the checksum, and mends the checksum.
    fn with_word(at: usize, word: u32) -> Vec<u8> {
        let mut bytes = bytes();
        let at = PREFIX_BYTES + 4 * at;
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let checksum = crc32c(&bytes[PREFIX_BYTES..]);
        bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn pages_homes_and_the_order_of_use_come_back() {
        let (placement, index) = decode_placement(&bytes()).unwrap();
        let (expected, ordered) = example();
        assert_eq!(placement, expected);
        assert_eq!(index.forward(), ordered.forward());
        assert_eq!(index.pages_of(4), [2, 0], "used most, not first");
        let limited = index.limited(Some(1));
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(write_placement(&placement, &limited, file.path()).is_err());
    }

    #[test]
    fn damage_is_corruption_whatever_it_hits() {
        let whole = bytes();
        for at in 0..whole.len() {
            // The four bytes behind the checksum are reserved.
            if (12..16).contains(&at) {
                continue;
            }
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            let error = decode_placement(&damaged).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "byte {at}");
            assert!(decode_placement(&whole[..at]).is_err());
        }
    }

    #[test]
    fn what_contradicts_itself_is_corruption_even_with_a_checksum() {
        // Header 0-5, page sizes 6-8, homes 9-10, rows 11-20, pages 21-30.
        for (at, word) in
            [(0, 7), (1, 3), (2, 4), (3, 1), (6, 3), (9, 3), (11, 1), (21, 1), (30, 9)]
        {
            let error = decode_placement(&with_word(at, word)).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "word {at}");
        }
        assert!(decode_placement(&with_word(4, u32::MAX)).is_err());
        assert!(decode_placement(&with_word(5, u32::MAX)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_word_anywhere_is_an_error_or_a_placement(at in 0_usize..31, word: u32) {
            if let Ok((placement, index)) = decode_placement(&with_word(at, word)) {
                prop_assert!(check_index(&placement, &index).is_ok());
            }
        }
    }
}
