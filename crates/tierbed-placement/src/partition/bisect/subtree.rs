//! A node with its rows and pins as bytes, for a bisection that continues on another machine.
//!
//! What is split below a node depends on the node alone, and on its place in the whole. So nodes
//! may be split on any machine, in any order, and again after a machine was lost:
//!
//! ```text
//! root ─▶ split ─▶ [a][b] ─▶ split each ─▶ [aa][ab][ba][bb] ─▶ order each, put one after the other
//! ```
//!
//! Bytes, little-endian: magic, row count, page count, level, count of rows, first row's place,
//! crc32c of what follows, rows, pins. Numbers have 4 bytes, the magic and the place 8. They live
//! as long as a job.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::levels::{split_below, split_once, Root};
use super::{push_unseen, BisectionOptions};
use crate::hypergraph::{edges, local, Hypergraph};
use crate::QueryLog;

const MAGIC: [u8; 8] = *b"TBtree_1";
const HEADER_BYTES: usize = 36;

/// A node of a bisection, to be split here or elsewhere.
#[derive(Debug, Clone)]
pub struct Subtree {
    graph: Hypergraph,
    page_count: usize,
    root: Root,
}

impl Subtree {
    /// Returns the node above all others: the rows that `log` asks for.
    ///
    /// # Errors
    /// `Invalid` for options out of range, `Unsupported` for 2^31 rows or more.
    pub fn of_log(log: QueryLog, options: &BisectionOptions) -> Result<Self> {
        options.check()?;
        let graph = Hypergraph::from_log(log)?;
        let page_count = graph.rows.len().div_ceil(options.rows_per_page as usize);
        Ok(Self { graph, page_count, root: Root::default() })
    }

    /// Returns the pages the node will become.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.page_count
    }

    /// Splits the node once; `None` for one of a single page.
    ///
    /// # Errors
    /// `Invalid` for other options than those the node was made with.
    pub fn split(self, options: &BisectionOptions) -> Result<Option<[Self; 2]>> {
        self.check(options)?;
        if self.page_count < 2 {
            return Ok(None);
        }
        let [left, right] = split_once(self.graph, self.page_count, self.root, options);
        let level = self.root.level + 1;
        let middle = self.root.first + left.0.rows.len();
        let child = |(graph, page_count), first| {
            let root = Root { level, first };
            Self { graph, page_count, root }
        };
        Ok(Some([child(left, self.root.first), child(right, middle)]))
    }

    /// Splits the node down to pages; returns its rows, page after page.
    ///
    /// # Errors
    /// `Invalid` for other options than those the node was made with.
    pub fn order(self, options: &BisectionOptions) -> Result<Vec<u32>> {
        self.check(options)?;
        split_below(self.graph, self.page_count, self.root, options)
    }

    fn check(&self, options: &BisectionOptions) -> Result<()> {
        options.check()?;
        let expected = self.graph.rows.len().div_ceil(options.rows_per_page as usize);
        if self.page_count == expected {
            return Ok(());
        }
        Err(Error::invalid("part of a bisection has pages of another size")
            .with("pages", self.page_count)
            .with("expected", expected))
    }

    /// Returns the node as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Hypergraph { rows, pins, row_count } = &self.graph;
        let mut body = Vec::with_capacity(4 * (rows.len() + pins.len()));
        body.extend(rows.iter().chain(pins).flat_map(|number| number.to_le_bytes()));
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend(MAGIC);
        for number in [*row_count, self.page_count as u32, self.root.level, rows.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend((self.root.first as u64).to_le_bytes());
        bytes.extend(crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads a node from bytes.
    ///
    /// # Errors
    /// `Corruption` for bytes that are no node.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = || Error::corruption("these bytes are no part of a bisection");
        let (header, body) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(wrong)?;
        let (words, _) = header.as_chunks::<4>();
        let words = <[[u8; 4]; HEADER_BYTES / 4]>::try_from(words).map_err(|_| wrong())?;
        let [_, _, row_count, page_count, level, row_len, first_low, first_high, crc] =
            words.map(u32::from_le_bytes);
        let is_whole = header.starts_with(&MAGIC) && crc == crc32c(body);
        let (numbers, []) = body.as_chunks::<4>() else { return Err(wrong()) };
        let row_len = row_len as usize;
        let (rows, pins) = numbers.split_at_checked(row_len).ok_or_else(wrong)?;
        let read = |numbers: &[[u8; 4]]| -> Vec<u32> {
            numbers.iter().map(|number| u32::from_le_bytes(*number)).collect()
        };
        let graph = Hypergraph { rows: read(rows), pins: read(pins), row_count };
        let page_count = page_count as usize;
        let first = u64::from(first_low) | u64::from(first_high) << 32;
        let walked: usize = edges(&graph.pins).map(<[u32]>::len).sum();
        let is_sound = walked == graph.pins.len()
            && graph.pins.iter().all(|&pin| local(pin) < row_len)
            && graph.rows.iter().all(|&row| row < graph.row_count)
            && page_count <= row_len
            && level < u64::BITS
            && first.saturating_add(row_len as u64) <= u64::from(graph.row_count);
        match usize::try_from(first) {
            Ok(first) if is_whole && is_sound => {
                Ok(Self { graph, page_count, root: Root { level, first } })
            }
            _ => Err(wrong()),
        }
    }
}

/// Returns the order of all rows of a table: those of `parts` one after the other, then those that
/// no part has, highest first.
///
/// # Errors
/// `Corruption` for a row that is repeated or beyond the table.
pub fn order_of_parts(parts: &[Vec<u32>], row_count: u32) -> Result<Vec<u32>> {
    let mut order: Vec<u32> = parts.concat();
    let mut is_seen = vec![false; row_count as usize];
    for &row in &order {
        let seen = is_seen.get_mut(row as usize).filter(|seen| !**seen);
        *seen.ok_or_else(|| {
            Error::corruption("parts of a bisection repeat a row, or are of another table")
                .with("row", row)
                .with("row_count", row_count)
        })? = true;
    }
    push_unseen(&mut order, row_count);
    Ok(order)
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use crate::partition::bisect;
    use crate::Placement;

    fn log(rows: u32) -> QueryLog {
        let mut rng = SplitMix64::new(9);
        let queries = (0..3 * rows).map(|_| {
            let circle = rng.below(u64::from(rows / 5 + 1)) as u32;
            (0..1 + rng.below(5)).map(|at| (circle * 5 + at as u32) % rows).collect::<Vec<_>>()
        });
        QueryLog::from_queries(rows + 3, queries).expect("in range")
    }

    /// Splits `depth` times, each node through its bytes, then orders what is left.
    fn in_parts(node: &Subtree, depth: u32, options: &BisectionOptions, parts: &mut Vec<Vec<u32>>) {
        let node = Subtree::decode(&node.encode()).expect("its own bytes");
        match node.clone().split(options).expect("its options").filter(|_| depth > 0) {
            Some(children) => {
                children.iter().for_each(|child| in_parts(child, depth - 1, options, parts));
            }
            None => parts.push(node.order(options).expect("in memory")),
        }
    }

    #[test]
    fn parts_split_elsewhere_are_the_bisection_of_the_whole() {
        for (rows, rows_per_page) in [(5, 4), (37, 4), (400, 6), (257, 1)] {
            let options = BisectionOptions { seed: 3, ..BisectionOptions::new(rows_per_page) };
            let whole = bisect(log(rows), &options).expect("few rows");
            for depth in [0, 1, 3, 20] {
                let node = Subtree::of_log(log(rows), &options).expect("few rows");
                let mut parts = Vec::new();
                in_parts(&node, depth, &options, &mut parts);
                let order = order_of_parts(&parts, rows + 3).expect("whole");
                let found = Placement::from_order(&order, rows_per_page).expect("whole");
                assert_eq!(found, whole, "{rows} rows, {depth} splits apart");
            }
        }
    }

    #[test]
    fn bytes_that_are_no_node_are_refused() {
        let options = BisectionOptions::new(4);
        let bytes = Subtree::of_log(log(40), &options).expect("few rows").encode();
        for at in 0..bytes.len() {
            assert!(Subtree::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
        for at in (0..8).chain(32..bytes.len()) {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert!(Subtree::decode(&wrong).is_err(), "byte {at}");
        }
        let other = BisectionOptions::new(5);
        assert!(Subtree::decode(&bytes).expect("whole").split(&other).is_err());
        assert!(Subtree::decode(&bytes).expect("whole").order(&other).is_err());
        assert!(order_of_parts(&[vec![1], vec![1]], 4).is_err());
        assert!(order_of_parts(&[vec![4]], 4).is_err());
    }
}
