//! Many short lists of numbers in two arrays, without an allocation each.
//!
//! Compressed rows: all items behind each other, and where each list starts.
//!
//! ```text
//! starts  0   2   2   5          list 0 = [7, 3], list 1 = [], list 2 = [1, 2, 9]
//! items   7 3 1 2 9
//! ```
#![expect(clippy::indexing_slicing, reason = "starts are checked to rise to the number of items")]

use tierbed_core::{Error, Result};

/// Lists of `u32`, 4 bytes an item and 4 bytes a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lists {
    /// Start of each list in `items`, then the number of items; never decreases.
    starts: Box<[u32]>,
    items: Box<[u32]>,
}

impl Lists {
    /// Gathers lists in their order.
    ///
    /// # Errors
    /// `Invalid` when there are 2^32 items or more.
    pub fn gather<'a>(lists: impl IntoIterator<Item = &'a [u32]>) -> Result<Self> {
        let (mut starts, mut items) = (vec![0], Vec::new());
        for list in lists {
            items.extend_from_slice(list);
            starts.push(checked_len(items.len() as u64)?);
        }
        Ok(Self { starts: starts.into_boxed_slice(), items: items.into_boxed_slice() })
    }

    /// Makes lists from what was stored: `starts` as in the picture above.
    ///
    /// # Errors
    /// `Corruption` when `starts` is not from 0 to the number of items without decreasing.
    pub fn from_parts(starts: Vec<u32>, items: Vec<u32>) -> Result<Self> {
        let is_rising = starts.is_sorted();
        let end = starts.last().map(|&end| end as usize);
        if starts.first() != Some(&0) || !is_rising || end != Some(items.len()) {
            return Err(Error::corruption("starts of lists do not fit the items")
                .with("lists", starts.len().saturating_sub(1))
                .with("items", items.len()));
        }
        Ok(Self { starts: starts.into_boxed_slice(), items: items.into_boxed_slice() })
    }

    /// Returns list `at`; empty when there is no such list.
    #[must_use]
    pub fn get(&self, at: u32) -> &[u32] {
        if at >= self.list_count() {
            return &[];
        }
        &self.items[self.range(at)]
    }

    /// Returns the lists in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.list_count()).map(|at| self.get(at))
    }

    /// Returns the number of lists.
    #[must_use]
    pub fn list_count(&self) -> u32 {
        (self.starts.len() - 1) as u32
    }

    /// Returns the number of items of all lists.
    #[must_use]
    pub fn item_count(&self) -> u32 {
        self.items.len() as u32
    }

    /// Returns the start of each list, then the number of items.
    #[must_use]
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// Returns the items of all lists, one after the other.
    #[must_use]
    pub fn items(&self) -> &[u32] {
        &self.items
    }

    /// Returns the bytes held.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        Self::bytes_of(u64::from(self.list_count()), u64::from(self.item_count()))
    }

    /// Returns the bytes that `list_count` lists of `item_count` items together take.
    #[must_use]
    pub fn bytes_of(list_count: u64, item_count: u64) -> u64 {
        4 * (list_count + 1 + item_count)
    }

    /// Turns the lists round: list `i` of the result names, ascending, the lists that hold `i`.
    /// Items from `list_count` on are left out.
    #[must_use]
    pub fn inverted(&self, list_count: u32) -> Self {
        let mut starts = vec![0u32; list_count as usize + 1];
        for &item in self.items.iter().filter(|&&item| item < list_count) {
            starts[item as usize + 1] += 1;
        }
        let mut end = 0;
        for start in &mut starts {
            end += *start;
            *start = end;
        }
        let mut items = vec![0u32; end as usize];
        let mut next = starts.clone();
        for (at, list) in (0..).zip(self.iter()) {
            for &item in list.iter().filter(|&&item| item < list_count) {
                let next = &mut next[item as usize];
                items[*next as usize] = at;
                *next += 1;
            }
        }
        Self { starts: starts.into_boxed_slice(), items: items.into_boxed_slice() }
    }

    /// Sorts each list by `rank`, smallest first; equals stay in their order. `rank` is given the
    /// list and the place of the item among all items.
    pub(super) fn sort_by_rank(&mut self, rank: impl Fn(u32, usize) -> u64) {
        let mut ranked: Vec<(u64, u32)> = Vec::new();
        for at in 0..self.list_count() {
            let range = self.range(at);
            let first = range.start;
            let list = &mut self.items[range];
            if list.len() < 2 {
                continue;
            }
            ranked.clear();
            let items = list.iter().enumerate();
            ranked.extend(items.map(|(place, &item)| (rank(at, first + place), item)));
            ranked.sort_by_key(|&(rank, _)| rank);
            for (place, &(_, item)) in list.iter_mut().zip(&ranked) {
                *place = item;
            }
        }
    }

    /// Returns where list `at` lies among the items.
    ///
    /// # Panics
    /// When there is no such list.
    pub(super) fn range(&self, at: u32) -> std::ops::Range<usize> {
        assert!(at < self.list_count(), "list {at} of {}", self.list_count());
        self.starts[at as usize] as usize..self.starts[at as usize + 1] as usize
    }
}

fn checked_len(item_count: u64) -> Result<u32> {
    u32::try_from(item_count).map_err(|_| {
        Error::invalid("an index holds fewer than 2^32 places")
            .with("found", item_count)
            .with("remedy", "place fewer tables together, or replicate less")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(lists: &[&[u32]]) -> Lists {
        Lists::gather(lists.iter().copied()).unwrap()
    }

    #[test]
    fn lists_come_back_and_their_bytes_are_counted() {
        let found = lists(&[&[7, 3], &[], &[1, 2, 9]]);
        assert_eq!(found.iter().collect::<Vec<_>>(), [&[7, 3][..], &[], &[1, 2, 9]]);
        assert!(found.get(3).is_empty() && found.get(u32::MAX).is_empty());
        assert_eq!((found.list_count(), found.item_count()), (3, 5));
        assert_eq!(found.memory_bytes(), 4 * (4 + 5));
        let again = Lists::from_parts(found.starts().to_vec(), found.items().to_vec()).unwrap();
        assert_eq!(again, found);
    }

    #[test]
    fn turned_round_twice_each_list_is_sorted() {
        let pages = lists(&[&[4, 1], &[0, 4], &[], &[2]]);
        let rows = pages.inverted(5);
        assert_eq!(rows, lists(&[&[1], &[0], &[3], &[], &[0, 1]]));
        assert_eq!(rows.inverted(4), lists(&[&[1, 4], &[0, 4], &[], &[2]]));
        assert_eq!(pages.inverted(2), lists(&[&[1], &[0]]), "what is outside is left out");
    }

    #[test]
    fn damaged_starts_are_corruption() {
        for starts in [vec![], vec![1, 2], vec![0, 2, 1, 2], vec![0, 3], vec![0]] {
            assert!(Lists::from_parts(starts, vec![5, 6]).is_err());
        }
    }
}
