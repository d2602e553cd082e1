//! Spans: consecutive windows that share a bucket while they are far away.
//!
//! A list per window is too many when memory is small: lists are flushed before they fill a page.
//! Then windows are cut into *spans* of some consecutive ones. Far spans have one list and one
//! bucket each, the second level; before the first window of a span comes, its rows are split over
//! the lists of its windows ([`super::split`]). A row is moved and written once more for that, but
//! there are fewer lists, so each is longer.
//!
//! ```text
//! windows  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15      spans of 4
//! at 2:          3   4 5 6 7   lists of windows: near
//!                              8..11      12..15     0..2   lists of spans: far
//! ```
//!
//! Lists and buckets are numbered: windows, then spans. In those of a span entries are counted on
//! from window to window, so a row looks there as it does anywhere else.

use tierbed_io::PAGE_BYTES;

use super::window_rows::Place;

/// Fewer spans than this would leave hardly any window far.
const SPANS_MIN: usize = 4;
/// One near span, the current one, and one that is far.
const SPANS_LEAST: usize = 3;

/// A place in a list, of a window or of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListPlace {
    pub(crate) list: u32,
    pub(crate) entry: u32,
}

/// The spans of a plan's windows, if there are any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Spans {
    window_count: usize,
    /// Windows of a span, of which the last one may have fewer; 0 without spans.
    span_windows: usize,
    /// Per window: entries of its span before it.
    firsts: Vec<u32>,
    /// Far rows wait in spans from now on, not only those that do already.
    is_filled: bool,
}

/// Returns how many windows share a bucket while they are far, 0 for none: when `lists_bytes` of
/// memory are less than a page for each window's list. The square root makes the lists that are
/// open at a time, those of a span or two and those of spans, as few as can be.
pub(crate) fn choose_span_windows(lists_bytes: u64, window_count: usize) -> usize {
    let list_bytes = lists_bytes / window_count.max(1) as u64;
    let span_windows = window_count.isqrt();
    let has_far_ones = span_windows > 1 && window_count.div_ceil(span_windows) >= SPANS_MIN;
    match has_far_ones && list_bytes < PAGE_BYTES as u64 {
        true => span_windows,
        false => 0,
    }
}

/// Returns how many lists may have rows at a time.
pub(crate) fn open_lists(window_count: usize, span_windows: usize) -> usize {
    match span_windows {
        0 => window_count,
        span => window_count.min(2 * span + window_count.div_ceil(span)),
    }
}

impl Spans {
    /// Cuts windows of so many `entries` each into spans; there are none when that makes too few,
    /// or one whose entries cannot be counted.
    pub(crate) fn new(
        entries: impl Iterator<Item = u64>,
        span_windows: usize,
        is_filled: bool,
    ) -> Self {
        let mut spans = Self { span_windows, is_filled, ..Self::default() };
        let (mut before, mut is_countable) = (0u64, true);
        for (window, count) in entries.enumerate() {
            if span_windows > 0 {
                before = if window % span_windows == 0 { 0 } else { before };
                spans.firsts.push(before as u32);
                before += count;
                is_countable &= before <= u64::from(u32::MAX);
            }
            spans.window_count += 1;
        }
        match spans.span_count() >= SPANS_LEAST && is_countable {
            true => spans,
            false => Self { window_count: spans.window_count, ..Self::default() },
        }
    }

    /// Returns the bytes it takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (size_of::<u32>() * self.firsts.len()) as u64
    }

    pub(crate) fn window_count(&self) -> usize {
        self.window_count
    }

    /// Returns the windows of a span; 0 when there are none.
    pub(crate) fn span_windows(&self) -> usize {
        self.span_windows
    }

    fn span_count(&self) -> usize {
        self.window_count
            .checked_div(self.span_windows)
            .map_or(0, |_| self.window_count.div_ceil(self.span_windows))
    }

    /// Returns the number of lists, and of buckets: of all windows, then of all spans.
    pub(crate) fn list_count(&self) -> usize {
        self.window_count + self.span_count()
    }

    fn span_of(&self, window: usize) -> usize {
        window.checked_div(self.span_windows).unwrap_or(0)
    }

    /// Tells whether rows for `window` wait in its own list while window `now` is trained on.
    #[inline]
    fn is_near(&self, now: usize, window: usize) -> bool {
        let (current, span) = (self.span_of(now), self.span_of(window));
        if span == current {
            // What is behind comes again in the next epoch.
            return window >= now;
        }
        span == (current + 1) % self.span_count()
    }

    /// Returns where a row for `place` waits while window `now` is trained on.
    ///
    /// # Panics
    /// When the plan has no such window.
    #[inline]
    pub(crate) fn list_of(&self, now: usize, place: Place) -> ListPlace {
        let Place { window, entry } = place;
        let last = now.max(window as usize);
        debug_assert!(last < self.window_count, "window {last} of {}", self.window_count);
        if !self.is_filled || self.is_near(now, window as usize) {
            return ListPlace { list: window, entry };
        }
        self.far_list_of(place)
    }

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "spans know the first entry of every window")]
    fn far_list_of(&self, Place { window, entry }: Place) -> ListPlace {
        let first = self.firsts[window as usize];
        let list = self.window_count + self.span_of(window as usize);
        // Entries of a damaged plan are any number: the window refuses them when they arrive.
        ListPlace { list: list as u32, entry: entry.wrapping_add(first) }
    }

    /// Returns where a row for `place` may wait, whenever that is: in the list of its window, and
    /// in that of its span if there are spans.
    ///
    /// # Panics
    /// When the plan has no such window.
    pub(crate) fn lists_for(&self, place: Place) -> impl Iterator<Item = ListPlace> {
        let near = ListPlace { list: place.window, entry: place.entry };
        let far = (self.span_windows > 0).then(|| self.far_list_of(place));
        std::iter::once(near).chain(far)
    }

    /// Returns the window and entry that a row in a list waits for; `None` when there is no such
    /// list.
    pub(crate) fn place_in(&self, place: ListPlace) -> Option<Place> {
        let ListPlace { list, entry } = place;
        let Some(span) = (list as usize).checked_sub(self.window_count) else {
            return Some(Place { window: list, entry });
        };
        let first = span.checked_mul(self.span_windows)?;
        let firsts = self.firsts.get(first..)?;
        let (firsts, _) = firsts.split_at(firsts.len().min(self.span_windows));
        // Of windows without entries the last one begins where they all do.
        let at = firsts.partition_point(|&first| first <= entry).checked_sub(1)?;
        Some(Place { window: (first + at) as u32, entry: entry - firsts.get(at)? })
    }

    /// Returns the list of the span behind that of window `now`: its rows are to be split while
    /// this span's windows are trained on.
    pub(crate) fn coming_list(&self, now: usize) -> Option<usize> {
        assert!(now < self.window_count, "window {now} of {}", self.window_count);
        let next = (self.span_of(now) + 1).checked_rem(self.span_count())?;
        Some(self.window_count + next)
    }

    /// Returns how many windows of its span are left when window `now` begins, itself counted.
    pub(crate) fn windows_left(&self, now: usize) -> usize {
        assert!(now < self.window_count, "window {now} of {}", self.window_count);
        let end = (self.span_of(now) + 1) * self.span_windows;
        end.min(self.window_count).saturating_sub(now).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spans_are_for_lists_below_a_page() {
        let page = PAGE_BYTES as u64;
        assert_eq!(choose_span_windows(400 * page, 400), 0);
        assert_eq!(choose_span_windows(400 * page - 1, 400), 20);
        // Too few windows to be far away.
        assert_eq!(choose_span_windows(0, 3), 0);
        assert_eq!(choose_span_windows(0, 0), 0);
        assert_eq!(choose_span_windows(0, 16), 4);
        assert!(open_lists(400, 20) == 60 && open_lists(400, 0) == 400);
    }

    proptest! {
        #[test]
        fn rows_come_back_from_spans_to_their_windows(
            counts in proptest::collection::vec(0u64..9, 1..60),
            span_windows in 0usize..20,
            now in 0usize..60,
        ) {
            let now = now % counts.len();
            let spans = Spans::new(counts.iter().copied(), span_windows, true);
            let mut seen = std::collections::BTreeSet::new();
            for (window, &count) in counts.iter().enumerate() {
                let distance = (window + counts.len() - now) % counts.len();
                for entry in 0..count as u32 {
                    let place = Place { window: window as u32, entry };
                    let waits = spans.list_of(now, place);
                    let list = waits.list as usize;
                    prop_assert!(list < spans.list_count());
                    prop_assert!(seen.insert((list, waits.entry)), "each row has its own place");
                    prop_assert_eq!(spans.place_in(waits), Some(place));
                    prop_assert!(spans.lists_for(place).any(|may_wait| may_wait == waits));
                    for may_wait in spans.lists_for(place) {
                        prop_assert_eq!(spans.place_in(may_wait), Some(place));
                    }
                    // What is needed before the span changes is never far.
                    if distance < spans.windows_left(now) {
                        prop_assert_eq!(list, window);
                    }
                    if Some(list) == spans.coming_list(now) {
                        prop_assert!(false, "nothing joins a span that is being split");
                    }
                }
            }
            let none = ListPlace { list: spans.list_count() as u32, entry: 0 };
            prop_assert!(spans.place_in(none).is_none());
        }
    }

    #[test]
    fn without_spans_every_window_is_near() {
        let spans = Spans::new([3u64; 30].into_iter(), 0, true);
        let (place, own) = (Place { window: 3, entry: 2 }, ListPlace { list: 3, entry: 2 });
        assert_eq!(spans.list_of(7, place), own);
        assert_eq!((spans.list_count(), spans.coming_list(7)), (30, None));
        let closed = Spans::new([3u64; 30].into_iter(), 5, false);
        assert_eq!(closed.list_of(7, place), own);
        let of_span = ListPlace { list: 31, entry: 7 };
        assert_eq!(closed.place_in(of_span), Some(Place { window: 7, entry: 1 }));
    }
}
