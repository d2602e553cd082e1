//! Order of the splits: level by level, the nodes of a level in parallel.
#![expect(clippy::indexing_slicing, reason = "rows and pins are those of their node")]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use tierbed_core::env::{mix64, SplitMix64};
use tierbed_core::{Error, Result};

use super::divide::Divide;
use super::exchange::Exchange;
use super::{BisectionOptions, LevelReport};
use crate::hypergraph::Hypergraph;
use crate::partition::order::shuffle;

/// A node: how many rows and pins it has. Its rows follow those of the node before it.
#[derive(Debug, Clone, Copy, Default)]
struct Node {
    row_count: usize,
    /// Pages the node will become.
    page_count: usize,
    /// Pins in use.
    pin_count: usize,
    /// Pins the node's place had room for when its parent was split.
    pin_room: usize,
}

impl Node {
    /// Returns whether the node is small enough; a page always is.
    fn is_done(&self, limits: Option<PartLimits>) -> bool {
        let is_within = |limits: PartLimits| {
            self.row_count <= limits.rows as usize && self.pin_count <= limits.pins as usize
        };
        self.page_count < 2 || limits.is_some_and(is_within)
    }
}

/// One node's split, to be done by any thread.
struct Job<'a> {
    node: Node,
    /// Position of the node's first row: with the level it names the node, for its seed.
    first: usize,
    rows: &'a mut [u32],
    pins: &'a mut [u32],
    children: [Node; 2],
}

/// Arrays a thread keeps from node to node.
#[derive(Default)]
struct Scratch {
    exchange: Exchange,
    divide: Divide,
    ids: Vec<u32>,
}

/// How the rows of a node are shared out to its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// All pages are full but the last one.
    Full,
    /// All pages are about equally full.
    Even,
}

/// Splits a hypergraph into `page_count` pages.
///
/// Returns the rows that were asked for, page after page, and how many are on each page.
pub(super) fn split(
    mut graph: Hypergraph,
    page_count: usize,
    fill: Fill,
    options: &BisectionOptions,
) -> (Vec<u32>, Vec<usize>) {
    let shape = Shape { fill, ..Shape::full(page_count) };
    let nodes = split_on(&mut graph, shape, options, &Known::default(), &mut |_, _| Ok(()));
    let nodes = nodes.unwrap_or_else(|error| panic!("nothing after a level can fail: {error}"));
    (graph.rows, nodes.iter().map(|node| node.row_count).collect())
}

/// How large parts may be, so that each can be worked on alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartLimits {
    /// Rows of a part at most.
    pub(crate) rows: u32,
    /// Pins of a part at most; a part of one unit may have more.
    pub(crate) pins: u32,
    /// Rows of a unit, which is not split further.
    pub(crate) unit_rows: u32,
}

/// Splits a hypergraph until its parts are within `limits`; goes on after the known levels.
///
/// Returns where the rows and the pins of each part lie in the graph.
pub(super) fn split_to_limits(
    graph: &mut Hypergraph,
    limits: PartLimits,
    options: &BisectionOptions,
    known: &Known,
    after_level: AfterLevel<'_>,
) -> Result<Vec<[Range<usize>; 2]>> {
    let options = BisectionOptions { rows_per_page: limits.unit_rows, ..options.clone() };
    let page_count = graph.rows.len().div_ceil(limits.unit_rows as usize);
    let shape = Shape { limits: Some(limits), ..Shape::full(page_count) };
    let nodes = split_on(graph, shape, &options, known, after_level)?;
    let (mut row, mut pin) = (0, 0);
    let place = |node: Node| {
        let place = [row..row + node.row_count, pin..pin + node.pin_count];
        (row, pin) = (row + node.row_count, pin + node.pin_room);
        place
    };
    Ok(nodes.into_iter().map(place).collect())
}

/// What is to become of a graph.
#[derive(Debug, Clone, Copy)]
struct Shape {
    page_count: usize,
    fill: Fill,
    root: Root,
    /// Nodes within these are not split further.
    limits: Option<PartLimits>,
}

impl Shape {
    /// Full pages of all of a table.
    fn full(page_count: usize) -> Self {
        Self { page_count, fill: Fill::Full, root: Root::default(), limits: None }
    }
}

/// Where a graph lies in the whole bisection: at its top, or below.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Root {
    /// Splits above it.
    pub(super) level: u32,
    /// Rows before it in the order of the whole.
    pub(super) first: usize,
}

/// Does the first split of a graph with two pages or more; returns both children, with their pages.
pub(super) fn split_once(
    mut graph: Hypergraph,
    page_count: usize,
    root: Root,
    options: &BisectionOptions,
) -> [(Hypergraph, usize); 2] {
    let (row_count, pin_count) = (graph.rows.len(), graph.pins.len());
    let node = Node { row_count, page_count, pin_count, pin_room: pin_count };
    let shape = Shape { root, ..Shape::full(page_count) };
    let step = Step { level: root.level, shape, places: None };
    let nodes = split_level(&mut graph, &[node], step, options);
    let &[left, right] = nodes.as_slice() else {
        panic!("a graph of {page_count} pages was split into {} nodes", nodes.len())
    };
    let right_rows = graph.rows.split_off(left.row_count);
    let mut right_pins = graph.pins.split_off(left.pin_room);
    graph.pins.truncate(left.pin_count);
    right_pins.truncate(right.pin_count);
    let row_count = graph.row_count;
    let other = Hypergraph { rows: right_rows, pins: right_pins, row_count };
    [(graph, left.page_count), (other, right.page_count)]
}

/// Splits a graph that lies anywhere in the whole down to pages; returns its rows in order.
pub(super) fn split_below(
    mut graph: Hypergraph,
    page_count: usize,
    root: Root,
    options: &BisectionOptions,
) -> Result<Vec<u32>> {
    let shape = Shape { root, ..Shape::full(page_count) };
    split_on(&mut graph, shape, options, &Known::default(), &mut |_, _| Ok(()))?;
    Ok(graph.rows)
}

/// Levels of an earlier run.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) levels_done: u32,
    /// By row of the table: its place after these levels.
    pub(super) places: Vec<u32>,
}

impl Known {
    /// Checks that every one of `rows` has a place: a split cuts them by their places.
    ///
    /// # Errors
    /// `Corruption`: the resume file has other rows.
    fn check(&self, rows: &[u32]) -> Result<()> {
        let place_of = |row: &u32| self.places.get(*row as usize).copied();
        let lost = rows.iter().find(|row| matches!(place_of(row), None | Some(u32::MAX)));
        match lost.filter(|_| self.levels_done > 0) {
            None => Ok(()),
            Some(row) => Err(Error::corruption("resume file of a bisection has other rows")
                .with("row", row)
                .with("remedy", "delete the file: its step is done again")),
        }
    }
}

/// Is told the order of rows after each level.
pub(super) type AfterLevel<'a> = &'a mut dyn FnMut(LevelReport, &[u32]) -> Result<()>;

/// Splits level by level, the known ones as they were.
fn split_on(
    graph: &mut Hypergraph,
    shape: Shape,
    options: &BisectionOptions,
    known: &Known,
    after_level: AfterLevel<'_>,
) -> Result<Vec<Node>> {
    let page_count = shape.page_count;
    let pin_count = graph.pins.len();
    let row_count = graph.rows.len();
    let mut nodes = vec![Node { row_count, page_count, pin_count, pin_room: pin_count }];
    let level_count = page_count.max(1).next_power_of_two().trailing_zeros();
    known.check(&graph.rows)?;
    for level in 0..level_count {
        if nodes.iter().all(|node| node.is_done(shape.limits)) {
            break;
        }
        let places = (level < known.levels_done).then_some(known.places.as_slice());
        let step = Step { level: shape.root.level + level, shape, places };
        nodes = split_level(graph, &nodes, step, options);
        let report = LevelReport {
            levels_done: level + 1,
            level_count,
            pin_count: nodes.iter().map(|node| node.pin_count as u64).sum(),
        };
        after_level(report, &graph.rows)?;
    }
    Ok(nodes)
}

/// Splits into full pages, going on after the known levels; returns the rows, page after page.
pub(super) fn go_on(
    mut graph: Hypergraph,
    options: &BisectionOptions,
    known: &Known,
    after_level: AfterLevel<'_>,
) -> Result<Vec<u32>> {
    let page_count = graph.rows.len().div_ceil(options.rows_per_page as usize);
    split_on(&mut graph, Shape::full(page_count), options, known, after_level)?;
    Ok(graph.rows)
}

/// One level's split.
#[derive(Clone, Copy)]
struct Step<'a> {
    level: u32,
    shape: Shape,
    /// By row of the table: its place, when the level is known already.
    places: Option<&'a [u32]>,
}

/// Splits every node of a level that does not fit a page; the others stay as they are.
fn split_level(
    graph: &mut Hypergraph,
    nodes: &[Node],
    step: Step<'_>,
    options: &BisectionOptions,
) -> Vec<Node> {
    let (mut rows, mut pins) = (graph.rows.as_mut_slice(), graph.pins.as_mut_slice());
    let mut jobs = Vec::with_capacity(nodes.len());
    let mut first = step.shape.root.first;
    for &node in nodes {
        let (of_node, behind) = std::mem::take(&mut rows).split_at_mut(node.row_count);
        let (pins_of_node, pins_behind) = std::mem::take(&mut pins).split_at_mut(node.pin_room);
        (rows, pins) = (behind, pins_behind);
        let children = [node, Node::default()];
        let job = Job { node, first, rows: of_node, pins: pins_of_node, children };
        first += node.row_count;
        jobs.push(Mutex::new(job));
    }
    let next = AtomicUsize::new(0);
    // Few nodes: all threads work on one. Many nodes: every thread has one of its own.
    let within = if jobs.len() < options.thread_count { options.thread_count } else { 1 };
    let work = || {
        let mut scratch = Scratch::default();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut job = job.lock().unwrap_or_else(PoisonError::into_inner);
            if !job.node.is_done(step.shape.limits) {
                job.split(step, within, options, &mut scratch);
            }
        }
    };
    thread::scope(|scope| {
        let others = if within == 1 { options.thread_count.min(jobs.len()) - 1 } else { 0 };
        for _ in 0..others {
            scope.spawn(work);
        }
        work();
    });
    let done = jobs.into_iter().map(|job| job.into_inner().unwrap_or_else(PoisonError::into_inner));
    done.flat_map(|job| job.children).filter(|child| child.row_count > 0).collect()
}

impl Job<'_> {
    fn split(
        &mut self,
        step: Step<'_>,
        thread_count: usize,
        options: &BisectionOptions,
        scratch: &mut Scratch,
    ) {
        let Scratch { exchange, divide, ids } = scratch;
        let Node { row_count, page_count, .. } = self.node;
        let left_pages = page_count / 2;
        let left = match step.shape.fill {
            Fill::Full => left_pages * options.rows_per_page as usize,
            Fill::Even => (row_count as u64 * left_pages as u64 / page_count as u64) as usize,
        };
        exchange.side.clear();
        exchange.side.resize(row_count, false);
        assert!(left <= row_count, "{left} rows go left of {row_count}");
        let pins = &mut self.pins[..self.node.pin_count];
        if let Some(places) = step.places {
            let middle = self.first + left;
            for (side, &row) in exchange.side.iter_mut().zip(&*self.rows) {
                *side = places[row as usize] as usize >= middle;
            }
        } else {
            let name = u64::from(step.level) << 40 ^ self.first as u64;
            let mut rng = SplitMix64::new(mix64(options.seed ^ mix64(name)));
            ids.clear();
            ids.extend(0..row_count as u32);
            shuffle(ids, &mut rng);
            for &row in &ids[left..] {
                exchange.side[row as usize] = true;
            }
            exchange.run(pins, options, thread_count);
        }
        let (left_pins, right_pins) = divide.run(self.rows, pins, &exchange.side);
        self.children = [
            Node {
                row_count: left,
                page_count: left_pages,
                pin_count: left_pins,
                pin_room: left_pins,
            },
            Node {
                row_count: row_count - left,
                page_count: page_count - left_pages,
                pin_count: right_pins,
                pin_room: self.node.pin_room - left_pins,
            },
        ];
    }
}
