//! Per-slot policy state: one small value per slot, slab by slab.
//!
//! Slabs join and leave a pool, so values live in a block per slab and take exactly the bytes
//! that [`bytes_per_slot`](super::EvictionPolicy::bytes_per_slot) says. For most policies those
//! are eight: the neighbours of the slot in its list and 16 bits of state, a [`Node`].
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made by the tier; one outside its slab is a programmer error"
)]

use std::marker::PhantomData;

use super::list::{Links, Node};
use super::SLOT_BITS;

/// A value per slot of the slabs that are in the pool.
#[derive(Debug, Clone, Default)]
pub struct SlotMap<T> {
    /// The block of each slab; an empty one for slabs of other pools.
    slabs: Vec<Box<[T]>>,
    slot_count: usize,
}

impl<T: Copy + Default> SlotMap<T> {
    /// Bytes per slab number, whether or not the slab is in the pool.
    pub const BYTES_PER_SLAB: usize = size_of::<Box<[T]>>();

    /// Adds default values for the slots of `slab`.
    pub fn add_slab(&mut self, slab: u32, slot_count: u32) {
        let at = slab as usize;
        if self.slabs.len() <= at {
            self.slabs.reserve_exact(at + 1 - self.slabs.len());
            self.slabs.resize_with(at + 1, Box::default);
        }
        self.slabs[at] = vec![T::default(); slot_count as usize].into_boxed_slice();
        self.slot_count += slot_count as usize;
    }

    /// Forgets the values of `slab`.
    pub fn drop_slab(&mut self, slab: u32) {
        self.slot_count -= std::mem::take(&mut self.slabs[slab as usize]).len();
    }

    /// Returns the slots of all slabs together.
    pub fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Returns a number above those of all slots.
    pub fn slots_end(&self) -> u32 {
        (self.slabs.len() as u32) << SLOT_BITS
    }

    /// Returns the first slot of each slab in the pool, with the values of all its slots.
    pub fn blocks(&self) -> impl Iterator<Item = (u32, &[T])> {
        let blocks = self.slabs.iter().enumerate().filter(|(_, block)| !block.is_empty());
        blocks.map(|(slab, block)| ((slab as u32) << SLOT_BITS, &**block))
    }

    /// Returns the first slot of each slab in the pool, with the values of all its slots.
    pub fn blocks_mut(&mut self) -> impl Iterator<Item = (u32, &mut [T])> {
        let blocks = self.slabs.iter_mut().enumerate().filter(|(_, block)| !block.is_empty());
        blocks.map(|(slab, block)| ((slab as u32) << SLOT_BITS, &mut **block))
    }

    /// Returns the value of `slot`.
    #[inline]
    pub fn get(&self, slot: u32) -> T {
        self.slabs[(slot >> SLOT_BITS) as usize][at(slot)]
    }

    /// Changes the value of `slot`.
    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slabs[(slot >> SLOT_BITS) as usize][at(slot)]
    }

    /// Overwrites the value of `slot`.
    #[inline]
    pub fn set(&mut self, slot: u32, value: T) {
        *self.get_mut(slot) = value;
    }
}

/// Position of a slot in its slab.
fn at(slot: u32) -> usize {
    (slot & ((1 << SLOT_BITS) - 1)) as usize
}

/// What a policy knows of a slot, in the 16 bits that a [`Node`] has for it.
pub trait SlotState: Copy + Default {
    /// Packs it.
    fn to_bits(self) -> u16;

    /// Unpacks what was packed.
    fn from_bits(bits: u16) -> Self;
}

impl SlotState for () {
    fn to_bits(self) -> u16 {
        0
    }

    fn from_bits(_bits: u16) -> Self {}
}

impl SlotState for bool {
    fn to_bits(self) -> u16 {
        u16::from(self)
    }

    fn from_bits(bits: u16) -> Self {
        bits != 0
    }
}

impl SlotState for u16 {
    fn to_bits(self) -> u16 {
        self
    }

    fn from_bits(bits: u16) -> Self {
        bits
    }
}

/// What list-based policies keep: a [`Node`] per slot, with the policy's state in it.
#[derive(Debug, Clone, Default)]
pub struct Slots<T> {
    /// The neighbours and the state of each slot.
    pub links: Links,
    state: PhantomData<T>,
}

impl<T: SlotState> Slots<T> {
    /// Bytes per slot.
    pub const BYTES_PER_SLOT: usize = size_of::<Node>();
    /// Bytes per slab number.
    pub const BYTES_PER_SLAB: usize = Links::BYTES_PER_SLAB;

    /// Adds the empty slots of `slab`.
    pub fn add_slab(&mut self, slab: u32, slot_count: u32) {
        assert!(slab < super::SLABS_MAX, "slab {slab}: links have 24 bits");
        self.links.add_slab(slab, slot_count);
    }

    /// Forgets `slab`.
    pub fn drop_slab(&mut self, slab: u32) {
        self.links.drop_slab(slab);
    }

    /// Returns the slots there are, occupied or not.
    pub fn count(&self) -> usize {
        self.links.slot_count()
    }

    /// Returns the state of `slot`.
    #[inline]
    pub fn state(&self, slot: u32) -> T {
        T::from_bits(self.links.get(slot).state())
    }

    /// Overwrites the state of `slot`.
    #[inline]
    pub fn set_state(&mut self, slot: u32, state: T) {
        self.links.get_mut(slot).set_state(state.to_bits());
    }
}

/// The methods of a policy about slabs: its slots, each with a `$state`, are in the field
/// `slots`, and `$more` bytes per slot are elsewhere.
#[macro_export]
macro_rules! keeps_slots {
    ($state:ty, $more:expr) => {
        fn bytes_per_slot(&self) -> usize {
            Slots::<$state>::BYTES_PER_SLOT + $more
        }

        fn bytes_per_slab(&self) -> usize {
            Slots::<$state>::BYTES_PER_SLAB
        }

        fn add_slab(&mut self, slab: u32, slot_count: u32) {
            self.slots.add_slab(slab, slot_count);
            self.slots_changed();
        }

        fn drop_slab(&mut self, slab: u32) {
            self.slots.drop_slab(slab);
            self.slots_changed();
        }
    };
}
