//! Discrete-event simulation of flash dies and channels.
//!
//! ```text
//! arrive ─▶ queue of the die ─▶ cells to buffer ─▶ queue of the channel ─▶ sent ─▶ die is free
//! ```
//!
//! A die keeps its page in the buffer until the piece has been sent. Events of one instant
//! happen in the order in which they were made, so equal calls give equal times.
#![expect(clippy::indexing_slicing, reason = "dies and channels are counted when they are made")]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::SsdModel;

/// A part of a flash page that is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// The call it belongs to.
    pub(super) ticket: u64,
    pub(super) channel: u32,
    pub(super) die: u32,
    pub(super) bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Arrived,
    InBuffer,
    Sent,
}

#[derive(Debug, Default)]
struct Server {
    is_busy: bool,
    waiting: VecDeque<usize>,
}

/// All flash of a device, at one instant of simulated time.
#[derive(Debug)]
pub(super) struct Flash {
    model: SsdModel,
    now_ns: u64,
    /// Time, number of the event, step and piece.
    events: BinaryHeap<Reverse<(u64, u64, Step, usize)>>,
    event_count: u64,
    /// Pieces on their way; free places are reused.
    pieces: Vec<Piece>,
    free: Vec<usize>,
    dies: Vec<Server>,
    channels: Vec<Server>,
}

impl Flash {
    pub(super) fn new(model: SsdModel) -> Self {
        let die_count = (model.channels * model.dies_per_channel) as usize;
        let servers = |count: usize| std::iter::repeat_with(Server::default).take(count).collect();
        Self {
            model,
            now_ns: 0,
            events: BinaryHeap::new(),
            event_count: 0,
            pieces: Vec::new(),
            free: Vec::new(),
            dies: servers(die_count),
            channels: servers(model.channels as usize),
        }
    }

    /// Returns the time of the next event.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.events.peek().map(|Reverse((time_ns, ..))| *time_ns)
    }

    /// Lets `piece` arrive at `at_ns`, which is not before now.
    pub(super) fn add(&mut self, at_ns: u64, piece: Piece) {
        let at = match self.free.pop() {
            Some(at) => {
                self.pieces[at] = piece;
                at
            }
            None => {
                self.pieces.push(piece);
                self.pieces.len() - 1
            }
        };
        self.push(at_ns.max(self.now_ns), Step::Arrived, at);
    }

    /// Goes to the next event; a piece that has been sent comes back with its time.
    pub(super) fn step(&mut self) -> Option<Option<(Piece, u64)>> {
        let Reverse((time_ns, _, step, at)) = self.events.pop()?;
        self.now_ns = time_ns;
        let piece = self.pieces[at];
        match step {
            Step::Arrived => {
                let die = self.die_of(piece);
                self.dies[die].waiting.push_back(at);
                self.start_die(piece);
                Some(None)
            }
            Step::InBuffer => {
                self.channels[piece.channel as usize].waiting.push_back(at);
                self.start_channel(piece.channel as usize);
                Some(None)
            }
            Step::Sent => {
                let die = self.die_of(piece);
                self.dies[die].is_busy = false;
                self.channels[piece.channel as usize].is_busy = false;
                self.free.push(at);
                self.start_die(piece);
                self.start_channel(piece.channel as usize);
                Some(Some((piece, time_ns)))
            }
        }
    }

    /// Begins the next read of the die of `piece`.
    fn start_die(&mut self, piece: Piece) {
        let die = self.die_of(piece);
        let server = &mut self.dies[die];
        if server.is_busy {
            return;
        }
        if let Some(at) = server.waiting.pop_front() {
            server.is_busy = true;
            self.push(self.now_ns + self.model.read_ns, Step::InBuffer, at);
        }
    }

    fn start_channel(&mut self, channel: usize) {
        let server = &mut self.channels[channel];
        if server.is_busy {
            return;
        }
        if let Some(at) = server.waiting.pop_front() {
            server.is_busy = true;
            let sent_ns = self.now_ns + self.model.channel_ns(self.pieces[at].bytes);
            self.push(sent_ns, Step::Sent, at);
        }
    }

    fn die_of(&self, piece: Piece) -> usize {
        (piece.channel * self.model.dies_per_channel + piece.die) as usize
    }

    fn push(&mut self, time_ns: u64, step: Step, at: usize) {
        self.events.push(Reverse((time_ns, self.event_count, step, at)));
        self.event_count += 1;
    }
}
