//! The distinct ids of a batch, each with all its positions.

#![expect(clippy::indexing_slicing, reason = "a group has at least one appearance")]

use super::SHARED_ROW;
use crate::bucket::mix;

/// Ids of one batch on their way to rows; kept from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    order: Vec<(u64, u32)>,
    pub(super) groups: Vec<Group>,
    pub(super) pending: Vec<(u32, u32)>,
}

/// One distinct id of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) hash: u64,
    /// Position of its first appearance.
    pub(super) first: u32,
    pub(super) row: u64,
    pub(super) todo: Todo,
}

/// What is to be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Todo {
    Nothing,
    /// Remember that it appeared.
    Wait,
    /// Give it a row.
    Admit,
}

impl Scratch {
    /// Empties it for the next batch.
    pub fn clear(&mut self) {
        self.order.clear();
        self.groups.clear();
    }

    /// Adds the id at `position` of the batch.
    pub fn push(&mut self, id: i64, position: u32) {
        self.order.push((mix(id), position));
    }

    /// Groups the appearances of each id; returns the number of distinct ids.
    pub fn sort(&mut self) -> u64 {
        self.order.sort_unstable();
        self.groups.clear();
        self.groups.extend(self.order.chunk_by(|a, b| a.0 == b.0).map(|same| {
            let (hash, first) = same[0];
            Group { hash, first, row: SHARED_ROW, todo: Todo::Nothing }
        }));
        self.groups.len() as u64
    }

    /// Visits (position, row) of every appearance.
    pub fn for_each(&self, mut visit: impl FnMut(u32, u64)) {
        let mut groups = self.groups.iter();
        for same in self.order.chunk_by(|a, b| a.0 == b.0) {
            let group = groups.next().filter(|group| group.hash == same[0].0);
            let Some(group) = group else { panic!("ids were added after they were sorted") };
            same.iter().for_each(|&(_, position)| visit(position, group.row));
        }
        assert!(groups.next().is_none(), "every group has the ids it was made of");
    }
}
