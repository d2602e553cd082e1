//! Nodes: ranks that share memory.
//!
//! Ranks of a node write each other's memory. Between nodes, rank `l` of a node exchanges messages
//! with the ranks `l` of the other nodes only (its *rail*), for all ranks of its node. So a row
//! crosses the network once for a node, however many of its ranks asked for it.

use std::ops::Range;

use tierbed_core::{Error, Result};

/// Which ranks share memory, and the node of one rank. Nodes have equally many ranks, whose numbers
/// follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nodes {
    node: usize,
    node_count: usize,
    ranks_each: usize,
}

impl Nodes {
    /// Divides the ranks into `node_count` nodes of `ranks_each`; `rank` is one of them.
    ///
    /// # Errors
    /// `Invalid` when there is no such rank.
    pub fn new(rank: usize, node_count: usize, ranks_each: usize) -> Result<Self> {
        if rank >= node_count.saturating_mul(ranks_each) {
            return Err(Error::invalid("no such rank")
                .with("rank", rank)
                .with("nodes", node_count)
                .with("ranks_each", ranks_each));
        }
        Ok(Self { node: rank / ranks_each, node_count, ranks_each })
    }

    /// Puts all ranks on one node.
    #[must_use]
    pub fn one(rank_count: usize) -> Self {
        Self { node: 0, node_count: 1, ranks_each: rank_count }
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn count(self) -> usize {
        self.node_count
    }

    /// Returns the node of this rank.
    #[must_use]
    pub fn own(self) -> usize {
        self.node
    }

    /// Returns the ranks of each node.
    #[must_use]
    pub fn ranks_each(self) -> usize {
        self.ranks_each
    }

    /// Returns the number of ranks of all nodes.
    #[must_use]
    pub fn rank_count(self) -> usize {
        self.node_count * self.ranks_each
    }

    /// Returns the ranks of `node`.
    #[must_use]
    pub fn ranks_of(self, node: usize) -> Range<usize> {
        node * self.ranks_each..(node + 1) * self.ranks_each
    }

    /// Returns the first rank of this node.
    pub(crate) fn first_rank(self) -> usize {
        self.node * self.ranks_each
    }

    /// Returns the number of `rank` on its node.
    pub(crate) fn local(self, rank: usize) -> usize {
        rank % self.ranks_each
    }

    /// Returns whether `rank` is on this node.
    pub(crate) fn is_here(self, rank: usize) -> bool {
        rank / self.ranks_each == self.node
    }

    /// Returns the other nodes.
    pub(crate) fn others(self) -> impl Iterator<Item = usize> {
        (0..self.node_count).filter(move |&node| node != self.node)
    }

    /// Returns the place of `node` among the [`others`](Self::others).
    pub(crate) fn place_of(self, node: usize) -> usize {
        assert!(node != self.node, "a node sends nothing to itself");
        node - usize::from(node > self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_node_by_node() {
        let nodes = Nodes::new(3, 3, 2).unwrap();
        assert_eq!((nodes.own(), nodes.count(), nodes.rank_count()), (1, 3, 6));
        assert_eq!((nodes.first_rank(), nodes.local(3), nodes.ranks_of(2)), (2, 1, 4..6));
        assert!(nodes.is_here(2) && !nodes.is_here(4));
        assert_eq!(nodes.others().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(nodes.others().map(|node| nodes.place_of(node)).collect::<Vec<_>>(), [0, 1]);
        assert!(Nodes::new(6, 3, 2).is_err());
        assert_eq!(Nodes::one(4), Nodes::new(2, 1, 4).unwrap());
    }
}
