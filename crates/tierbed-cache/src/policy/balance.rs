//! The balance between rows used once and rows used often, told by ghosts of both.
//!
//! Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).

use super::ghosts::Ghosts;

/// Of which ghosts the row is that is about to come in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Incoming {
    /// Of none.
    #[default]
    New,
    /// It left after one use.
    Recent,
    /// It left after several uses.
    Frequent,
}

/// The list of ghosts that left after one use.
pub const RECENT: usize = 0;
/// The list of ghosts that left after several uses.
pub const FREQUENT: usize = 1;

/// Ghosts of two lists, and how long the first should be.
#[derive(Debug, Clone, Default)]
pub struct Balance {
    /// Rows that left after one use, and after several.
    pub ghosts: Ghosts<(), 2>,
    /// Slots the list of rows used once should have.
    pub target: f64,
    /// Of which ghosts the row is that comes in next.
    pub incoming: Incoming,
}

impl Balance {
    /// Bytes per slot: as many ghosts as slots, of both lists together.
    pub const BYTES: usize = Ghosts::<(), 2>::BYTES;

    /// Adapts to another number of slots.
    pub fn resize(&mut self, slot_count: usize) {
        self.ghosts.resize(slot_count);
        self.target = self.target.min(slot_count as f64);
    }

    /// Returns the ghosts of rows used once, and of rows used more often.
    pub fn lens(&self) -> (usize, usize) {
        (self.ghosts.len(RECENT), self.ghosts.len(FREQUENT))
    }

    /// Finds the row of `hash` among the ghosts.
    pub fn identify(&mut self, hash: u64) {
        self.incoming = match self.ghosts.list_of(hash) {
            Some(RECENT) => Incoming::Recent,
            Some(_) => Incoming::Frequent,
            None => Incoming::New,
        };
    }

    /// Moves the target towards the list whose ghost came back.
    pub fn adapt(&mut self, slot_count: usize) {
        let (recent, frequent) = self.lens();
        let (recent, frequent) = (recent as f64, frequent as f64);
        match self.incoming {
            Incoming::Recent => {
                let step = (frequent / recent.max(1.0)).max(1.0);
                self.target = (self.target + step).min(slot_count as f64);
            }
            Incoming::Frequent => {
                let step = (recent / frequent.max(1.0)).max(1.0);
                self.target = (self.target - step).max(0.0);
            }
            Incoming::New => {}
        }
    }

    /// Forgets the ghost of `hash`; tells whether there was one.
    pub fn welcome(&mut self, hash: u64) -> bool {
        self.incoming = Incoming::New;
        self.ghosts.take(hash).is_some()
    }

    /// Remembers the row of `hash`, which left.
    pub fn bury(&mut self, hash: u64, is_often: bool) {
        self.ghosts.push(if is_often { FREQUENT } else { RECENT }, hash, ());
    }
}
