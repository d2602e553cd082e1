//! Pages of a scan that follow each other, and the runs of the file that hold them.
//!
//! A table is cut into windows of pages that follow each other. Each page has one of two slots, so
//! a window is about two runs of the file. They are read whole and visited in the order of pages:
//!
//! ```text
//! pages      0 1 2 3 4 5 6 7       file    | A: 0 1 . 3 4 . 6 7 | B: . . 2 . . 5 . . |
//! slots      A A B A A B A A       reads       [1─────────────]         [2─────]
//! ```

#![expect(clippy::indexing_slicing, reason = "a run is looked at by its number in its window")]

use std::ops::Range;

use tierbed_io::BufId;

use super::runs::{GAP_BYTES_MAX, PAGES_MIN};
use super::scan_runs::RUNS_AT_ONCE;

/// So that the next window fits beside the one that is visited.
const RUNS_OF_WINDOW_MAX: usize = RUNS_AT_ONCE / 2;
/// Pages that lie alone and are read together.
const ALONE_MAX: usize = 256;

/// A written page, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlacedPage {
    pub(super) page: u64,
    /// In the table's file, in pages.
    pub(super) position: u64,
    /// Which run of its window it is read with.
    pub(super) run: usize,
}

/// Pages that follow each other, and the runs of the file that hold them.
#[derive(Debug, Default)]
pub(super) struct Window {
    pub(super) pages: Vec<PlacedPage>,
    /// In pages.
    pub(super) runs: Vec<Range<u64>>,
    /// By run, once they are read.
    pub(super) bufs: Vec<BufId>,
}

impl Window {
    fn push(&mut self, page: u64, position: u64, limits: &Limits) {
        // Pages of one slot come in order, so the last run of either slot may go on here.
        let mut last_runs = (0..self.runs.len()).rev().take(2);
        let run = last_runs.find(|run| limits.reach(&self.runs[*run], position));
        let run = run.unwrap_or(self.runs.len());
        match self.runs.get_mut(run) {
            Some(run) => run.end = position + 1,
            None => self.runs.push(position..position + 1),
        }
        self.pages.push(PlacedPage { page, position, run });
    }

    fn is_dense(&self) -> bool {
        self.runs.len() <= RUNS_OF_WINDOW_MAX && self.pages.len() >= PAGES_MIN * self.runs.len()
    }
}

/// What is visited next.
#[derive(Debug)]
pub(super) enum Step {
    /// Pages that are read in runs.
    Runs(Window),
    /// Pages that lie far apart.
    Alone(Vec<u64>),
}

/// What bounds the runs of a table.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) page_count: u64,
    pub(super) page_bytes: u64,
    /// Most pages of a run, and of a window.
    pub(super) pages_max: u64,
}

impl Limits {
    fn reach(&self, run: &Range<u64>, position: u64) -> bool {
        position >= run.end
            && (position - run.end) * self.page_bytes <= GAP_BYTES_MAX
            && position - run.start < self.pages_max
    }

    /// Returns what is visited from page `next` on, and advances it. `position_of` says where a
    /// page lies, if it was written.
    pub(super) fn step(
        &self,
        next: &mut u64,
        position_of: impl Fn(u64) -> Option<u64>,
    ) -> Option<Step> {
        let mut alone = Vec::new();
        while alone.len() < ALONE_MAX {
            let Some(first) = (*next..self.page_count).find(|page| position_of(*page).is_some())
            else {
                *next = self.page_count;
                break;
            };
            let end = self.page_count.min(first + self.pages_max);
            let mut window = Window::default();
            for page in first..end {
                if let Some(position) = position_of(page) {
                    window.push(page, position, self);
                }
            }
            if window.is_dense() {
                if alone.is_empty() {
                    *next = end;
                    return Some(Step::Runs(window));
                }
                *next = first;
                break;
            }
            *next = end;
            alone.extend(window.pages.iter().map(|placed| placed.page));
        }
        (!alone.is_empty()).then_some(Step::Alone(alone))
    }
}

#[cfg(test)]
mod tests {
    use super::super::segments::Segments;
    use super::*;
    use proptest::prelude::*;

    fn steps(limits: &Limits, position_of: impl Fn(u64) -> Option<u64>) -> Vec<Step> {
        let mut next = 0;
        std::iter::from_fn(|| limits.step(&mut next, &position_of)).collect()
    }

    fn limits(page_count: u64) -> Limits {
        Limits { page_count, page_bytes: 4096, pages_max: 32 }
    }

    #[test]
    fn one_slot_is_one_run_a_window_and_two_slots_are_two() {
        let segments = Segments::new(&[], 64).unwrap();
        for (slots, runs) in [(1, 1), (2, 2)] {
            let position_of = |page| Some(segments.position(page, page % slots));
            let steps = steps(&limits(64), position_of);
            assert_eq!(steps.len(), 2);
            for step in steps {
                let Step::Runs(window) = step else { panic!("{step:?} is dense") };
                assert_eq!((window.pages.len(), window.runs.len()), (32, runs));
            }
        }
    }

    #[test]
    fn pages_far_apart_are_read_together_and_before_the_run_behind_them() {
        let is_written = |page: u64| page >= 4000 || page.is_multiple_of(40);
        let steps = steps(&limits(4032), |page| is_written(page).then_some(page));
        let [Step::Alone(alone), Step::Runs(window)] = &steps[..] else { panic!("{steps:?}") };
        assert_eq!((alone.len(), window.pages.len()), (100, 32));
    }

    proptest! {
        #[test]
        fn every_written_page_comes_once_in_order_and_lies_in_its_run(
            words in proptest::collection::vec(0u8..6, 1..400),
            kinds in 1u8..6,
            grown_at in proptest::collection::btree_set(1u64..400, 0..4),
        ) {
            let page_count = words.len() as u64;
            let grown_at: Vec<u64> = grown_at.into_iter().filter(|at| *at < page_count).collect();
            let segments = Segments::new(&grown_at, page_count).unwrap();
            // Fewer kinds: more pages of the same slot, or never written.
            let position_of = |page: u64| match words[page as usize].min(kinds) {
                0 => None,
                kind => Some(segments.position(page, u64::from(kind % 2))),
            };
            let mut seen = Vec::new();
            for step in steps(&limits(page_count), position_of) {
                match step {
                    Step::Alone(pages) => seen.extend(pages),
                    Step::Runs(window) => {
                        prop_assert!(window.is_dense());
                        for run in &window.runs {
                            prop_assert!(run.end - run.start <= 32);
                        }
                        for placed in window.pages {
                            prop_assert_eq!(position_of(placed.page), Some(placed.position));
                            prop_assert!(window.runs[placed.run].contains(&placed.position));
                            seen.push(placed.page);
                        }
                    }
                }
            }
            let written = (0..page_count).filter(|page| position_of(*page).is_some());
            prop_assert_eq!(seen, written.collect::<Vec<u64>>());
        }
    }
}
