//! Independent parts of a table: the nodes after the first levels of a bisection.
//!
//! ```text
//! rows   [ part ][ part ][ part ][ part ]      one array; a part is a range of rows,
//! pins   [ part   ][ part ][ part   ][ ]       and of the pins of edges among them
//! ```
//!
//! Parts lie in the hypergraph that was split: nothing is copied, so memory is that of a
//! bisection. What is wanted of few parts only is split on the way to those parts alone.

use std::ops::Range;

use tierbed_core::Result;

use super::levels::{self, AfterLevel, Known, PartLimits, Root};
use super::BisectionOptions;
use crate::hypergraph::Hypergraph;

/// A hypergraph in parts.
#[derive(Debug)]
pub(crate) struct Parts {
    graph: Hypergraph,
    /// By part: its rows and its pins.
    places: Vec<[Range<usize>; 2]>,
}

/// Rows that were put together, and the edges of two of them or more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    /// By local row: the row of the table.
    pub(crate) rows: &'a [u32],
    /// Local rows of the edges; see [`edges`](crate::hypergraph::edges).
    pub(crate) pins: &'a [u32],
}

impl Parts {
    /// Bisects until every part is within `limits`, going on after the known levels.
    ///
    /// # Errors
    ///
    /// What `after_level` returns.
    pub(super) fn split(
        mut graph: Hypergraph,
        limits: PartLimits,
        options: &BisectionOptions,
        known: &Known,
        after_level: AfterLevel<'_>,
    ) -> Result<Self> {
        let places = levels::split_to_limits(&mut graph, limits, options, known, after_level)?;
        Ok(Self { graph, places })
    }

    /// Returns the parts in order, one at least.
    #[expect(
        clippy::indexing_slicing,
        reason = "places are ranges of the graph they were cut from"
    )]
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Part<'_>> {
        self.places.iter().map(|[rows, pins]| Part {
            rows: &self.graph.rows[rows.clone()],
            pins: &self.graph.pins[pins.clone()],
        })
    }
}

/// Cuts a table into parts of `part_rows` rows, the last one of the rest, and returns the rows of
/// those that `wanted` picks from `0..part_count`, in order.
///
/// `part_rows` is rounded down to whole pages. Only nodes above a wanted part are split: for a few
/// parts of many this costs about as much as three levels.
pub(crate) fn rows_of_parts(
    graph: Hypergraph,
    options: &BisectionOptions,
    part_rows: u32,
    wanted: impl FnOnce(usize) -> Vec<usize>,
) -> Vec<Vec<u32>> {
    let rows_per_page = part_rows / options.rows_per_page * options.rows_per_page;
    let part_count = graph.rows.len().div_ceil(rows_per_page as usize);
    let options = BisectionOptions { rows_per_page, ..options.clone() };
    let wanted = wanted(part_count);
    let mut found = Vec::with_capacity(wanted.len());
    // Nodes to look at, the next one last: graph, number of its first part, parts, place.
    let mut nodes = vec![(graph, 0, part_count, Root::default())];
    while let Some((graph, first_part, part_count, root)) = nodes.pop() {
        if !wanted.iter().any(|part| (first_part..first_part + part_count).contains(part)) {
            continue;
        }
        if part_count < 2 {
            found.push(graph.rows);
            continue;
        }
        let [(left, left_parts), (right, right_parts)] =
            levels::split_once(graph, part_count, root, &options);
        let level = root.level + 1;
        let middle = Root { level, first: root.first + left.rows.len() };
        nodes.push((right, first_part + left_parts, right_parts, middle));
        nodes.push((left, first_part, left_parts, Root { level, ..root }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::{edges, local};
    use crate::partition::bisect::into_parts;
    use crate::QueryLog;

    fn graph() -> Hypergraph {
        let queries: Vec<[u32; 3]> =
            (0..900).map(|at| [at % 97, 97 + at % 53, (at * at) % 150]).collect();
        let log = QueryLog::from_queries(150, queries).expect("in range");
        Hypergraph::from_log(log).expect("few rows")
    }

    /// Parts as rows and edges over rows of the table.
    fn named(parts: &Parts) -> Vec<(Vec<u32>, Vec<Vec<u32>>)> {
        let name = |part: Part<'_>| {
            let edges = edges(part.pins)
                .map(|edge| edge.iter().map(|&pin| part.rows[local(pin)]).collect())
                .collect();
            (part.rows.to_vec(), edges)
        };
        parts.iter().map(name).collect()
    }

    fn limits(rows: u32, pins: u32) -> PartLimits {
        PartLimits { rows, pins, unit_rows: 8 }
    }

    #[test]
    fn parts_hold_every_row_once_and_the_edges_among_their_rows() {
        let options = BisectionOptions::new(4);
        for (rows, pins) in [(1000, u32::MAX), (64, u32::MAX), (64, 300), (8, 0)] {
            let limits = limits(rows, pins);
            let parts = named(
                &into_parts(graph(), limits, &options, None, &mut |_| Ok(())).expect("no file"),
            );
            let mut all: Vec<u32> = parts.iter().flat_map(|part| part.0.clone()).collect();
            all.sort_unstable();
            assert!(all.iter().copied().eq(0..150), "{rows} rows");
            for (of_part, edges) in &parts {
                let pin_count: usize = edges.iter().map(Vec::len).sum();
                assert!(of_part.len() <= rows as usize);
                assert!(pin_count <= pins as usize || of_part.len() <= 8);
                let mut expected = 0;
                let queries = (0..900).map(|at: u32| [at % 97, 97 + at % 53, (at * at) % 150]);
                for mut query in queries.map(|query| query.to_vec()) {
                    query.sort_unstable();
                    query.dedup();
                    query.retain(|row| of_part.contains(row));
                    expected += usize::from(query.len() > 1);
                }
                assert_eq!(edges.len(), expected);
            }
        }
    }

    #[test]
    fn few_parts_are_those_of_all() {
        let options = BisectionOptions { thread_count: 2, ..BisectionOptions::new(4) };
        let all = rows_of_parts(graph(), &options, 18, |count| (0..count).collect());
        assert_eq!(all.len(), 10, "16 rows a part");
        let limits = PartLimits { rows: 16, pins: u32::MAX, unit_rows: 16 };
        let parts = into_parts(graph(), limits, &options, None, &mut |_| Ok(())).expect("no file");
        let of_parts: Vec<&[u32]> = parts.iter().map(|part| part.rows).collect();
        assert_eq!(all, of_parts);
        let some = rows_of_parts(graph(), &options, 18, |_| vec![1, 7]);
        assert_eq!(some, [all[1].clone(), all[7].clone()]);
        let one = rows_of_parts(graph(), &options, 1000, |count| (0..count).collect());
        assert_eq!(one.len(), 1);
    }
}
