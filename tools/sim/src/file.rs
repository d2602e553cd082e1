//! One simulated file: what is seen, what is durable, and what lies between.

use std::collections::BTreeSet;
use std::ops::Range;

use tierbed_core::env::SplitMix64;
use tierbed_io::{PAGE_BYTES, SECTOR_BYTES};

/// Something that happened to a file since its last sync.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Write { at: usize, bytes: Vec<u8> },
    SetLen(usize),
}

impl Change {
    fn apply(&self, target: &mut Vec<u8>) {
        match self {
            Self::Write { at, bytes } => put(target, *at, bytes),
            Self::SetLen(len_bytes) => target.resize(*len_bytes, 0),
        }
    }

    /// Applies as much as luck leaves of it: all, nothing, or single sectors.
    fn apply_by_luck(&self, target: &mut Vec<u8>, rng: &mut SplitMix64) {
        match (rng.below(3), self) {
            (0, _) => self.apply(target),
            (1, Self::Write { at, bytes }) => {
                for (at, sector) in torn(*at, bytes, rng) {
                    put(target, at, sector);
                }
            }
            _ => {}
        }
    }
}

/// Writes `bytes` at `at`, filling a gap before them with zeros.
fn put(target: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if bytes.is_empty() {
        return;
    }
    if target.len() < end {
        target.resize(end, 0);
    }
    if let Some(range) = target.get_mut(at..end) {
        range.copy_from_slice(bytes);
    }
}

/// Returns the sectors of a write that luck keeps, with their places.
pub(crate) fn torn<'a>(at: usize, bytes: &'a [u8], rng: &mut SplitMix64) -> Vec<(usize, &'a [u8])> {
    let (mut rest, mut at, mut kept) = (bytes, at, Vec::new());
    while !rest.is_empty() {
        // Sectors lie on the disk's grid, not on the write's.
        let to_border = SECTOR_BYTES - at % SECTOR_BYTES;
        let (sector, after) = rest.split_at(to_border.min(rest.len()));
        if rng.below(2) == 0 {
            kept.push((at, sector));
        }
        at += sector.len();
        rest = after;
    }
    kept
}

/// The contents of a file; names point to it, devices hold it open.
#[derive(Debug, Clone, Default)]
pub(crate) struct SimFile {
    seen: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Change>,
    /// Pages that occupy space; the others are holes.
    pages: BTreeSet<usize>,
}

impl SimFile {
    /// Builds a file that holds `bytes`, durably.
    fn settled(bytes: Vec<u8>) -> Self {
        let pages = (0..bytes.len().div_ceil(PAGE_BYTES)).collect();
        Self { seen: bytes.clone(), durable: bytes, unsynced: Vec::new(), pages }
    }

    pub(crate) fn seen(&self) -> &[u8] {
        &self.seen
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }

    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        self.pages.extend(pages_of(at..at + bytes.len()));
        self.change(Change::Write { at, bytes: bytes.to_vec() });
    }

    pub(crate) fn set_len(&mut self, len_bytes: usize) {
        let _beyond = self.pages.split_off(&len_bytes.div_ceil(PAGE_BYTES));
        self.change(Change::SetLen(len_bytes));
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.seen);
        self.unsynced.push(change);
    }

    /// Returns how much of a write at `at` fits into `free_bytes`, page by page.
    pub(crate) fn fitting_bytes(&self, at: usize, len_bytes: usize, free_bytes: u64) -> usize {
        let mut free_pages = free_bytes / PAGE_BYTES as u64;
        for page in pages_of(at..at + len_bytes) {
            if self.pages.contains(&page) {
                continue;
            }
            if free_pages == 0 {
                return (page * PAGE_BYTES).saturating_sub(at);
            }
            free_pages -= 1;
        }
        len_bytes
    }

    pub(crate) fn sync(&mut self) {
        for change in self.unsynced.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// What a failed sync does: luck settles the changes, and nothing remembers what was lost.
    pub(crate) fn fail_sync(&mut self, rng: &mut SplitMix64) {
        self.durable = self.after_power_loss(rng);
        self.unsynced.clear();
        if rng.below(2) == 0 {
            self.seen.clone_from(&self.durable);
        }
    }

    /// Returns the bytes after power loss.
    fn after_power_loss(&self, rng: &mut SplitMix64) -> Vec<u8> {
        let mut image = self.durable.clone();
        for change in &self.unsynced {
            change.apply_by_luck(&mut image, rng);
        }
        image
    }

    /// Returns the file as it is found after power loss; without luck only synced data is.
    pub(crate) fn crashed(&self, rng: Option<&mut SplitMix64>) -> Self {
        Self::settled(match rng {
            Some(rng) => self.after_power_loss(rng),
            None => self.durable.clone(),
        })
    }
}

fn pages_of(range: Range<usize>) -> Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)
}
