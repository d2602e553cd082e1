//! In which order are slots? Doubly linked lists threaded through the slots of a pool.
//!
//! All lists of a policy share one [`Links`]: a slot is in one list at most, so two numbers per
//! slot are enough for any count of lists.

use super::slots::SlotMap;

/// No slot: the ends of a list.
pub(crate) const NONE: u32 = u32::MAX;

/// The neighbours of a slot in its list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    older: u32,
    newer: u32,
}

impl Default for Link {
    fn default() -> Self {
        Self { older: NONE, newer: NONE }
    }
}

/// The neighbours of every slot.
pub(crate) type Links = SlotMap<Link>;

/// Bytes per slot of [`Links`].
pub(crate) const LINK_BYTES: usize = size_of::<Link>();

/// A list of slots, oldest to newest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, len: 0 }
    }
}

impl List {
    /// Returns the slots in it.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Tells whether no slot is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the oldest slot.
    pub(crate) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Returns the slot after `slot`, towards the newest.
    pub(crate) fn newer(links: &Links, slot: u32) -> Option<u32> {
        let newer = links.get(slot).newer;
        (newer != NONE).then_some(newer)
    }

    /// Adds `slot`, which is in no list, at the newest end.
    pub(crate) fn push_newest(&mut self, links: &mut Links, slot: u32) {
        links.set(slot, Link { older: self.newest, newer: NONE });
        match self.newest {
            NONE => self.oldest = slot,
            newest => links.get_mut(newest).newer = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    /// Adds `slot`, which is in no list, at the oldest end.
    pub(crate) fn push_oldest(&mut self, links: &mut Links, slot: u32) {
        links.set(slot, Link { older: NONE, newer: self.oldest });
        match self.oldest {
            NONE => self.newest = slot,
            oldest => links.get_mut(oldest).older = slot,
        }
        self.oldest = slot;
        self.len += 1;
    }

    /// Adds the slots of `other` after its own.
    pub(crate) fn append(&mut self, links: &mut Links, other: Self) {
        let (Some(_), Some(first)) = (self.oldest(), other.oldest()) else {
            if self.is_empty() {
                *self = other;
            }
            return;
        };
        links.get_mut(self.newest).newer = first;
        links.get_mut(first).older = self.newest;
        self.newest = other.newest;
        self.len += other.len;
    }

    /// Takes `slot` out.
    pub(crate) fn remove(&mut self, links: &mut Links, slot: u32) {
        let Link { older, newer } = links.get(slot);
        match older {
            NONE => self.oldest = newer,
            older => links.get_mut(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => links.get_mut(newer).older = older,
        }
        self.len -= 1;
    }

    /// Moves `slot`, which is in it, to the newest end.
    pub(crate) fn refresh(&mut self, links: &mut Links, slot: u32) {
        if self.newest != slot {
            self.remove(links, slot);
            self.push_newest(links, slot);
        }
    }

    /// Lists the slots from the oldest on.
    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        std::iter::successors(self.oldest(), |&slot| Self::newer(links, slot))
    }
}
