//! What does a policy remember of each slot? One small value per slot, slab by slab.
//!
//! Slabs join and leave a pool, so values live in a block per slab and take exactly the bytes
//! that [`bytes_per_slot`](super::EvictionPolicy::bytes_per_slot) says.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made by the tier; one outside its slab is a programmer error"
)]

use super::list::{Links, LINK_BYTES};
use super::SLOT_BITS;

/// A value per slot of the slabs that are in the pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct SlotMap<T> {
    slabs: Vec<Option<Box<[T]>>>,
    slot_count: usize,
}

impl<T: Copy + Default> SlotMap<T> {
    /// Bytes per slab number, whether or not the slab is in the pool.
    pub(crate) const BYTES_PER_SLAB: usize = size_of::<Option<Box<[T]>>>();

    /// Adds default values for the slots of `slab`.
    pub(crate) fn add_slab(&mut self, slab: u32, slot_count: u32) {
        let at = slab as usize;
        if self.slabs.len() <= at {
            self.slabs.reserve_exact(at + 1 - self.slabs.len());
            self.slabs.resize_with(at + 1, || None);
        }
        self.slabs[at] = Some(vec![T::default(); slot_count as usize].into_boxed_slice());
        self.slot_count += slot_count as usize;
    }

    /// Forgets the values of `slab`.
    pub(crate) fn drop_slab(&mut self, slab: u32) {
        if let Some(values) = self.slabs[slab as usize].take() {
            self.slot_count -= values.len();
        }
    }

    /// Returns the slots of all slabs together.
    pub(crate) fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Returns the value of `slot`.
    pub(crate) fn get(&self, slot: u32) -> T {
        self.slab(slot)[at(slot)]
    }

    /// Changes the value of `slot`.
    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut T {
        match self.slabs[(slot >> SLOT_BITS) as usize].as_mut() {
            Some(values) => &mut values[at(slot)],
            None => panic!("slot {slot} is in no slab of this pool"),
        }
    }

    /// Overwrites the value of `slot`.
    pub(crate) fn set(&mut self, slot: u32, value: T) {
        *self.get_mut(slot) = value;
    }

    fn slab(&self, slot: u32) -> &[T] {
        match self.slabs[(slot >> SLOT_BITS) as usize].as_ref() {
            Some(values) => values,
            None => panic!("slot {slot} is in no slab of this pool"),
        }
    }
}

/// Position of a slot in its slab.
fn at(slot: u32) -> usize {
    (slot & ((1 << SLOT_BITS) - 1)) as usize
}

/// What list-based policies keep: the links of every slot and a state of theirs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots<T> {
    pub(crate) links: Links,
    pub(crate) states: SlotMap<T>,
}

impl<T: Copy + Default> Slots<T> {
    /// Bytes per slot.
    pub(crate) const BYTES_PER_SLOT: usize = LINK_BYTES + size_of::<T>();
    /// Bytes per slab number.
    pub(crate) const BYTES_PER_SLAB: usize = Links::BYTES_PER_SLAB + SlotMap::<T>::BYTES_PER_SLAB;

    /// Adds the empty slots of `slab`.
    pub(crate) fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.links.add_slab(slab, slot_count);
        self.states.add_slab(slab, slot_count);
    }

    /// Forgets `slab`.
    pub(crate) fn drop_slab(&mut self, slab: u32) {
        self.links.drop_slab(slab);
        self.states.drop_slab(slab);
    }

    /// Returns the slots there are, occupied or not.
    pub(crate) fn count(&self) -> usize {
        self.links.slot_count()
    }
}

/// The methods of a policy about slabs: its slots, each with a `$state`, are in the field
/// `slots`, and `$more` bytes per slot are elsewhere.
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
pub(crate) use keeps_slots;
