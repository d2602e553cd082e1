//! Growth of one page from a seed row.
//!
//! Rows join one by one: each time the one that is asked for, together with the page so far, in
//! most queries that still cost something. What a query contributes falls as the page covers more
//! of it, and popular rows are damped, because they occur together with every row:
//!
//! ```text
//! score(row) = degree(row)^-damping * sum over queries of covered(query) * owes(pin of row)
//! ```
//!
//! Of a popular row only a sample of the queries is looked at. There, a row of a single query that
//! the sample happens to have would beat all others by its damping. So a sum counts for at most the
//! row's fair share of the sample: its degree times the share of queries looked at.
//!
//! Cost: the pins of the queries of the rows on the page, sampled for popular rows.

#![expect(clippy::indexing_slicing, reason = "pins, queries and rows come from one block")]

use super::residual::Residual;

/// Of a popular row about this many queries are looked at.
const SAMPLE_MAX: usize = 300;

/// In a query of more rows, being asked for together says little: it adds to no score.
const LONG_QUERY: usize = 256;

/// A candidate is looked at again when its score is this share of the best one's.
const HOT_SHARE: f32 = 0.5;

/// A page and what it would save.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Grown {
    pub(crate) rows: Vec<u32>,
    /// Reads saved over all queries; an estimate where a sample was looked at.
    pub(crate) saving: f32,
}

/// A row that may join the page.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    /// Valid where `round` is the growth's.
    score: f32,
    round: u32,
    /// What is added to the score is multiplied by this.
    damping: f32,
    /// The score of a row that is asked for with the page in all its queries.
    score_max: f32,
    is_hot: bool,
}

/// Grows pages over one residual.
#[derive(Debug)]
pub(crate) struct Growth<'a> {
    pub(crate) residual: Residual<'a>,
    rows_per_page: usize,
    /// By row: its score; together, because they are touched together.
    candidates: Vec<Candidate>,
    is_on_page: Vec<bool>,
    /// By query: how much of a read the page covers, valid where `covered_in` is the round.
    covered: Vec<f32>,
    covered_in: Vec<u32>,
    queries: Vec<u32>,
    /// Rows with a score in this round.
    scored: Vec<u32>,
    /// Of them, rows with a score of at least `hot_min`.
    hot: Vec<u32>,
    hot_min: f32,
    round: u32,
    /// Queries from here on are outside the sample.
    sample_end: usize,
}

impl<'a> Growth<'a> {
    pub(crate) fn new(residual: Residual<'a>, rows_per_page: usize, damping: f32) -> Self {
        let (row_count, query_count) = (residual.pins.row_count(), residual.pins.query_count());
        let degree = |row: usize| residual.pins.degree(row as u32).max(1) as f32;
        Self {
            rows_per_page,
            candidates: (0..row_count)
                .map(|row| Candidate {
                    score: 0.0,
                    round: 0,
                    damping: degree(row).powf(-damping),
                    score_max: degree(row) * degree(row).powf(-damping),
                    is_hot: false,
                })
                .collect(),
            is_on_page: vec![false; row_count],
            covered: vec![0.0; query_count],
            covered_in: vec![0; query_count],
            queries: Vec::new(),
            scored: Vec::new(),
            hot: Vec::new(),
            hot_min: f32::INFINITY,
            round: 0,
            sample_end: 0,
            residual,
        }
    }

    /// Sums what the pins of `row` owe, over queries that could still save a read.
    pub(crate) fn owed(&self, row: u32) -> f32 {
        let pins = self.residual.pins;
        let sample_end = pins.sample_end(row, SAMPLE_MAX);
        let mut sum = 0.0;
        for &pin in pins.of_row(row) {
            let query = pins.query(pin);
            if query >= sample_end {
                break;
            }
            if self.residual.reads(query) >= 2 {
                sum += self.residual.owes(pin as usize);
            }
        }
        sum * pins.query_count() as f32 / sample_end.max(1) as f32
    }

    /// Grows a page from `seed` of at most `room` rows, without those that are `taken`.
    pub(crate) fn grow(&mut self, seed: u32, room: usize, taken: Option<&[bool]>) -> Grown {
        self.round += 1;
        self.queries.clear();
        self.scored.clear();
        self.hot.clear();
        self.hot_min = f32::INFINITY;
        self.sample_end = self.residual.pins.sample_end(seed, SAMPLE_MAX);
        let mut rows = Vec::with_capacity(room);
        let mut next = Some(seed);
        while let Some(row) = next {
            rows.push(row);
            self.is_on_page[row as usize] = true;
            if rows.len() >= room.min(self.rows_per_page) {
                self.join(row);
                break;
            }
            self.join(row);
            next = self.best(taken);
        }
        let mut saving = 0;
        // Only what covers more than one pin can save a read; sums of f32 may end just above one.
        for at in 0..self.queries.len() {
            let query = self.queries[at] as usize;
            if query < self.sample_end && self.covered[query] > 1.001 {
                saving += self.residual.saving(query, &self.is_on_page);
            }
        }
        for &row in &rows {
            self.is_on_page[row as usize] = false;
        }
        let scale = self.residual.pins.query_count() as f32 / self.sample_end.max(1) as f32;
        Grown { rows, saving: saving as f32 * scale }
    }

    /// Adds to the scores of all rows what `row` on the page is worth to them.
    fn join(&mut self, row: u32) {
        let pins = self.residual.pins;
        // The rows before were counted over a larger sample. Scores are compared with the share of
        // the sample at hand, so that they stay comparable.
        if pins.degree(row) > 2 * SAMPLE_MAX {
            self.sample_end = self.sample_end.min(pins.sample_end(row, 2 * SAMPLE_MAX));
        }
        let sample_share = self.sample_end as f32 / pins.query_count().max(1) as f32;
        for &pin in pins.of_row(row) {
            let query = pins.query(pin);
            if query >= self.sample_end {
                break;
            }
            if self.residual.reads(query) < 2 {
                continue;
            }
            if self.covered_in[query] != self.round {
                self.covered_in[query] = self.round;
                self.covered[query] = 0.0;
                self.queries.push(query as u32);
            }
            let before = self.covered[query];
            self.covered[query] = before + self.residual.owes(pin as usize);
            // A query adds at most one read to a score: from there on, a further row saves what it
            // owes itself, and no more for every row that was there before.
            if before >= 1.0 || pins.of_query(query).len() > LONG_QUERY {
                continue;
            }
            let more = self.covered[query].min(1.0) - before;
            let owed = self.residual.owed_by(pins.of_query(query));
            for (&row, owes) in pins.rows_of(query).iter().zip(owed) {
                let candidate = &mut self.candidates[row as usize];
                if candidate.round != self.round {
                    candidate.round = self.round;
                    candidate.score = 0.0;
                    candidate.is_hot = false;
                    self.scored.push(row);
                }
                // At most the fair share of a sample; see the module.
                let score = candidate.score + more * owes * candidate.damping;
                candidate.score = score.min(candidate.score_max * sample_share);
                if candidate.score >= self.hot_min && !candidate.is_hot {
                    candidate.is_hot = true;
                    self.hot.push(row);
                }
            }
        }
    }

    /// Returns the row of the highest score that may join; of equals the first found.
    fn best(&mut self, taken: Option<&[bool]>) -> Option<u32> {
        let may_join = |row: u32, is_on_page: &[bool]| {
            !is_on_page[row as usize] && !taken.is_some_and(|taken| taken[row as usize])
        };
        if let Some((row, score)) = self.best_hot(taken) {
            if score >= self.hot_min {
                return Some(row);
            }
        }
        // The hot ones are used up: lower the bar, so that few rows are compared next time.
        let mut highest = 0.0f32;
        for &row in &self.scored {
            if may_join(row, &self.is_on_page) {
                highest = highest.max(self.candidates[row as usize].score);
            }
        }
        if highest <= 0.0 {
            return None;
        }
        self.hot_min = highest * HOT_SHARE;
        self.hot.clear();
        for &row in &self.scored {
            let candidate = &mut self.candidates[row as usize];
            candidate.is_hot = may_join(row, &self.is_on_page) && candidate.score >= self.hot_min;
            if candidate.is_hot {
                self.hot.push(row);
            }
        }
        self.best_hot(taken).map(|(row, _)| row)
    }

    /// Returns the best of the hot rows, and forgets those that may not join.
    fn best_hot(&mut self, taken: Option<&[bool]>) -> Option<(u32, f32)> {
        let (is_on_page, candidates) = (&self.is_on_page, &self.candidates);
        self.hot.retain(|&row| {
            !is_on_page[row as usize] && !taken.is_some_and(|taken| taken[row as usize])
        });
        let mut best: Option<(u32, f32)> = None;
        for &row in &self.hot {
            let score = candidates[row as usize].score;
            if best.is_none_or(|(_, highest)| score > highest) {
                best = Some((row, score));
            }
        }
        best
    }

    /// Lets `page` of these rows serve every query it saves a read of.
    pub(crate) fn accept(&mut self, rows: &[u32], page: u32) {
        self.round += 1;
        self.queries.clear();
        let pins = self.residual.pins;
        for &row in rows {
            self.is_on_page[row as usize] = true;
            for &pin in pins.of_row(row) {
                let query = pins.query(pin);
                if self.residual.reads(query) < 2 {
                    continue;
                }
                if self.covered_in[query] != self.round {
                    self.covered_in[query] = self.round;
                    self.covered[query] = 0.0;
                }
                self.covered[query] += 1.0;
                // Listed once, when the second row comes: a single row saves no read.
                if self.covered[query] == 2.0 {
                    self.queries.push(query as u32);
                }
            }
        }
        for at in 0..self.queries.len() {
            let query = self.queries[at] as usize;
            if self.residual.saving(query, &self.is_on_page) == 0 {
                continue;
            }
            for pin in pins.of_query(query) {
                if self.is_on_page[pins.row(pin) as usize] {
                    self.residual.serve(pin, page);
                }
            }
            self.residual.regroup(query);
        }
        for &row in rows {
            self.is_on_page[row as usize] = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::partition::grow::pins::Pins;
    use crate::QueryLog;

    /// Rows 0, 1, 2 are asked for together most, then 0, 3; 4 once with each other row.
    fn pins() -> Pins {
        let queries =
            [&[0, 1, 2][..], &[0, 1, 2], &[0, 1, 2], &[0, 3], &[0, 3], &[1, 4], &[2, 4], &[3, 4]];
        let log = QueryLog::from_queries(5, queries).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        assert_eq!(graph.rows, [0, 1, 2, 3, 4]);
        Pins::new(&graph.pins, 5, 1)
    }

    #[test]
    fn friends_join_in_order_and_savings_are_exact() {
        let pins = pins();
        let mut growth = Growth::new(Residual::alone(&pins), 3, 0.5);
        let page = growth.grow(0, 3, None);
        assert_eq!(page, Grown { rows: vec![0, 1, 2], saving: 6.0 });
        assert_eq!(growth.owed(0), 5.0);
        let without = [false, true, false, false, false];
        assert_eq!(growth.grow(0, 2, Some(&without)).rows, [0, 2]);
    }

    #[test]
    fn a_popular_seed_is_not_joined_by_whom_its_sample_met_by_chance() {
        // Row 0 is in all queries, rows 1 to 100 in every hundredth, others in a single one.
        let queries: Vec<[u32; 3]> = (0..10_000).map(|at| [0, 1 + at % 100, 101 + at]).collect();
        let log = QueryLog::from_queries(10_101, &queries).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        let pins = Pins::new(&graph.pins, graph.rows.len(), 1);
        let rows = Growth::new(Residual::alone(&pins), 8, 0.5).grow(0, 8, None).rows;
        assert_eq!((rows.len(), rows[0]), (8, 0));
        assert!(rows[1..].iter().all(|&row| pins.degree(row) == 100), "{rows:?}");
    }

    #[test]
    fn what_a_page_saves_is_not_saved_again() {
        let pins = pins();
        let mut growth = Growth::new(Residual::alone(&pins), 3, 0.5);
        let before = growth.residual.total_reads();
        let page = growth.grow(0, 3, None);
        growth.accept(&page.rows, 0);
        assert_eq!(before - growth.residual.total_reads(), 6);
        let again = growth.grow(0, 3, None);
        assert_eq!(again, Grown { rows: vec![0, 3, 4], saving: 3.0 });
        growth.accept(&again.rows, 1);
        assert_eq!(growth.grow(0, 3, None).saving, 0.0);
    }
}
