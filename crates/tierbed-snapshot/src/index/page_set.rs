//! Some pages, of which it is asked often whether a page is one of them.
#![expect(clippy::indexing_slicing, reason = "bits are reduced by the shift, searches end inside")]

/// Bits of the filter per page: one page in eight that is none of the set passes it.
const FILTER_BITS: usize = 8;

/// Distinct pages, ascending, and a filter that few other pages pass.
///
/// The filter has one bit per hash value. It answers most questions with one load from the
/// processor's cache, where a search of the pages takes ten branches that nobody can predict.
#[derive(Debug, Default)]
pub struct PageSet {
    pages: Vec<u32>,
    filter: Vec<u64>,
    /// Bits of a hash that the filter leaves out.
    shift: u32,
}

impl PageSet {
    /// Bytes per page of the largest set; the filter is a power of two.
    pub const BYTES_PER_PAGE: usize = size_of::<u32>() + 2 * FILTER_BITS / 8;

    /// Holds `pages` from now on, which ascend; equal ones are one.
    pub fn assign(&mut self, pages: impl Iterator<Item = u32>) {
        self.pages.clear();
        self.pages.extend(pages);
        self.pages.dedup();
        let bits = (FILTER_BITS * self.pages.len()).next_power_of_two().max(64);
        self.shift = 32 - bits.ilog2();
        self.filter.clear();
        self.filter.resize(bits / 64, 0);
        for &page in &self.pages {
            let bit = self.bit_of(page);
            self.filter[bit / 64] |= 1 << (bit % 64);
        }
    }

    /// Returns the pages, ascending.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Tells whether `page` is one of them.
    #[must_use]
    pub fn holds(&self, page: u32) -> bool {
        let bit = self.bit_of(page);
        self.filter[bit / 64] >> (bit % 64) & 1 == 1 && self.pages.binary_search(&page).is_ok()
    }

    /// Spreads pages by the high bits of a multiplication (Fibonacci hashing).
    fn bit_of(&self, page: u32) -> usize {
        (page.wrapping_mul(0x9E37_79B9) >> self.shift) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_held_once_and_no_others_are() {
        let mut set = PageSet::default();
        for count in [0_u32, 1, 2, 7, 8, 9, 1000] {
            set.assign((0..count).flat_map(|at| [3 * at, 3 * at]));
            assert_eq!(set.pages(), (0..count).map(|at| 3 * at).collect::<Vec<_>>());
            assert!((0..4 * count).all(|page| set.holds(page) == set.pages().contains(&page)));
        }
        set.assign([u32::MAX].into_iter());
        assert!(set.holds(u32::MAX) && !set.holds(0));
    }

    #[test]
    fn an_empty_set_holds_nothing() {
        let mut set = PageSet::default();
        set.assign(std::iter::empty());
        assert!(!set.holds(0) && set.pages().is_empty());
    }
}
