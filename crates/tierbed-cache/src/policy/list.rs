//! Doubly linked lists threaded through the slots of a pool.
//!
//! All lists of a policy share one [`Links`]: a slot is in one list at most, so two numbers per
//! slot are enough for any count of lists. With the policy's state they fill one word, so that a
//! use of a row looks at one cache line:
//!
//! ```text
//! bit 63 ........ 40 39 ........ 16 15 ....... 0
//!     newer          older          state
//! ```

use super::slots::SlotMap;

/// No slot: the ends of a list. Slots are numbered below.
pub(crate) const NONE: u32 = (1 << LINK_BITS) - 1;

/// Bits of a neighbour, and where they are.
const LINK_BITS: u32 = 24;
const OLDER_AT: u32 = 16;
const NEWER_AT: u32 = OLDER_AT + LINK_BITS;
const LINK_MASK: u64 = NONE as u64;

/// The neighbours of a slot in its list, and 16 bits of state.
#[derive(Debug, Clone, Copy)]
pub struct Node(u64);

impl Default for Node {
    fn default() -> Self {
        Self((LINK_MASK << NEWER_AT) | (LINK_MASK << OLDER_AT))
    }
}

impl Node {
    /// Returns the state.
    #[inline]
    pub fn state(self) -> u16 {
        self.0 as u16
    }

    /// Overwrites the state.
    #[inline]
    pub fn set_state(&mut self, state: u16) {
        self.0 = (self.0 & !0xFFFF) | u64::from(state);
    }

    #[inline]
    fn older(self) -> u32 {
        ((self.0 >> OLDER_AT) & LINK_MASK) as u32
    }

    #[inline]
    fn newer(self) -> u32 {
        (self.0 >> NEWER_AT) as u32
    }

    #[inline]
    fn set_older(&mut self, slot: u32) {
        self.0 = (self.0 & !(LINK_MASK << OLDER_AT)) | (u64::from(slot) << OLDER_AT);
    }

    #[inline]
    fn set_newer(&mut self, slot: u32) {
        self.0 = (self.0 & !(LINK_MASK << NEWER_AT)) | (u64::from(slot) << NEWER_AT);
    }

    #[inline]
    fn set_links(&mut self, older: u32, newer: u32) {
        let links = (u64::from(newer) << NEWER_AT) | (u64::from(older) << OLDER_AT);
        self.0 = links | u64::from(self.state());
    }
}

/// The node of every slot.
pub type Links = SlotMap<Node>;

/// A list of slots, oldest to newest.
#[derive(Debug, Clone, Copy)]
pub struct List {
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
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Tells whether no slot is in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the oldest slot.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Returns the slot after `slot`, towards the newest.
    pub fn newer(links: &Links, slot: u32) -> Option<u32> {
        let newer = links.get(slot).newer();
        (newer != NONE).then_some(newer)
    }

    /// Adds `slot`, which is in no list, at the newest end.
    pub fn push_newest(&mut self, links: &mut Links, slot: u32) {
        links.get_mut(slot).set_links(self.newest, NONE);
        match self.newest {
            NONE => self.oldest = slot,
            newest => links.get_mut(newest).set_newer(slot),
        }
        self.newest = slot;
        self.len += 1;
    }

    /// Adds `slot`, which is in no list, at the oldest end.
    pub fn push_oldest(&mut self, links: &mut Links, slot: u32) {
        links.get_mut(slot).set_links(NONE, self.oldest);
        match self.oldest {
            NONE => self.newest = slot,
            oldest => links.get_mut(oldest).set_older(slot),
        }
        self.oldest = slot;
        self.len += 1;
    }

    /// Takes `slot` out.
    pub fn remove(&mut self, links: &mut Links, slot: u32) {
        let node = links.get(slot);
        let (older, newer) = (node.older(), node.newer());
        match older {
            NONE => self.oldest = newer,
            older => links.get_mut(older).set_newer(newer),
        }
        match newer {
            NONE => self.newest = older,
            newer => links.get_mut(newer).set_older(older),
        }
        self.len -= 1;
    }

    /// Moves `slot`, which is in it, to the newest end.
    pub fn refresh(&mut self, links: &mut Links, slot: u32) {
        if self.newest != slot {
            self.remove(links, slot);
            self.push_newest(links, slot);
        }
    }

    /// Lists the slots from the oldest on.
    pub fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        std::iter::successors(self.oldest(), |&slot| Self::newer(links, slot))
    }
}
