//! Clock with adaptive replacement (CAR): two clocks, rows used once and rows used often, balanced
//! by the ghosts of both as in [ARC](super::balance).
//!
//! What the hand asks of a row is a rule of its own, so that the group-aware form is the same
//! code with another rule.
//!
//! Source: Bansal and Modha, "CAR: Clock with Adaptive Replacement" (FAST 2004).

use super::balance::{Balance, Incoming, FREQUENT, RECENT};
use super::list::List;
use super::slots::{SlotState, Slots};
use crate::keeps_slots;

use super::{order_of_leaving, Arrival, EvictionPolicy, Group};

/// What a row's mark becomes; a row of mark 0 under the hand leaves.
pub trait MarkRule: Send + std::fmt::Debug + Clone + Default + 'static {
    /// The policy's name.
    const NAME: &'static str;

    /// Returns the mark of a row that was a hit in a group of `hit_count` hits.
    fn touched(mark: u8, hit_count: u32) -> u8;

    /// Returns the mark of a row that the hand passes for a row whose group has `hit_count` hits.
    fn passed(mark: u8, hit_count: u32) -> u8;
}

/// A mark, and whether the row is in the clock of rows used often.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    mark: u8,
    is_often: bool,
}

impl SlotState for State {
    fn to_bits(self) -> u16 {
        u16::from(self.mark) | (u16::from(self.is_often) << 8)
    }

    fn from_bits(bits: u16) -> Self {
        Self { mark: bits as u8, is_often: bits >> 8 != 0 }
    }
}

/// Two clocks with ghosts, and a rule for marks.
#[derive(Debug, Clone, Default)]
pub struct TwoClocks<R> {
    slots: Slots<State>,
    once: List,
    often: List,
    balance: Balance,
    /// Hits of the group that is being dealt with.
    hit_count: u32,
    rule: std::marker::PhantomData<R>,
}

impl<R: MarkRule> EvictionPolicy for TwoClocks<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    keeps_slots!(State, Balance::BYTES);

    fn slots_changed(&mut self) {
        self.balance.resize(self.slots.count());
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        self.hit_count = group.hit_count;
    }

    fn touch(&mut self, slot: u32) {
        let hit_count = self.hit_count;
        let state = self.slots.state(slot);
        self.slots.set_state(slot, State { mark: R::touched(state.mark, hit_count), ..state });
    }

    fn arrive(&mut self, hash: u64, score: u16, _is_full: bool) -> Arrival {
        self.balance.identify(hash);
        Arrival::admitted(score)
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        self.balance.adapt(self.slots.count());
        let is_often = self.balance.welcome(hash);
        self.slots.set_state(slot, State { mark: 0, is_often });
        let list = if is_often { &mut self.often } else { &mut self.once };
        list.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let wanted = (self.balance.target as usize).max(1);
            let from_once = self.once.len() >= wanted || self.often.is_empty();
            let from_once = from_once && !self.once.is_empty();
            let list = if from_once { &mut self.once } else { &mut self.often };
            let slot = list.oldest()?;
            let mark = self.slots.state(slot).mark;
            if mark == 0 {
                return Some(slot);
            }
            list.remove(&mut self.slots.links, slot);
            self.often.push_newest(&mut self.slots.links, slot);
            let mark = R::passed(mark, self.hit_count);
            self.slots.set_state(slot, State { mark, is_often: true });
        }
    }

    fn evict(&mut self, slot: u32, hash: u64) -> u16 {
        let is_often = self.slots.state(slot).is_often;
        self.remove(slot);
        let (slot_count, balance) = (self.slots.count(), &mut self.balance);
        balance.bury(hash, is_often);
        if balance.incoming == Incoming::New {
            let (recent, frequent) = balance.lens();
            if self.once.len() + recent >= slot_count && recent > 0 {
                balance.ghosts.pop_oldest(RECENT);
            } else if self.once.len() + self.often.len() + recent + frequent >= 2 * slot_count {
                balance.ghosts.pop_oldest(FREQUENT);
            }
        }
        0
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let is_often = self.slots.state(slot).is_often;
        let list = if is_often { &mut self.often } else { &mut self.once };
        list.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bit: the rule of CAR.
    #[derive(Debug, Clone, Default)]
    struct OneBit;

    impl MarkRule for OneBit {
        const NAME: &'static str = "one_bit";

        fn touched(_mark: u8, _hit_count: u32) -> u8 {
            1
        }

        fn passed(_mark: u8, _hit_count: u32) -> u8 {
            0
        }
    }

    #[test]
    fn a_row_asked_for_again_moves_to_the_second_clock() {
        let mut car = TwoClocks::<OneBit>::default();
        car.add_slab(0, 3);
        (0..3).for_each(|slot| car.insert(slot, u64::from(slot), 0));
        car.touch(0);
        assert_eq!(car.victim(), Some(1));
        let list = |list: &List| list.iter(&car.slots.links).collect::<Vec<_>>();
        assert_eq!((list(&car.once), list(&car.often)), (vec![1, 2], vec![0]));
        car.evict(1, 1);
        assert_eq!(car.balance.ghosts.list_of(1), Some(RECENT));
        // The ghost comes back as a row used often, and the first clock may be longer.
        car.arrive(1, 0, false);
        car.insert(1, 1, 0);
        assert_eq!(car.balance.target, 1.0);
        assert_eq!(car.often.iter(&car.slots.links).collect::<Vec<_>>(), [0, 1]);
    }
}
