//! Reader and writer of MaxEmbed's mapping files.
//!
//! ```text
//! u64 row_count │ u64 seat_count │ i32 first[row_count] │ i32 seats[row_count] │ u32 pages[..]
//! ```
//! Row `r` sits on `pages[first[r] .. first[r] + seats[r]]`, and the first of them is its home.
//! Little-endian, no checksum; every number is checked against the others and the file's length.
//! Format: `docs/reference/formats/query-log.md`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use tierbed_core::{Error, Result};

use crate::Placement;
use tierbed_snapshot::index::PageIndex;

/// Bytes before the places of the rows.
const HEADER_BYTES: usize = 16;

/// Reads the mapping at `path` as a placement on pages of `rows_per_page` rows.
///
/// Pages keep their order, except that pages without a home row come behind all others; rows
/// of a page come in ascending order, homes first. A mapping does not say more.
///
/// # Errors
/// `Corruption` for bytes that are no mapping; `Invalid` where the placement breaks a promise of
/// [`Placement`], such as a page with more rows than room; `Io`.
pub fn read_mapping(path: &Path, rows_per_page: u32) -> Result<Placement> {
    let bytes = std::fs::read(path).map_err(|cause| Error::os("cannot read mapping", cause));
    bytes
        .and_then(|bytes| decode_mapping(&bytes, rows_per_page))
        .map_err(|error| error.with("path", path.display()))
}

/// Decodes a mapping; see [`read_mapping`].
///
/// # Errors
/// Those of [`read_mapping`].
pub(crate) fn decode_mapping(bytes: &[u8], rows_per_page: u32) -> Result<Placement> {
    let rows = Rows::decode(bytes)?;
    let (mut homes, mut guests) = (Vec::new(), Vec::new());
    for (row, pages) in rows.iter() {
        let (&home, others) = pages
            .split_first()
            .ok_or_else(|| Error::corruption("row of the mapping has no page").with("row", row))?;
        homes.push((home, row));
        guests.extend(others.iter().map(|page| (*page, row)));
    }
    homes.sort_unstable();
    guests.sort_unstable();
    let (homes, guests) = (by_page(&homes), by_page(&guests));
    let mut builder = Placement::builder(rows.row_count, rows_per_page)?;
    let mut others = guests.iter().peekable();
    let mut replica_pages = Vec::new();
    for (page, homes) in &homes {
        while let Some(other) = others.next_if(|(other, _)| other < page) {
            replica_pages.push(other);
        }
        let here = others.next_if(|(other, _)| other == page);
        builder.push_home_page(homes, here.map_or(&[], |(_, rows)| rows.as_slice()))?;
    }
    replica_pages.extend(others);
    for (_, rows) in replica_pages {
        builder.push_replica_page(rows)?;
    }
    builder.finish()
}

/// Gathers sorted pairs of page and row.
fn by_page(pairs: &[(u32, u32)]) -> Vec<(u32, Vec<u32>)> {
    let groups = pairs.chunk_by(|one, other| one.0 == other.0);
    groups
        .filter_map(|group| {
            let (page, _) = group.first()?;
            Some((*page, group.iter().map(|(_, row)| *row).collect()))
        })
        .collect()
}

/// The bytes of a mapping, checked.
struct Rows<'a> {
    row_count: u32,
    firsts: &'a [[u8; 4]],
    counts: &'a [[u8; 4]],
    pages: Vec<u32>,
}

impl<'a> Rows<'a> {
    fn decode(bytes: &'a [u8]) -> Result<Self> {
        let wrong = || {
            Error::corruption("mapping is cut short, or is none").with("file_bytes", bytes.len())
        };
        let (words, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(wrong)?;
        let mut words = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let (rows, seats) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
        let is_whole = rows.checked_mul(2).and_then(|twice| twice.checked_add(seats));
        let words = rest.as_chunks::<4>().0;
        let row_count = u32::try_from(rows).ok().filter(|_| rest.len() % 4 == 0);
        let (Some(row_count), true) = (row_count, is_whole == Some(words.len() as u64)) else {
            return Err(wrong().with("row_count", rows).with("seat_count", seats));
        };
        let (firsts, words) = words.split_at_checked(row_count as usize).ok_or_else(wrong)?;
        let (counts, pages) = words.split_at_checked(row_count as usize).ok_or_else(wrong)?;
        let pages = pages.iter().map(|page| u32::from_le_bytes(*page)).collect();
        let rows = Self { row_count, firsts, counts, pages };
        let outside = (0..row_count).find(|row| rows.range(*row).is_none());
        match outside {
            Some(row) => {
                Err(Error::corruption("row of the mapping lies outside of it").with("row", row))
            }
            None => Ok(rows),
        }
    }

    fn range(&self, row: u32) -> Option<std::ops::Range<usize>> {
        let first = i32::from_le_bytes(*self.firsts.get(row as usize)?);
        let count = i32::from_le_bytes(*self.counts.get(row as usize)?);
        let first = usize::try_from(first).ok()?;
        let end = first.checked_add(usize::try_from(count).ok()?)?;
        (end <= self.pages.len()).then_some(first..end)
    }

    fn iter(&self) -> impl Iterator<Item = (u32, &[u32])> {
        (0..self.row_count).map(|row| {
            let pages = self.range(row).and_then(|range| self.pages.get(range));
            (row, pages.unwrap_or_else(|| panic!("range of row {row} was checked on reading")))
        })
    }
}

/// Writes `placement` as a mapping at `path`: per row its home, then its other pages in order.
///
/// # Errors
/// `Invalid` for 2^31 seats or more, which the format cannot say; `Io` and `NoSpace`.
pub fn write_mapping(placement: &Placement, path: &Path) -> Result<()> {
    let seat_count = u64::from(placement.row_count()) + placement.replica_count();
    if i32::try_from(seat_count).is_err() {
        return Err(Error::invalid("a mapping has room for 2^31 - 1 seats")
            .with("seats", seat_count)
            .with("remedy", "place fewer rows, or replicate less"));
    }
    let index = PageIndex::new(placement.row_count(), placement.pages())?;
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(256 << 10, File::create(path)?);
        file.write_all(&u64::from(placement.row_count()).to_le_bytes())?;
        file.write_all(&seat_count.to_le_bytes())?;
        let mut first = 0_u32;
        for pages in index.forward().iter() {
            file.write_all(&first.to_le_bytes())?;
            first += pages.len() as u32;
        }
        for pages in index.forward().iter() {
            file.write_all(&(pages.len() as u32).to_le_bytes())?;
        }
        for (home, pages) in placement.home_pages().iter().zip(index.forward().iter()) {
            file.write_all(&home.to_le_bytes())?;
            for page in pages.iter().filter(|page| *page != home) {
                file.write_all(&page.to_le_bytes())?;
            }
        }
        file.flush()
    };
    write().map_err(|cause| Error::os("cannot write mapping", cause).with("path", path.display()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn placement() -> Placement {
        let mut builder = Placement::builder(6, 4).unwrap();
        builder.push_home_page(&[0, 1, 3, 4], &[]).unwrap();
        builder.push_home_page(&[2, 5], &[1]).unwrap();
        builder.push_replica_page(&[2, 4, 5]).unwrap();
        builder.finish().unwrap()
    }

    fn bytes_of(placement: &Placement) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_mapping(placement, file.path()).unwrap();
        std::fs::read(file.path()).unwrap()
    }

    fn bytes(rows: u64, seats: u64, words: &[u32]) -> Vec<u8> {
        let mut bytes = [rows.to_le_bytes(), seats.to_le_bytes()].concat();
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn the_bytes_are_those_of_the_drawing() {
        let firsts = [0, 1, 3, 5, 6, 8];
        let counts = [1, 2, 2, 1, 2, 2];
        let pages = [0, 0, 1, 1, 2, 0, 0, 2, 1, 2];
        let expected = bytes(6, 10, &[&firsts[..], &counts, &pages].concat());
        assert_eq!(bytes_of(&placement()), expected);
        assert_eq!(decode_mapping(&expected, 4).unwrap(), placement());
    }

    #[test]
    fn pages_without_homes_come_last() {
        // Page 0 holds replicas only; row 0 lives on page 1, row 1 on page 2.
        let mapping = bytes(2, 4, &[0, 2, 2, 2, 1, 0, 2, 0]);
        let placement = decode_mapping(&mapping, 2).unwrap();
        let pages: Vec<&[u32]> = placement.pages().collect();
        assert_eq!(pages, [&[0][..], &[1], &[0, 1]]);
        assert_eq!(placement.home_page_count(), 2);
    }

    #[test]
    fn what_breaks_a_promise_is_an_error() {
        let told = |bytes: &[u8], rows_per_page| {
            decode_mapping(bytes, rows_per_page).unwrap_err().to_string()
        };
        assert!(told(&bytes_of(&placement()), 3).contains("more rows than room"));
        assert!(told(&bytes(1, 1, &[0, 2, 0]), 4).contains("outside"));
        assert!(told(&bytes(1, 1, &[u32::MAX, 1, 0]), 4).contains("outside"));
        assert!(told(&bytes(1, 1, &[0, 0, 0]), 4).contains("no page"));
        assert!(told(&bytes(1, 2, &[0, 2, 0, 0]), 4).contains("twice"));
        assert!(told(&bytes(1 << 40, 1, &[0, 2, 0]), 4).contains("cut short"));
        assert!(told(&bytes(u64::MAX, u64::MAX, &[]), 4).contains("cut short"));
        assert!(read_mapping(Path::new("/does/not/exist"), 4).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn damaged_bytes_are_an_error_or_a_placement(
            at in any::<prop::sample::Index>(), value: u8, cut in 0_usize..3
        ) {
            let mut bytes = bytes_of(&placement());
            let at = at.index(bytes.len());
            bytes[at] = value;
            bytes.truncate(bytes.len() - cut);
            if let Ok(read) = decode_mapping(&bytes, 4) {
                prop_assert!(read.pages().all(|page| page.len() <= 4));
            }
        }
    }
}
