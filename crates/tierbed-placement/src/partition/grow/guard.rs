//! Choice between growth and bisection for each block, by a trial on later queries.
//!
//! A large log has parts of very different kinds: rows that occur with all others, and rows that
//! occur in circles of a few. So the last tenth of a block's queries judges all ways of making
//! pages, which learn from the first nine tenths; the best one then takes the whole block. Tables
//! of one block are tried as a whole instead ([`trial`](crate::trial)).

use super::block::Block;
use super::{pages_of_order, Way};
use crate::hypergraph::{edges, local, Hypergraph};
use crate::partition::bisect::{bisect_block, Part};
use crate::partition::BisectionOptions;
use crate::progress::{BuildContext, Progress, Stage};
use crate::trial::{TrialReads, JUDGING_SHARE};

/// Makes pages by the earlier queries of a part, in every way, and counts what the later ones read.
pub(crate) fn try_on_part(part: Part<'_>, bisection: &BisectionOptions, seed: u64) -> TrialReads {
    let all: Vec<&[u32]> = edges(part.pins).collect();
    let early_count = (all.len() as f64 * (1.0 - JUDGING_SHARE)) as usize;
    let (early, judges) = all.split_at(early_count);
    let early_pins: usize = early.iter().map(|edge| edge.len()).sum();
    let (early_pins, _) = part.pins.split_at(early_pins);
    let early = Part { pins: early_pins, ..part };
    let progress = Progress::silent();
    let stage: Stage<'_, '_> = BuildContext::alone(&progress).stage(0.0..1.0, 1);
    let block = Block::new(early, seed);
    let reads_by = |way: Way| {
        let pages = match way {
            Way::Bisected => bisected_pages(early, bisection),
            _ => block.home_pages(bisection, way, &stage),
        };
        reads_of(judges, &pages, part.rows.len())
    };
    TrialReads {
        grown: reads_by(Way::Grown),
        refined: reads_by(Way::Refined),
        bisected: reads_by(Way::Bisected),
    }
}

/// Bisects a part; its pages are full but the last one.
pub(crate) fn bisected_pages(part: Part<'_>, bisection: &BisectionOptions) -> Vec<Vec<u32>> {
    let row_count = part.rows.len() as u32;
    let rows = (0..row_count).collect();
    let graph = Hypergraph { rows, pins: part.pins.to_vec(), row_count };
    pages_of_order(&bisect_block(graph, bisection), bisection.rows_per_page)
}

/// Sums the pages that hold the rows of each query.
#[expect(clippy::indexing_slicing, reason = "pins are local rows, and each has a page")]
fn reads_of(queries: &[&[u32]], pages: &[Vec<u32>], row_count: usize) -> u64 {
    let mut page_of = vec![0u32; row_count];
    for (page, rows) in (0..).zip(pages) {
        rows.iter().for_each(|&row| page_of[row as usize] = page);
    }
    // By page: the query, from 1, that read it last.
    let mut read_by = vec![0usize; pages.len()];
    let mut reads = 0;
    for (at, query) in (1..).zip(queries) {
        for &pin in *query {
            let last = &mut read_by[page_of[local(pin)] as usize];
            reads += u64::from(std::mem::replace(last, at) != at);
        }
    }
    reads
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use crate::QueryLog;

    fn graph(queries: &[Vec<u32>]) -> Hypergraph {
        let log = QueryLog::from_queries(700, queries).expect("in range");
        Hypergraph::from_log(log).expect("few rows")
    }

    fn try_on(graph: &Hypergraph) -> TrialReads {
        let part = Part { rows: &graph.rows, pins: &graph.pins };
        try_on_part(part, &BisectionOptions::new(8), 3)
    }

    #[test]
    fn circles_are_grown_and_by_chance_bisection_wins_too() {
        let mut rng = SplitMix64::new(4);
        let circles: Vec<Vec<u32>> = (0..3000)
            .map(|_| {
                let circle = rng.below(100) as u32;
                (0..4).map(|_| circle + 100 * rng.below(7) as u32).collect()
            })
            .collect();
        let reads = try_on(&graph(&circles));
        assert!(reads.way() == Way::Grown && reads.grown < reads.bisected, "{reads:?}");
        // Where rows meet by chance, each way wins only by chance.
        let mut wins = (0..12).map(|_| {
            let mut query = |_| (0..4).map(|_| rng.below(300) as u32).collect();
            let chance: Vec<Vec<u32>> = (0..500).map(&mut query).collect();
            try_on(&graph(&chance)).way()
        });
        assert!(wins.any(|way| way != Way::Grown), "bisection never won");
    }

    #[test]
    fn reads_are_pages_of_each_query_once() {
        let marked = 1u32 << 31;
        let queries: [&[u32]; 3] = [&[0, 1, 2 | marked], &[0, 4 | marked], &[3, 4 | marked]];
        assert_eq!(reads_of(&queries, &[vec![0, 1], vec![2, 3], vec![4]], 5), 2 + 2 + 2);
        assert_eq!(reads_of(&queries, &[vec![0, 1, 2], vec![3, 4]], 5), 1 + 2 + 1);
    }
}
