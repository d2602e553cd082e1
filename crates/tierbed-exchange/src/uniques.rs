//! Distinct ids in the order in which they first come.
//!
//! Who asks for rows and who sends them number them alike, so that no list of them is sent.

use hashbrown::HashMap;

/// Numbers of ids, from 0.
#[derive(Debug, Default)]
pub(crate) struct Uniques {
    numbers: HashMap<i64, u32>,
}

impl Uniques {
    /// Returns the number of `id`, and whether it is a new one.
    pub(crate) fn number(&mut self, id: i64) -> (u32, bool) {
        let next = self.numbers.len() as u32;
        let number = *self.numbers.entry(id).or_insert(next);
        (number, number == next)
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> usize {
        self.numbers.len()
    }
}
