//! Bounded residency of a memory map: a clock over its pages.
//!
//! ```text
//! oldest [ 7  3* 9  1 ] newest      page 4 comes: 7 leaves. Then 8 comes: 3 was used again
//!                                   since it came (*), so it moves to the end and 9 leaves.
//! ```

use std::collections::VecDeque;

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Out,
    In,
    /// In, and used again since it came or was passed over.
    UsedAgain,
}

/// Pages of a file, of which some are in memory.
#[derive(Debug)]
pub(super) struct Window {
    states: Vec<State>,
    order: VecDeque<u32>,
    page_count_max: usize,
}

impl Window {
    /// Starts with no page of `page_count` in memory, and room for `page_count_max`, at least one.
    pub(super) fn new(page_count: u32, page_count_max: usize) -> Self {
        let states = vec![State::Out; page_count as usize];
        Self { states, order: VecDeque::new(), page_count_max: page_count_max.max(1) }
    }

    /// Notes a use of `page`; returns the page that has to leave for it.
    pub(super) fn touch(&mut self, page: u32) -> Option<u32> {
        let state = self.states.get_mut(page as usize)?;
        if *state != State::Out {
            *state = State::UsedAgain;
            return None;
        }
        *state = State::In;
        let leaving = if self.order.len() < self.page_count_max { None } else { self.oldest() };
        self.order.push_back(page);
        leaving
    }

    /// Takes out the oldest page that was not used again.
    fn oldest(&mut self) -> Option<u32> {
        loop {
            let page = self.order.pop_front()?;
            match self.states.get_mut(page as usize) {
                Some(state) if *state == State::UsedAgain => {
                    *state = State::In;
                    self.order.push_back(page);
                }
                Some(state) => {
                    *state = State::Out;
                    return Some(page);
                }
                None => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_page_not_used_again_leaves() {
        let mut window = Window::new(10, 4);
        assert!([7, 3, 9, 1, 3].iter().all(|&page| window.touch(page).is_none()));
        assert_eq!(window.touch(4), Some(7));
        assert_eq!(window.touch(8), Some(9));
        assert_eq!(window.touch(3), None);
        assert_eq!(window.touch(7), Some(1));
    }

    #[test]
    fn never_more_pages_are_in_than_there_is_room() {
        for room in 0..5 {
            let mut window = Window::new(8, room);
            let mut held = std::collections::HashSet::new();
            for at in 0..200u32 {
                let page = at * at % 7;
                let is_in = !held.insert(page);
                let leaving = window.touch(page);
                assert!(!is_in || leaving.is_none());
                if let Some(leaving) = leaving {
                    assert!(held.remove(&leaving) && leaving != page);
                }
                assert!(held.len() <= room.max(1));
            }
        }
        assert_eq!(Window::new(3, 1).touch(3), None, "no such page");
    }
}
