//! Which rows in memory wait for which window?
//!
//! Lists of (slot, entry) pairs in links of [`LINK_PAIRS`], so that walking a list follows one
//! pointer per fifteen rows. Only the first link of a list may be part full, hence
//! `slots / 15 + windows` links are always enough: all memory is taken at the start.

/// Pairs per link: a link is 128 bytes, two cache lines.
pub(crate) const LINK_PAIRS: usize = 15;
const NO_LINK: u32 = u32::MAX;

/// A row in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Waiting {
    /// Its slot.
    pub(crate) slot: u32,
    /// Its entry in the window it waits for.
    pub(crate) entry: u32,
}

/// A few rows taken from a list, so that the processor can fetch them before they are touched.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Handful {
    pairs: [Waiting; LINK_PAIRS],
    count: usize,
}

impl Handful {
    pub(crate) fn rows(&self) -> &[Waiting] {
        self.pairs.get(..self.count).unwrap_or(&[])
    }
}

#[derive(Debug, Clone)]
struct Link {
    pairs: [Waiting; LINK_PAIRS],
    count: u32,
    next: u32,
}

/// A list per window.
#[derive(Debug)]
pub(crate) struct Lists {
    links: Vec<Link>,
    free: u32,
    heads: Vec<u32>,
    counts: Vec<u32>,
}

impl Lists {
    /// Returns the bytes that lists of `window_count` windows over `slot_count` slots take.
    pub(crate) fn memory_bytes(window_count: usize, slot_count: usize) -> u64 {
        (size_of::<Link>() * (slot_count / LINK_PAIRS + window_count + 1) + 8 * window_count) as u64
    }

    pub(crate) fn new(window_count: usize, slot_count: usize) -> Self {
        let link_count = slot_count / LINK_PAIRS + window_count + 1;
        let chain = (1..=link_count as u32).map(|next| Link {
            pairs: [Waiting::default(); LINK_PAIRS],
            count: 0,
            next: if next as usize == link_count { NO_LINK } else { next },
        });
        Self {
            links: chain.collect(),
            free: 0,
            heads: vec![NO_LINK; window_count],
            counts: vec![0; window_count],
        }
    }

    /// Returns the number of rows per window.
    pub(crate) fn counts(&self) -> &[u32] {
        &self.counts
    }

    pub(crate) fn count(&self, window: usize) -> usize {
        self.counts.get(window).map_or(0, |&count| count as usize)
    }

    /// Adds a row to the list of `window`; `false` when there is no such window, which only a
    /// damaged plan can name.
    #[inline]
    #[must_use]
    pub(crate) fn push(&mut self, window: usize, waiting: Waiting) -> bool {
        let (Some(head), Some(count)) = (self.heads.get_mut(window), self.counts.get_mut(window))
        else {
            return false;
        };
        let is_full =
            self.links.get(*head as usize).is_none_or(|link| link.count as usize == LINK_PAIRS);
        if is_full {
            let fresh = self.free;
            let Some(link) = self.links.get_mut(fresh as usize) else { return false };
            self.free = link.next;
            link.next = *head;
            link.count = 0;
            *head = fresh;
        }
        let Some(link) = self.links.get_mut(*head as usize) else { return false };
        if let Some(place) = link.pairs.get_mut(link.count as usize) {
            *place = waiting;
        }
        link.count += 1;
        *count += 1;
        true
    }

    /// Takes rows from the list of `window`: at most `rows_max`, and those of one link. None only
    /// when the list is empty or `rows_max` is 0.
    #[inline]
    pub(crate) fn pop_some(&mut self, window: usize, rows_max: usize) -> Handful {
        let mut taken = Handful::default();
        let (Some(head), Some(count)) = (self.heads.get_mut(window), self.counts.get_mut(window))
        else {
            return taken;
        };
        let Some(link) = self.links.get_mut(*head as usize) else { return taken };
        let left = (link.count as usize).saturating_sub(rows_max);
        let pairs = link.pairs.get(left..link.count as usize).unwrap_or(&[]);
        if let Some(places) = taken.pairs.get_mut(..pairs.len()) {
            places.copy_from_slice(pairs);
        }
        taken.count = pairs.len();
        *count -= pairs.len() as u32;
        link.count = left as u32;
        if left == 0 {
            let emptied = *head;
            *head = link.next;
            link.next = self.free;
            self.free = emptied;
        }
        taken
    }

    /// Visits the rows of `window` without taking them.
    pub(crate) fn iter(&self, window: usize) -> impl Iterator<Item = Waiting> + '_ {
        let mut at = self.heads.get(window).copied().unwrap_or(NO_LINK);
        std::iter::from_fn(move || {
            let link = self.links.get(at as usize)?;
            at = link.next;
            Some(link.pairs.iter().take(link.count as usize).copied())
        })
        .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_as_stacks(
            steps in proptest::collection::vec((0usize..5, any::<bool>(), 0usize..20), 0..400),
        ) {
            let mut lists = Lists::new(5, 60);
            let mut model = vec![Vec::new(); 5];
            let mut live = 0;
            for (at, (window, is_push, rows_max)) in (0u32..).zip(steps) {
                if is_push && live < 60 {
                    let waiting = Waiting { slot: at, entry: at * 3 };
                    prop_assert!(lists.push(window, waiting));
                    model[window].push(waiting);
                    live += 1;
                } else {
                    let popped = lists.pop_some(window, rows_max);
                    let left = model[window].len() - popped.rows().len();
                    prop_assert_eq!(popped.rows(), &model[window][left..]);
                    let is_due = rows_max > 0 && !model[window].is_empty();
                    prop_assert_eq!(!popped.rows().is_empty(), is_due);
                    prop_assert!(popped.rows().len() <= rows_max);
                    model[window].truncate(left);
                    live -= popped.rows().len();
                }
            }
            for (window, model) in model.iter().enumerate() {
                let mut found: Vec<_> = lists.iter(window).collect();
                prop_assert_eq!(lists.count(window), model.len());
                found.sort_by_key(|waiting| waiting.slot);
                prop_assert_eq!(&found, model);
            }
        }
    }

    #[test]
    fn windows_that_are_none_are_refused() {
        let mut lists = Lists::new(2, 4);
        assert!(!lists.push(2, Waiting::default()));
        assert!(lists.pop_some(7, 1).rows().is_empty());
    }
}
