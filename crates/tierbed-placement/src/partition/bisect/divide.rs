//! Division of a node's pins between its children, at the end of a split.
//!
//! ```text
//! rows  a b c d    sides  l r r l        rows  a d │ b c
//! pins  a b d* b c* a c*            ──▶  pins  a d*│ b c*      numbered from 0 in each child
//! ```

#![expect(clippy::indexing_slicing, reason = "local rows are below the node's row count")]

use crate::hypergraph::{close_edge, edges, local};

/// Arrays of one division, reused from node to node.
#[derive(Debug, Default)]
pub(super) struct Divide {
    /// By local row: its number in its child.
    number: Vec<u32>,
    right_rows: Vec<u32>,
    left_pins: Vec<u32>,
    right_pins: Vec<u32>,
}

impl Divide {
    /// Moves the left child's rows and pins to the front, the right child's behind them.
    ///
    /// Returns how many pins the children keep. Order is kept within each child, so equal sides
    /// give equal children however they were found.
    pub(super) fn run(
        &mut self,
        rows: &mut [u32],
        pins: &mut [u32],
        side: &[bool],
    ) -> (usize, usize) {
        self.renumber(rows, side);
        self.right_pins.clear();
        let mut end = 0;
        let mut at = 0;
        // Left pins go back into the node's own place, never beyond what was read; they take a
        // detour so that reading and writing stay apart.
        while let Some(edge) = edges(&pins[at..]).next() {
            at += edge.len();
            self.left_pins.clear();
            let begin = self.right_pins.len();
            for &pin in edge {
                let row = local(pin);
                let target = if side[row] { &mut self.right_pins } else { &mut self.left_pins };
                target.push(self.number[row]);
            }
            close_edge(&mut self.left_pins, 0);
            close_edge(&mut self.right_pins, begin);
            let left = self.left_pins.as_slice();
            pins[end..end + left.len()].copy_from_slice(left);
            end += left.len();
        }
        let right_end = end + self.right_pins.len();
        pins[end..right_end].copy_from_slice(&self.right_pins);
        // The first splits are far larger than the rest: their memory goes back.
        if self.right_pins.capacity() > 4 * self.right_pins.len() {
            self.right_pins.shrink_to(2 * self.right_pins.len());
        }
        (end, right_end - end)
    }

    fn renumber(&mut self, rows: &mut [u32], side: &[bool]) {
        self.number.clear();
        self.right_rows.clear();
        let mut left_count = 0;
        for at in 0..rows.len() {
            if side[at] {
                self.number.push(self.right_rows.len() as u32);
                self.right_rows.push(rows[at]);
            } else {
                self.number.push(left_count as u32);
                rows[left_count] = rows[at];
                left_count += 1;
            }
        }
        rows[left_count..].copy_from_slice(&self.right_rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::QueryLog;

    #[test]
    fn children_keep_their_rows_and_queries_in_order() {
        let queries = [&[0, 1, 3][..], &[1, 2], &[0, 2], &[0, 1, 2, 3], &[3, 0]];
        let log = QueryLog::from_queries(4, queries).expect("in range");
        let mut graph = Hypergraph::from_log(log).expect("few rows");
        assert_eq!(graph.rows, [0, 1, 2, 3]);
        let side = [false, true, true, false];
        let (left, right) = Divide::default().run(&mut graph.rows, &mut graph.pins, &side);
        assert_eq!(graph.rows, [0, 3, 1, 2]);
        let named = |from: usize, to: usize, rows: &[u32]| -> Vec<Vec<u32>> {
            let edges = edges(&graph.pins[from..to]);
            edges.map(|edge| edge.iter().map(|&pin| rows[local(pin)]).collect()).collect()
        };
        assert_eq!(named(0, left, &[0, 3]), [[0, 3], [0, 3], [3, 0]]);
        assert_eq!(named(left, left + right, &[1, 2]), [[1, 2], [1, 2]]);
    }
}
