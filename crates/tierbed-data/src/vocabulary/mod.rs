//! Vocabularies: tokens to row ids.
//!
//! A [`VocabularyBuilder`] writes a file; a [`Vocabulary`] answers from it. Ids are dense within
//! a feature: 0 for missing, rare and unknown tokens, then 1, 2, 3 ... by first appearance.
//!
//! Memory stays within the budget given: features are taken smallest first into resident hash
//! tables as long as they fit, the others are searched in the mapped file. Fingerprints are
//! uniform 64-bit values, so interpolation finds one of `n` in about `log log n` probes.
//!
//! Source: Perl, Itai, Avni, "Interpolation search - a log log N search" (CACM 1978).

#![expect(
    clippy::indexing_slicing,
    reason = "sections lie inside the file, which is checked when it is opened"
)]

mod builder;
mod format;
mod mapping;
mod sort;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::Path;

use tierbed_core::{Error, Result};

pub use builder::{
    FeatureReport, VocabularyBuilder, VocabularyOptions, VocabularyReport, MEMORY_BUDGET_BYTES_MIN,
};
pub use format::{ENTRY_BYTES, HEADER_BYTES, MAGIC, SECTION_ALIGN_BYTES, VERSION};

use crate::fingerprint::{fingerprint, MISSING};
use format::{read_section, Directory, FeatureEntry};
use mapping::Mapping;

/// Interpolation steps before the search falls back to halving: 4 suffice for uniform values.
const INTERPOLATION_STEP_MAX: usize = 8;

/// Maps tokens to row ids. Read-only, cheap to share between threads by reference.
#[derive(Debug)]
pub struct Vocabulary {
    directory: Directory,
    lookups: Vec<Lookup>,
    mapping: Mapping,
}

#[derive(Debug)]
enum Lookup {
    Resident(ResidentTable),
    Mapped { fingerprints_at: usize, ids_at: usize, token_count: usize },
}

impl Vocabulary {
    /// Opens the file at `path` and checks every checksum. Hash tables may take
    /// `resident_budget_bytes`; 0 keeps everything in the file.
    ///
    /// # Errors
    /// `Invalid` for a file of another format or version; `Corruption` for a damaged one; `Io`.
    pub fn open(path: &Path, resident_budget_bytes: u64) -> Result<Self> {
        let opened = Self::open_file(path, resident_budget_bytes);
        opened.map_err(|error| error.with("path", path.display()))
    }

    fn open_file(path: &Path, resident_budget_bytes: u64) -> Result<Self> {
        let unreadable = |error| Error::os("cannot open vocabulary file", error);
        let mut file = File::open(path).map_err(unreadable)?;
        let directory = Directory::read(&mut file)?;
        let mut smallest_first: Vec<usize> = (0..directory.features.len()).collect();
        smallest_first.sort_by_key(|&at| directory.features[at].token_count);
        let mut lookups: Vec<_> = directory.features.iter().map(mapped).collect();
        let mut left_bytes = resident_budget_bytes;
        for at in smallest_first {
            let entry = &directory.features[at];
            let table_bytes = ResidentTable::size_bytes(entry.token_count);
            if table_bytes <= left_bytes {
                left_bytes -= table_bytes;
                lookups[at] = Lookup::Resident(ResidentTable::read(&mut file, entry)?);
            } else {
                check_sections(&mut file, entry)?;
            }
        }
        let mapping = Mapping::of(&file)?;
        if mapping.bytes().len() as u64 != directory.file_bytes {
            return Err(Error::corruption("vocabulary file changed while it was opened"));
        }
        Ok(Self { directory, lookups, mapping })
    }

    /// Returns the number of features.
    #[must_use]
    pub fn feature_count(&self) -> usize {
        self.lookups.len()
    }

    /// Returns the features' names.
    pub fn feature_names(&self) -> impl Iterator<Item = &str> {
        self.directory.features.iter().map(|entry| entry.name.as_str())
    }

    /// Returns per feature how many rows its table needs: its tokens, and row 0.
    pub fn row_counts(&self) -> impl Iterator<Item = u64> + '_ {
        self.directory.features.iter().map(|entry| entry.token_count + 1)
    }

    /// Returns how many samples the vocabulary was built from.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.directory.sample_count
    }

    /// Returns how often a token must have been seen to get an id of its own.
    #[must_use]
    pub fn min_count(&self) -> u64 {
        self.directory.min_count
    }

    /// Returns the bytes held by resident hash tables.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let bytes = |lookup: &Lookup| match lookup {
            Lookup::Resident(table) => (table.slots.len() * size_of::<Slot>()) as u64,
            Lookup::Mapped { .. } => 0,
        };
        self.lookups.iter().map(bytes).sum()
    }

    /// Returns the id of `token` in feature `feature`; 0 when it has none.
    ///
    /// # Panics
    /// When there is no such feature.
    #[must_use]
    pub fn id(&self, feature: usize, token: &[u8]) -> i64 {
        let mut id = [0];
        self.look_up(feature, std::iter::once(fingerprint(feature as u32, token)), &mut id);
        let [id] = id;
        id
    }

    /// Writes the ids of `fingerprints` of feature `feature` into `ids`, both `[N]`; 0 for those
    /// without an id.
    ///
    /// # Panics
    /// When there is no such feature.
    pub fn look_up(
        &self,
        feature: usize,
        fingerprints: impl Iterator<Item = u64>,
        ids: &mut [i64],
    ) {
        // The choice is made once per column; the loops are plain.
        assert!(feature < self.lookups.len(), "feature {feature} of {}", self.lookups.len());
        match &self.lookups[feature] {
            Lookup::Resident(table) => {
                for (id, fingerprint) in ids.iter_mut().zip(fingerprints) {
                    *id = i64::from(table.id(fingerprint));
                }
            }
            &Lookup::Mapped { fingerprints_at, ids_at, token_count } => {
                let bytes = self.mapping.bytes();
                let section = |at: usize, len: usize| &bytes[at..at + len];
                let keys = section(fingerprints_at, token_count * 8).as_chunks::<8>().0;
                let values = section(ids_at, token_count * 4).as_chunks::<4>().0;
                for (id, fingerprint) in ids.iter_mut().zip(fingerprints) {
                    *id = match search(keys, fingerprint) {
                        Some(at) => i64::from(u32::from_le_bytes(values[at])),
                        None => 0,
                    };
                }
            }
        }
    }
}

fn mapped(entry: &FeatureEntry) -> Lookup {
    Lookup::Mapped {
        fingerprints_at: entry.fingerprints_at as usize,
        ids_at: entry.ids_at as usize,
        token_count: entry.token_count as usize,
    }
}

/// Checks both sections of a feature that stays in the file.
fn check_sections(file: &mut File, entry: &FeatureEntry) -> Result<()> {
    let mut last = 0;
    let at_feature = |error: Error| error.with("feature", &entry.name);
    let mut ascending = |piece: &[u8]| {
        for word in piece.as_chunks::<8>().0 {
            let fingerprint = u64::from_le_bytes(*word);
            if fingerprint <= last {
                return Err(Error::corruption("vocabulary fingerprints are not ascending"));
            }
            last = fingerprint;
        }
        Ok(())
    };
    let (at, len) = (entry.fingerprints_at, entry.token_count * 8);
    read_section(file, at, len, entry.fingerprints_crc, &mut ascending).map_err(at_feature)?;
    let token_count = entry.token_count;
    let mut in_range = |piece: &[u8]| check_ids(piece, token_count);
    read_section(file, entry.ids_at, token_count * 4, entry.ids_crc, &mut in_range)
        .map_err(at_feature)
}

fn check_ids(piece: &[u8], token_count: u64) -> Result<()> {
    for word in piece.as_chunks::<4>().0 {
        let id = u64::from(u32::from_le_bytes(*word));
        if id == 0 || id > token_count {
            return Err(Error::corruption("vocabulary id is out of range")
                .with("found", id)
                .with("expected", format_args!("1 to {token_count}")));
        }
    }
    Ok(())
}

/// Finds `wanted` among ascending `keys`.
fn search(keys: &[[u8; 8]], wanted: u64) -> Option<usize> {
    if wanted == MISSING {
        return None;
    }
    let key = |at: usize| u64::from_le_bytes(keys[at]);
    // Invariant: if it is there, it lies in `low..high`, whose values are in `low_key..=high_key`.
    let (mut low, mut high) = (0, keys.len());
    let (mut low_key, mut high_key) = (0u64, u64::MAX);
    let mut steps = 0;
    while low < high {
        let span = u128::from(high_key - low_key) + 1;
        let share = u128::from(wanted - low_key) * (high - low) as u128 / span;
        let guess = if steps < INTERPOLATION_STEP_MAX { share as usize } else { (high - low) / 2 };
        steps += 1;
        let at = low + guess.min(high - low - 1);
        let found = key(at);
        match found.cmp(&wanted) {
            std::cmp::Ordering::Equal => return Some(at),
            std::cmp::Ordering::Less => (low, low_key) = (at + 1, found + 1),
            std::cmp::Ordering::Greater => (high, high_key) = (at, found - 1),
        }
    }
    None
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    fingerprint: u64,
    id: u32,
}

/// An open-addressing table, two thirds full; id 0 marks a free slot.
#[derive(Debug)]
struct ResidentTable {
    slots: Vec<Slot>,
}

impl ResidentTable {
    fn slot_count(token_count: u64) -> u64 {
        token_count + token_count / 2 + 1
    }

    fn size_bytes(token_count: u64) -> u64 {
        Self::slot_count(token_count).saturating_mul(size_of::<Slot>() as u64)
    }

    /// Checks both sections, then reads them side by side in pieces of 16,384 tokens.
    fn read(file: &mut File, entry: &FeatureEntry) -> Result<Self> {
        let token_count = entry.token_count;
        let mut slots = vec![Slot::default(); Self::slot_count(token_count) as usize];
        check_sections(file, entry)?;
        let piece_tokens = 1 << 14;
        let (mut keys, mut ids) = (vec![[0; 8]; piece_tokens], vec![[0; 4]; piece_tokens]);
        let mut done = 0;
        while done < token_count {
            let step = (token_count - done).min(piece_tokens as u64) as usize;
            let (keys, ids) = (&mut keys[..step], &mut ids[..step]);
            read_at(file, entry.fingerprints_at + done * 8, keys.as_flattened_mut())?;
            read_at(file, entry.ids_at + done * 4, ids.as_flattened_mut())?;
            for (key, id) in keys.iter().zip(ids.iter()) {
                let slot =
                    Slot { fingerprint: u64::from_le_bytes(*key), id: u32::from_le_bytes(*id) };
                if let Some(free) = probe(&mut slots, slot.fingerprint) {
                    *free = slot;
                }
            }
            done += step as u64;
        }
        Ok(Self { slots })
    }

    fn id(&self, fingerprint: u64) -> u32 {
        let (before, after) = self.slots.split_at(start_slot(self.slots.len(), fingerprint));
        for slot in after.iter().chain(before) {
            if slot.fingerprint == fingerprint || slot.id == 0 {
                return slot.id;
            }
        }
        0
    }
}

fn read_at(file: &mut File, at: u64, bytes: &mut [u8]) -> Result<()> {
    use std::io::{Seek, SeekFrom};
    let unreadable = |error| Error::os("cannot read vocabulary file", error);
    file.seek(SeekFrom::Start(at)).map_err(unreadable)?;
    if format::read_whole(file, bytes)? {
        return Ok(());
    }
    Err(Error::corruption("vocabulary file is cut short in a section"))
}

fn start_slot(slot_count: usize, fingerprint: u64) -> usize {
    // Fingerprints are uniform, so the top of the product spreads evenly over any slot count.
    ((u128::from(fingerprint) * slot_count as u128) >> 64) as usize
}

fn probe(slots: &mut [Slot], fingerprint: u64) -> Option<&mut Slot> {
    let start = start_slot(slots.len(), fingerprint);
    let (before, after) = slots.split_at_mut(start.min(slots.len()));
    after.iter_mut().chain(before).find(|slot| slot.id == 0)
}
