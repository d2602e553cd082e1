//! Extents of one file: copy on write, with quarantine.
//!
//! What the last commit needs is never overwritten: such an extent, once released, waits in
//! quarantine until the next commit.

#![expect(
    clippy::indexing_slicing,
    reason = "extents that are taken, released or free are below the count"
)]

/// Which extents are in use, in quarantine and free.
#[derive(Debug, Default)]
pub struct ExtentPool {
    // A stack: the lowest number on top after opening and after a commit.
    free: Vec<u32>,
    quarantine: Vec<u32>,
    is_committed: Vec<bool>,
}

impl ExtentPool {
    /// Starts with the extents a commit needs; those below the highest that it does not are free.
    pub fn new(committed: impl Iterator<Item = u32>) -> Self {
        let mut is_committed = Vec::new();
        for at in committed.map(|extent| extent as usize) {
            is_committed.resize(is_committed.len().max(at + 1), false);
            is_committed[at] = true;
        }
        let free = (0..).zip(&is_committed).filter(|(_, needed)| !**needed);
        let free = free.map(|(at, _)| at).collect::<Vec<u32>>().into_iter().rev().collect();
        Self { free, quarantine: Vec::new(), is_committed }
    }

    /// Takes a free extent, or a new one at the end; `None` when the file has `count_max`.
    pub fn take(&mut self, count_max: u32) -> Option<u32> {
        let free = self.free.pop();
        debug_assert!(
            free.is_none_or(|free| !self.is_committed[free as usize]),
            "a commit needs it"
        );
        free.or_else(|| {
            let extent = self.count();
            (extent < count_max).then(|| self.is_committed.push(false))?;
            Some(extent)
        })
    }

    /// Gives an extent back, now or after the next commit.
    ///
    /// # Panics
    /// When it was never taken.
    pub fn release(&mut self, extent: u32) {
        assert!(extent < self.count(), "extent {extent} was taken from this file");
        debug_assert!(!self.free.contains(&extent), "extent {extent} is released twice");
        match self.is_committed[extent as usize] {
            true => self.quarantine.push(extent),
            false => self.free.push(extent),
        }
        let unused = self.free.len() + self.quarantine.len();
        assert!(unused <= self.is_committed.len(), "more extents are unused than there are");
    }

    /// A commit that needs exactly the extents in use now came into force.
    pub fn commit(&mut self) {
        self.free.append(&mut self.quarantine);
        assert!(self.free.len() <= self.is_committed.len(), "no extent is free twice");
        // Lowest on top: a file that shrank in use is refilled from its start.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.is_committed.fill(true);
        for extent in &self.free {
            self.is_committed[*extent as usize] = false;
        }
    }

    /// Returns how many extents the file has.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.is_committed.len() as u32
    }

    /// Returns how many are in use or in quarantine.
    #[must_use]
    pub fn used_count(&self) -> u32 {
        self.count() - self.free.len() as u32
    }

    /// Returns how many only the last commit needs.
    #[must_use]
    pub fn quarantined_count(&self) -> u32 {
        self.quarantine.len() as u32
    }

    /// Tells whether the last commit needs `extent`.
    #[must_use]
    pub fn is_committed(&self, extent: u32) -> bool {
        self.is_committed.get(extent as usize) == Some(&true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_commit_needs_waits_for_the_next_one() {
        let mut extents = ExtentPool::new([].into_iter());
        let (a, b) = (extents.take(3).unwrap(), extents.take(3).unwrap());
        extents.commit();
        extents.release(a);
        assert_eq!((extents.take(3), extents.used_count()), (Some(2), 3));
        assert_eq!((extents.take(3), extents.quarantined_count()), (None, 1));
        extents.commit();
        assert_eq!(extents.take(3), Some(a));
        extents.release(b);
        assert_eq!(extents.used_count(), 3, "committed: in quarantine");
    }

    #[test]
    fn what_no_commit_needs_is_free_at_once() {
        let mut extents = ExtentPool::new([1, 3].into_iter());
        assert_eq!((extents.count(), extents.used_count()), (4, 2));
        let extent = extents.take(9).unwrap();
        assert_eq!(extent, 0);
        extents.release(extent);
        assert_eq!(extents.take(9), Some(extent));
    }
}
