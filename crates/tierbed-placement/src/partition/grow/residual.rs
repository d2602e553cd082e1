//! Residual cost of each query: the pages that serve it, and the rows that share them.
//!
//! Pins of a query that one page serves are a *group*; a query reads one page per group. A page
//! that brings a whole group and another whole group saves a read. A pin *owes* a part of a read:
//! all of it when it is read alone, less in a group:
//!
//! ```text
//! query     a b c d e
//! page      1 1 2 2          reads 3
//! owes      .58 .58 .58 .58 1
//! ```
//!
//! The queries to come are like these, not these: of a group that came together here some rows come
//! again with others. So a pin in a group owes more than one over the group's size.

#![expect(clippy::indexing_slicing, reason = "pins, queries and pages come from one block")]

use super::pins::Pins;

/// No page serves the pin: its row is read alone.
pub(crate) const NO_PAGE: u32 = u32::MAX;

/// What a pin owes at least, however large its group is. Of four logs' earlier parts, with many
/// replicas, 0.15 reads fewer pages than 0 or as many; 0.3 reads fewer still, but more on one.
const OWED_MIN: f32 = 0.15;

/// Which page serves which pin.
#[derive(Debug)]
pub(crate) struct Residual<'a> {
    pub(crate) pins: &'a Pins,
    /// By pin: the page that serves it, or [`NO_PAGE`].
    page: Vec<u32>,
    /// By pin: how many pins of its query that page serves.
    group: Vec<u32>,
    /// By pin: from [`OWED_MIN`] to one, by the group's size.
    owes: Vec<f32>,
    /// By query: pages it reads.
    reads: Vec<u32>,
    /// By page: a count within one query, zero in between.
    counts: Vec<u32>,
}

impl<'a> Residual<'a> {
    /// Starts with every pin read alone.
    pub(crate) fn alone(pins: &'a Pins) -> Self {
        let pin_count = pins.pin_count();
        Self {
            pins,
            page: vec![NO_PAGE; pin_count],
            group: vec![1; pin_count],
            owes: vec![1.0; pin_count],
            reads: (0..pins.query_count()).map(|query| pins.of_query(query).len() as u32).collect(),
            counts: Vec::new(),
        }
    }

    /// Returns how many pages a query reads.
    pub(crate) fn reads(&self, query: usize) -> u32 {
        self.reads[query]
    }

    /// Sums the reads of all queries.
    pub(crate) fn total_reads(&self) -> u64 {
        self.reads.iter().map(|&reads| u64::from(reads)).sum()
    }

    /// Returns which part of a read a pin still costs.
    pub(crate) fn owes(&self, pin: usize) -> f32 {
        self.owes[pin]
    }

    /// Returns what the pins of a range owe.
    pub(crate) fn owed_by(&self, pins: std::ops::Range<usize>) -> &[f32] {
        &self.owes[pins]
    }

    /// Returns the page that serves a pin.
    pub(crate) fn page(&self, pin: usize) -> u32 {
        self.page[pin]
    }

    /// Returns how many pins of its query are served by the pin's page.
    pub(crate) fn group(&self, pin: usize) -> u32 {
        self.group[pin]
    }

    /// Lets `page` serve a pin. [`regroup`](Self::regroup) the query when all its pins are set.
    pub(crate) fn serve(&mut self, pin: usize, page: u32) {
        self.page[pin] = page;
        if self.counts.len() <= page as usize {
            self.counts.resize(page as usize + 1, 0);
        }
    }

    /// Counts groups and reads of a query anew.
    pub(crate) fn regroup(&mut self, query: usize) {
        let range = self.pins.of_query(query);
        // All counts before any group: the last pin of a group changes what the first one owes.
        for pin in range.clone() {
            if self.page[pin] != NO_PAGE {
                self.counts[self.page[pin] as usize] += 1;
            }
        }
        for pin in range.clone() {
            let page = self.page[pin];
            self.group[pin] = if page == NO_PAGE { 1 } else { self.counts[page as usize] };
            self.owes[pin] = OWED_MIN + (1.0 - OWED_MIN) / self.group[pin] as f32;
        }
        let mut reads = 0;
        // Taking a count marks its page as read once, and leaves zeros for the next query: clearing
        // all counts would cost as much as there are pages.
        for pin in range {
            let page = self.page[pin];
            let is_first = page == NO_PAGE || std::mem::take(&mut self.counts[page as usize]) > 0;
            reads += u32::from(is_first);
        }
        self.reads[query] = reads;
    }

    /// Returns how many reads of `query` a page of the rows in `is_on_page` would save: the
    /// groups it brings whole, less one.
    pub(crate) fn saving(&mut self, query: usize, is_on_page: &[bool]) -> u32 {
        let range = self.pins.of_query(query);
        let mut whole = 0;
        for pin in range.clone() {
            if !is_on_page[self.pins.row(pin) as usize] {
                continue;
            }
            if self.group[pin] == 1 {
                whole += 1;
                continue;
            }
            // A page that brings part of a group saves nothing: the rest of it is still read.
            let count = &mut self.counts[self.page[pin] as usize];
            *count += 1;
            whole += u32::from(*count == self.group[pin]);
        }
        for pin in range {
            if self.page[pin] != NO_PAGE {
                self.counts[self.page[pin] as usize] = 0;
            }
        }
        // The page itself is one read more.
        whole.saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::QueryLog;

    /// One query over rows 0..5; local rows are the same, all have one query.
    fn pins() -> Pins {
        let log = QueryLog::from_queries(5, [[0, 1, 2, 3, 4]]).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        Pins::new(&graph.pins, 5, 1)
    }

    fn saving(residual: &mut Residual<'_>, rows: &[usize]) -> u32 {
        let mut is_on_page = [false; 5];
        for &row in rows {
            is_on_page[row] = true;
        }
        residual.saving(0, &is_on_page)
    }

    #[test]
    fn whole_groups_save_and_parts_do_not() {
        let pins = pins();
        let mut residual = Residual::alone(&pins);
        assert_eq!(residual.total_reads(), 5);
        assert_eq!(saving(&mut residual, &[0, 1, 2]), 2);
        for (pin, page) in [(0, 1), (1, 1), (2, 0), (3, 0)] {
            residual.serve(pin, page);
        }
        residual.regroup(0);
        assert_eq!((residual.reads(0), residual.group(0), residual.group(4)), (3, 2, 1));
        assert!((residual.owes(1) - 0.575).abs() < 1e-6, "{}", residual.owes(1));
        assert_eq!(saving(&mut residual, &[0, 1, 4]), 1);
        assert_eq!(saving(&mut residual, &[0, 2, 4]), 0, "halves of two groups stay halves");
        assert_eq!(saving(&mut residual, &[0, 1, 2, 3, 4]), 2);
        assert_eq!(saving(&mut residual, &[4]), 0);
    }
}
