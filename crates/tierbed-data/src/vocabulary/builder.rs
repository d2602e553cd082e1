//! Building of a vocabulary: tokens, counts, ids.
//!
//! One pass over the log, in bounded memory. An open-addressing map counts fingerprints and
//! remembers where each appeared first; a full map goes to a sorter and starts anew. At the end
//! equal fingerprints add up, rare tokens are dropped, the rest is sorted by first appearance and
//! numbered from 1 within its feature, and sorted back by fingerprint for the file. Id 0 stays for
//! missing and rare tokens.
//!
//! ```text
//! map ─▶ by fingerprint ─▶ by first appearance ─▶ by fingerprint ─▶ file
//! ```
//!
//! Two neighbours of this picture live at a time, and each has half of the budget. The result does
//! not depend on it.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tierbed_core::{Error, Result};

use super::format::VocabularyWriter;
use super::sort::{Order, Record, Sorted, Sorter, RECORD_BYTES};
use crate::fingerprint::{fingerprint, MISSING};

/// Smallest budget that still makes progress: a few thousand counters and merge buffers.
pub const MEMORY_BUDGET_BYTES_MIN: u64 = 64 << 10;
/// Slots the map starts with.
const SLOT_COUNT_START: usize = 1 << 12;
const FEATURE_COUNT_MAX: usize = 1 << 16;

/// How to build a vocabulary.
#[derive(Debug, Clone)]
pub struct VocabularyOptions {
    /// Memory the builder may hold, at least [`MEMORY_BUDGET_BYTES_MIN`].
    pub memory_budget_bytes: u64,
    /// Existing folder for spilled runs: 24 bytes for every distinct token, several times over
    /// when the budget is small.
    pub scratch_folder: PathBuf,
    /// Tokens seen less often share id 0 with the missing ones; 1 keeps all.
    pub min_count: u64,
}

/// What a finished vocabulary holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VocabularyReport {
    /// Per feature.
    pub features: Vec<FeatureReport>,
    /// Runs spilled to the scratch folder.
    pub run_count: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// One feature of a [`VocabularyReport`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct FeatureReport {
    /// Name.
    pub name: String,
    /// Tokens with an id of their own; the table needs one row more.
    pub token_count: u64,
    /// Distinct tokens below `min_count`.
    pub rare_token_count: u64,
    /// Occurrences of the empty token.
    pub missing_count: u64,
}

/// Counts tokens and numbers them.
#[derive(Debug)]
pub struct VocabularyBuilder {
    options: VocabularyOptions,
    features: Vec<FeatureReport>,
    map: Vec<Record>,
    used: usize,
    counted: Sorter,
    // Tokens counted so far, missing ones too: the position that orders first appearances.
    position: u64,
    sample_count: u64,
}

impl VocabularyBuilder {
    /// Starts a vocabulary of the named features.
    ///
    /// # Errors
    /// `Invalid` for a budget below the minimum, no or too many features, or `min_count` 0;
    /// `Io` when the scratch folder cannot be written.
    pub fn new(feature_names: &[String], options: VocabularyOptions) -> Result<Self> {
        if options.memory_budget_bytes < MEMORY_BUDGET_BYTES_MIN {
            return Err(Error::invalid("memory budget for the vocabulary is too small")
                .with("found", options.memory_budget_bytes)
                .with("expected", format_args!("at least {MEMORY_BUDGET_BYTES_MIN} bytes")));
        }
        if feature_names.is_empty() || feature_names.len() > FEATURE_COUNT_MAX {
            return Err(Error::invalid("a vocabulary has 1 to 65536 features")
                .with("found", feature_names.len()));
        }
        if options.min_count == 0 {
            return Err(Error::invalid("min_count must be at least 1")
                .with("remedy", "1 keeps every token"));
        }
        let features = feature_names
            .iter()
            .map(|name| FeatureReport { name: name.clone(), ..FeatureReport::default() })
            .collect();
        let counted = options.sorter(Order::Fingerprint)?;
        let slot_count = SLOT_COUNT_START.min(options.map_slots_max());
        Ok(Self {
            options,
            features,
            map: vec![Record::default(); slot_count],
            used: 0,
            counted,
            position: 0,
            sample_count: 0,
        })
    }

    /// Counts one sample: a fingerprint per feature, `[F]`.
    ///
    /// # Errors
    /// `Invalid` when the number of features is another; errors of the scratch files.
    pub fn add_sample(&mut self, fingerprints: &[u64]) -> Result<()> {
        if fingerprints.len() != self.features.len() {
            return Err(Error::invalid("sample has another number of features")
                .with("expected", self.features.len())
                .with("found", fingerprints.len()));
        }
        for (feature, fingerprint) in fingerprints.iter().enumerate() {
            self.count(feature as u16, *fingerprint)?;
        }
        self.sample_count += 1;
        Ok(())
    }

    /// Counts tokens of one feature in the order given, as many per sample as there are; the
    /// empty token is a missing one. The caller says how many samples there were with
    /// [`Self::note_samples`].
    ///
    /// # Errors
    /// `Invalid` for a feature that is not there; errors of the scratch files.
    pub fn add_column<'a>(
        &mut self,
        feature: usize,
        tokens: impl Iterator<Item = &'a [u8]>,
    ) -> Result<()> {
        if feature >= self.features.len() {
            return Err(Error::invalid("vocabulary has no such feature")
                .with("feature", feature)
                .with("features", self.features.len()));
        }
        for token in tokens {
            self.count(feature as u16, fingerprint(feature as u32, token))?;
        }
        Ok(())
    }

    /// Adds to the number of samples counted, after [`Self::add_column`].
    pub fn note_samples(&mut self, sample_count: u64) {
        self.sample_count += sample_count;
    }

    /// Returns the number of samples counted.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.sample_count
    }

    fn count(&mut self, feature: u16, fingerprint: u64) -> Result<()> {
        self.position += 1;
        if fingerprint == MISSING {
            if let Some(report) = self.features.get_mut(usize::from(feature)) {
                report.missing_count += 1;
            }
            return Ok(());
        }
        let record = Record::new(feature, fingerprint, self.position, 1);
        if insert(&mut self.map, record) {
            self.used += 1;
            // Three quarters full: probes stay short.
            if self.used * 4 > self.map.len() * 3 {
                self.make_room()?;
            }
        }
        Ok(())
    }

    /// Grows the map if old and new fit together, else spills it.
    fn make_room(&mut self) -> Result<()> {
        let slot_count = self.map.len();
        if slot_count * 3 <= self.options.map_slots_max() {
            let old = std::mem::replace(&mut self.map, vec![Record::default(); slot_count * 2]);
            for record in old.into_iter().filter(|record| record.tagged != 0) {
                insert(&mut self.map, record);
            }
            return Ok(());
        }
        self.spill()?;
        self.map.resize(self.options.map_slots_max(), Record::default());
        Ok(())
    }

    /// Gives what was counted to the sorter and leaves an empty map of no slots.
    fn spill(&mut self) -> Result<()> {
        self.used = 0;
        let mut counted = std::mem::take(&mut self.map).into_iter();
        counted.try_for_each(|record| match record.tagged {
            0 => Ok(()),
            _ => self.counted.push(record),
        })
    }

    /// Numbers the tokens and writes the vocabulary file at `path`, atomically.
    ///
    /// # Errors
    /// `Invalid` when a feature has more than 2^32 - 2 tokens; errors of the files.
    pub fn finish(mut self, path: &Path) -> Result<VocabularyReport> {
        self.spill()?;
        let Self { options, mut features, sample_count, counted, .. } = self;
        let counted = counted.finish()?;
        let mut run_count = counted.stats().run_count;
        let by_first = keep_frequent(counted, &options, &mut features)?;
        run_count += by_first.stats().run_count;
        let mut numbered = number(by_first, &options, &features)?;
        run_count += numbered.stats().run_count;
        let mut writer =
            VocabularyWriter::create(path, &features, options.min_count, sample_count)?;
        while let Some(record) = numbered.next()? {
            writer.push(record.feature(), record.fingerprint, record.number() as u32)?;
        }
        let file_bytes = writer.finish()?;
        Ok(VocabularyReport { features, run_count, file_bytes })
    }
}

/// Adds up equal fingerprints, drops rare ones, sorts by first appearance.
fn keep_frequent(
    mut counted: Sorted,
    options: &VocabularyOptions,
    features: &mut [FeatureReport],
) -> Result<Sorted> {
    let mut sorter = options.sorter(Order::First)?;
    let mut next = counted.next()?;
    while let Some(mut sum) = next {
        next = counted.next()?;
        while let Some(same) = next.filter(|record| is_same_token(record, &sum)) {
            sum.tagged += same.number();
            sum.first = sum.first.min(same.first);
            next = counted.next()?;
        }
        let Some(report) = features.get_mut(usize::from(sum.feature())) else {
            return Err(Error::corruption("spilled record names a feature that is not there"));
        };
        if sum.number() < options.min_count {
            report.rare_token_count += 1;
        } else {
            report.token_count += 1;
            sorter.push(sum)?;
        }
    }
    drop(counted);
    sorter.finish()
}

/// Replaces counts by ids from 1 in the order given, sorts back by fingerprint.
fn number(
    mut by_first: Sorted,
    options: &VocabularyOptions,
    features: &[FeatureReport],
) -> Result<Sorted> {
    let too_many = features.iter().find(|feature| feature.token_count >= u64::from(u32::MAX));
    if let Some(feature) = too_many {
        return Err(Error::invalid("feature has too many tokens for 32-bit ids")
            .with("feature", &feature.name)
            .with("found", feature.token_count)
            .with("remedy", "raise min_count"));
    }
    let mut sorter = options.sorter(Order::Fingerprint)?;
    let mut feature = 0;
    let mut id = 0;
    while let Some(record) = by_first.next()? {
        id = if record.feature() == feature { id + 1 } else { 1 };
        feature = record.feature();
        let numbered = Record::new(feature, record.fingerprint, 0, id);
        sorter.push(numbered)?;
    }
    drop(by_first);
    sorter.finish()
}

impl VocabularyOptions {
    fn sorter(&self, order: Order) -> Result<Sorter> {
        Sorter::new(order, &self.scratch_folder, self.memory_budget_bytes / 2)
    }

    /// Most slots of the map.
    fn map_slots_max(&self) -> usize {
        usize::try_from(self.memory_budget_bytes / 2).unwrap_or(usize::MAX) / RECORD_BYTES
    }
}

fn is_same_token(a: &Record, b: &Record) -> bool {
    a.feature() == b.feature() && a.fingerprint == b.fingerprint
}

/// Adds `record` to its slot, or takes a free one; tells whether it took one. A free slot has
/// count 0, which no counted token has. There always is one: the map is kept below 3/4 full.
fn insert(map: &mut [Record], record: Record) -> bool {
    let slot_count = map.len();
    // Fingerprints are uniform, so the top of the product spreads evenly over any slot count.
    let start = ((u128::from(record.fingerprint) * slot_count as u128) >> 64) as usize;
    let (before, after) = map.split_at_mut(start.min(slot_count));
    for slot in after.iter_mut().chain(before) {
        if slot.tagged == 0 {
            *slot = record;
            return true;
        }
        if is_same_token(slot, &record) {
            slot.tagged += record.number();
            slot.first = slot.first.min(record.first);
            return false;
        }
    }
    unreachable!("the map is never full")
}
