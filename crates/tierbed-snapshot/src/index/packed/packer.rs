//! Packing of an index while its numbers come.
//!
//! What is known of a row stands at once where it will be held: a mark in its head until its first
//! page comes, and the bits that say how many others follow. So nothing is kept beside the index.
#![expect(clippy::indexing_slicing, reason = "arrays are as long as the rows and pages they hold")]

use tierbed_core::{Error, Result};

use super::{More, PackedPages, PackedShape, SAMPLE_LISTS};
use crate::bits::{read_bits, xor_bits};
use crate::tails::ranks::Ranks;

/// Makes an index from numbers in the order of the places file: starts of all lists of pages, the
/// count of seats, and the pages.
#[derive(Debug)]
pub(crate) struct PagesPacker {
    index: PackedPages,
    /// Starts that came, at most one more than rows; and the last of them.
    starts_done: u64,
    last_start: u32,
    pages_done: u64,
    /// Grown by one list after the other.
    is_more: Vec<u64>,
    ends: Vec<u64>,
    samples: Vec<u32>,
    list_count: u64,
    other_count: u64,
    /// Row whose pages come, whether its first one came, and how many other pages of all rows.
    row: u32,
    in_others: bool,
    others_done: u64,
    others_start: u64,
}

impl PagesPacker {
    /// # Errors
    /// `Invalid` when the index would not fit the address space.
    pub(crate) fn new(shape: PackedShape, index_limit: Option<u32>) -> Result<Self> {
        let bits = u64::from(shape.row_count) * u64::from(shape.head_bits());
        let heads = zeros(bits)?;
        let index = PackedPages { shape, index_limit, heads, more: None };
        Ok(Self {
            index,
            starts_done: 0,
            last_start: 0,
            pages_done: 0,
            is_more: Vec::new(),
            ends: Vec::new(),
            samples: Vec::new(),
            list_count: 0,
            other_count: 0,
            row: 0,
            in_others: false,
            others_done: 0,
            others_start: 0,
        })
    }

    /// Takes the next number; padding behind the last page is left out.
    ///
    /// # Errors
    /// `Corruption` when starts do not rise to the count of seats, or a page does not exist.
    pub(crate) fn push(&mut self, number: u32) -> Result<()> {
        if self.starts_done <= u64::from(self.index.shape.row_count) {
            self.push_start(number)
        } else if self.pages_done < self.index.shape.seat_count {
            self.push_page(number)
        } else {
            Ok(())
        }
    }

    /// # Errors
    /// `Corruption` when numbers are missing.
    pub(crate) fn finish(self) -> Result<PackedPages> {
        let shape = self.index.shape;
        let has_starts = self.starts_done == u64::from(shape.row_count) + 1;
        if !has_starts || self.pages_done != shape.seat_count {
            return Err(Error::corruption("places file ends within a placement"));
        }
        Ok(self.index)
    }

    fn push_start(&mut self, start: u32) -> Result<()> {
        let shape = self.index.shape;
        let page_count = start.checked_sub(self.last_start);
        let is_first = self.starts_done == 0;
        let is_last = self.starts_done == u64::from(shape.row_count);
        let is_end = u64::from(start) == shape.seat_count;
        let page_count = page_count
            .filter(|_| u64::from(start) <= shape.seat_count)
            .filter(|&count| !is_first || count == 0)
            .filter(|_| !is_last || is_end)
            .ok_or_else(|| {
                Error::corruption("starts of lists do not fit the items")
                    .with("lists", shape.row_count)
                    .with("items", shape.seat_count)
            })?;
        if !is_first {
            self.push_list((self.starts_done - 1) as u32, page_count)?;
        }
        (self.starts_done, self.last_start) = (self.starts_done + 1, start);
        if is_last {
            self.end_starts()?;
        }
        Ok(())
    }

    /// Notes how many pages a row has, which come later.
    fn push_list(&mut self, row: u32, page_count: u32) -> Result<()> {
        if page_count == 0 {
            return Ok(());
        }
        // Any page, until it comes.
        self.xor_head(row, 1);
        if page_count == 1 {
            return Ok(());
        }
        if self.is_more.is_empty() {
            self.is_more = zeros(u64::from(self.index.shape.row_count))?.into_vec();
            self.ends.reserve_exact(self.index.shape.seat_count.div_ceil(64) as usize);
        }
        self.is_more[(row / 64) as usize] |= 1 << (row % 64);
        if self.list_count.is_multiple_of(SAMPLE_LISTS) {
            self.samples.push(self.other_count as u32);
        }
        self.list_count += 1;
        self.other_count += u64::from(page_count) - 1;
        let last = self.other_count - 1;
        self.ends.resize((last / 64) as usize + 1, 0);
        self.ends[(last / 64) as usize] |= 1 << (last % 64);
        Ok(())
    }

    fn end_starts(&mut self) -> Result<()> {
        if self.list_count == 0 {
            return Ok(());
        }
        let shape = self.index.shape;
        let is_more = std::mem::take(&mut self.is_more).into_boxed_slice();
        let ranks = Ranks::new(&is_more, 0, u64::from(shape.row_count), self.list_count);
        let Some(ranks) = ranks else { unreachable!("as many bits are set as there are lists") };
        self.index.more = Some(More {
            is_more,
            ranks,
            ends: std::mem::take(&mut self.ends).into_boxed_slice(),
            samples: std::mem::take(&mut self.samples).into_boxed_slice(),
            pages: zeros(self.other_count * u64::from(shape.page_bits()))?,
            has_beyond: zeros(shape.page_count)?,
        });
        Ok(())
    }

    fn push_page(&mut self, page: u32) -> Result<()> {
        let (shape, others_limit) = (self.index.shape, self.index.others_limit());
        if u64::from(page) >= shape.page_count {
            return Err(Error::corruption("places file names a page that does not exist")
                .with("page", page)
                .with("pages", shape.page_count));
        }
        self.pages_done += 1;
        if !self.in_others {
            while !self.index.is_present(self.row) {
                assert!(self.row < shape.row_count, "there are as many pages as lists say");
                self.row += 1;
            }
            self.xor_head(self.row, 1 ^ (u64::from(page) + 1));
            let (word, bit) = ((self.row / 64) as usize, self.row % 64);
            let more = self.index.more.as_ref();
            self.in_others = more.is_some_and(|more| more.is_more[word] >> bit & 1 == 1);
        } else if let Some(more) = &mut self.index.more {
            let (at, bits) = (self.others_done, shape.page_bits());
            xor_bits(&mut more.pages, at * u64::from(bits), u64::from(page), bits);
            self.in_others = more.ends[(at / 64) as usize] >> (at % 64) & 1 == 0;
            if at - self.others_start >= others_limit {
                more.has_beyond[(page / 64) as usize] |= 1 << (page % 64);
            }
            self.others_done += 1;
        }
        if !self.in_others {
            self.row += 1;
            self.sort_beyond();
        }
        Ok(())
    }

    /// Sorts the pages of the row that came last which lie beyond the index limit.
    fn sort_beyond(&mut self) {
        let first = self.others_start.saturating_add(self.index.others_limit());
        let count = self.others_done.saturating_sub(first);
        self.others_start = self.others_done;
        let Some(more) = self.index.more.as_mut().filter(|_| count > 1) else { return };
        let bits = self.index.shape.page_bits();
        let mut rest = PackedSlice { words: &mut more.pages, first, bits };
        if (1..count).any(|at| rest.get(at - 1) > rest.get(at)) {
            rest.sort(count);
        }
    }

    fn xor_head(&mut self, row: u32, value: u64) {
        let bits = self.index.shape.head_bits();
        xor_bits(&mut self.index.heads, u64::from(row) * u64::from(bits), value, bits);
    }
}

/// Numbers in words, to be sorted where they are: a list of them may be longer than there is room.
struct PackedSlice<'a> {
    words: &'a mut [u64],
    first: u64,
    bits: u32,
}

impl PackedSlice<'_> {
    fn get(&self, at: u64) -> u64 {
        read_bits(self.words, (self.first + at) * u64::from(self.bits), self.bits)
    }

    fn swap(&mut self, a: u64, b: u64) {
        let flipped = self.get(a) ^ self.get(b);
        for at in [a, b] {
            xor_bits(self.words, (self.first + at) * u64::from(self.bits), flipped, self.bits);
        }
    }

    /// Sorts the first `count` numbers by a heap.
    fn sort(&mut self, count: u64) {
        (0..count / 2).rev().for_each(|at| self.sift(at, count));
        for end in (1..count).rev() {
            self.swap(0, end);
            self.sift(0, end);
        }
    }

    /// Moves a number down until none below it is larger.
    fn sift(&mut self, mut at: u64, end: u64) {
        while 2 * at + 1 < end {
            let mut child = 2 * at + 1;
            if child + 1 < end && self.get(child) < self.get(child + 1) {
                child += 1;
            }
            if self.get(at) >= self.get(child) {
                return;
            }
            self.swap(at, child);
            at = child;
        }
    }
}

/// Returns words of zeros for so many bits.
fn zeros(bits: u64) -> Result<Box<[u64]>> {
    let words = usize::try_from(bits.div_ceil(64))
        .map_err(|_| Error::invalid("places file does not fit the address space"))?;
    Ok(vec![0; words].into_boxed_slice())
}
