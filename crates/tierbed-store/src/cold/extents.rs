//! The extent allocator of a table's file: copy on write, with quarantine.
//!
//! An extent holds one base range or pieces of delta runs. What the last commit needs is never
//! overwritten: such an extent, once released, waits in quarantine until the next commit.

#![expect(
    clippy::indexing_slicing,
    reason = "extents that are taken, released or free are below the count"
)]

use tierbed_core::{Error, ErrorKind, Result};

/// The extents of one file.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    /// Most extents the file may have.
    count_max: u32,
    // A stack: the lowest number on top after opening.
    free: Vec<u32>,
    quarantine: Vec<u32>,
    is_committed: Vec<bool>,
}

impl Extents {
    /// Starts with the extents a commit needs; those below the highest that it does not are free.
    pub(crate) fn new(count_max: u32, committed: impl Iterator<Item = u32>) -> Self {
        let mut extents = Self { count_max, ..Self::default() };
        extents.mark_committed(committed);
        let free = (0..).zip(&extents.is_committed).filter(|(_, needed)| !**needed);
        extents.free = free.map(|(at, _)| at).collect();
        extents.free.reverse();
        extents
    }

    /// Takes a free extent, or a new one at the end.
    ///
    /// # Errors
    /// `NoSpace` when the file may not have more.
    pub(crate) fn take(&mut self) -> Result<u32> {
        if let Some(extent) = self.free.pop() {
            return Ok(extent);
        }
        let extent = self.count();
        if extent >= self.count_max {
            return Err(Error::new(ErrorKind::NoSpace, "table file has as many extents as it may")
                .with("extents", extent));
        }
        self.is_committed.push(false);
        Ok(extent)
    }

    /// Gives an extent back, now or after the next commit.
    pub(crate) fn release(&mut self, extent: u32) {
        assert!(extent < self.count(), "extent {extent} was taken from this file");
        debug_assert!(!self.free.contains(&extent), "extent {extent} is released twice");
        if self.is_committed[extent as usize] {
            self.quarantine.push(extent);
        } else {
            self.free.push(extent);
        }
    }

    /// A commit that needs exactly the extents in use now came into force.
    pub(crate) fn commit(&mut self) {
        self.free.append(&mut self.quarantine);
        assert!(self.free.len() <= self.is_committed.len(), "no extent is free twice");
        // Lowest on top: a file that shrank in use is refilled from its start.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.is_committed.iter_mut().for_each(|needed| *needed = true);
        for extent in &self.free {
            self.is_committed[*extent as usize] = false;
        }
    }

    fn mark_committed(&mut self, committed: impl Iterator<Item = u32>) {
        for extent in committed {
            let at = extent as usize;
            if self.is_committed.len() <= at {
                self.is_committed.resize(at + 1, false);
            }
            self.is_committed[at] = true;
        }
    }

    /// Returns how many extents the file has.
    pub(crate) fn count(&self) -> u32 {
        self.is_committed.len() as u32
    }

    /// Returns how many are in use or in quarantine.
    pub(crate) fn used_count(&self) -> u32 {
        self.count() - self.free.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_commit_needs_waits_for_the_next_one() {
        let mut extents = Extents::new(3, [].into_iter());
        let (a, b) = (extents.take().unwrap(), extents.take().unwrap());
        extents.commit();
        extents.release(a);
        assert_eq!((extents.take().unwrap(), extents.used_count()), (2, 3));
        assert_eq!(extents.take().unwrap_err().kind(), ErrorKind::NoSpace);
        extents.commit();
        assert_eq!(extents.take().unwrap(), a);
        extents.release(b);
        assert_eq!(extents.used_count(), 3, "committed: in quarantine");
    }

    #[test]
    fn what_no_commit_needs_is_free_at_once() {
        let mut extents = Extents::new(9, [1, 3].into_iter());
        assert_eq!((extents.count(), extents.used_count()), (4, 2));
        let extent = extents.take().unwrap();
        assert_eq!(extent, 0);
        extents.release(extent);
        assert_eq!(extents.take().unwrap(), extent);
    }
}
