//! What if a log is too large to hold? Generated samples, made anew in each pass of replays.
//!
//! ```text
//! numbers of samples ─▶ threads: row ids ─▶ numbers in the order of appearance ─▶ many caches
//!                                           └─ from the first pass, which replays nothing
//! ```
//!
//! Memory: 6 bytes per row of all tables, and a piece of the log; besides, of each cache, 4 bytes
//! per row that is asked for and what it keeps per row it holds.

use std::sync::Arc;
use std::thread;

use tierbed_cache::{PolicyKind, ReplayCounts};
use tierbed_core::Result;
use tierbed_lab::generator::CRITEO_CARDINALITIES;
use tierbed_lab::{Generator, GeneratorOptions, Replays};

/// Rows of a sample.
const GROUP_ROWS: usize = CRITEO_CARDINALITIES.len();
/// Samples of a piece.
const PIECE: usize = 1 << 16;
/// No number: the row is never asked for.
const NONE: u32 = u32::MAX;

/// Generated samples as a log of queries, each for a row of every table.
#[derive(Debug)]
pub struct GeneratedLog {
    generator: Generator,
    sample_count: u64,
    /// The first row of each table among those of all tables.
    starts: [u32; GROUP_ROWS],
    /// Number of each row in the order of appearance, `[rows of all tables]`.
    numbers: Vec<u32>,
    /// Table of each row that is asked for, by number.
    tables: Arc<[u16]>,
}

impl GeneratedLog {
    /// Makes `sample_count` samples once to number their rows, on `threads` threads. `progress`
    /// hears of samples done and in all, and may stop it.
    ///
    /// # Errors
    /// `Invalid` for wrong options; what `progress` returns.
    pub fn new(
        options: GeneratorOptions,
        sample_count: u64,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        let generator = Generator::new(options)?;
        let mut end = 0;
        let starts = generator.row_counts().map(|rows| {
            end += rows;
            end - rows
        });
        let mut log =
            Self { generator, sample_count, starts, numbers: Vec::new(), tables: Arc::default() };
        let mut numbers = vec![NONE; end as usize];
        let mut tables: Vec<u16> = Vec::new();
        log.pieces(
            threads,
            |row| row,
            progress,
            |rows| {
                for (at, &row) in rows.iter().enumerate() {
                    if let Some(number) =
                        numbers.get_mut(row as usize).filter(|held| **held == NONE)
                    {
                        *number = tables.len() as u32;
                        tables.push((at % GROUP_ROWS) as u16);
                    }
                }
                Ok(())
            },
        )?;
        (log.numbers, log.tables) = (numbers, tables.into());
        Ok(log)
    }

    /// Samples, rows asked for, distinct rows.
    #[must_use]
    pub fn sizes(&self) -> (u64, u64, usize) {
        (self.sample_count, self.sample_count * GROUP_ROWS as u64, self.tables.len())
    }

    /// Replays the samples through every cache of a policy and so many rows; counts from sample
    /// `first` on. `progress` is as of [`new`](Self::new).
    ///
    /// # Errors
    /// `Invalid` for wrong sizes; what `progress` returns.
    pub fn replay_each(
        &self,
        caches: &[(PolicyKind, usize)],
        first: u64,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Vec<ReplayCounts>> {
        let mut replays = Replays::new(caches, &self.tables, first)?;
        let number = |row: u32| self.numbers.get(row as usize).copied().unwrap_or(NONE);
        self.pieces(threads, number, progress, |rows| {
            let groups: Vec<&[u32]> = rows.chunks_exact(GROUP_ROWS).collect();
            replays.ask(&groups, threads)
        })?;
        Ok(replays.counts())
    }

    /// Makes the samples piece by piece. `number` says what a row among those of all tables is
    /// called, `take` gets `[samples of a piece, GROUP_ROWS]`.
    fn pieces(
        &self,
        threads: usize,
        number: impl Fn(u32) -> u32 + Sync,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
        mut take: impl FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        let mut rows = Vec::new();
        for first in (0..self.sample_count).step_by(PIECE) {
            let count = (self.sample_count - first).min(PIECE as u64);
            rows.resize(count as usize * GROUP_ROWS, 0);
            let samples_each = (count as usize).div_ceil(threads.max(1));
            thread::scope(|scope| {
                for (at, part) in rows.chunks_mut(samples_each * GROUP_ROWS).enumerate() {
                    let (number, first) = (&number, first + (at * samples_each) as u64);
                    scope.spawn(move || self.fill(first, part, number));
                }
            });
            take(&rows)?;
            progress(first + count, self.sample_count)?;
        }
        Ok(())
    }

    /// Fills `rows` with the samples from `first` on.
    fn fill(&self, first: u64, rows: &mut [u32], number: impl Fn(u32) -> u32) {
        for (sample, group) in (first..).zip(rows.chunks_exact_mut(GROUP_ROWS)) {
            let ids = self.generator.ids_of(sample);
            for ((row, id), start) in group.iter_mut().zip(ids).zip(self.starts) {
                *row = number(start + id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tierbed_cache::ReplayCache;
    use tierbed_data::SampleBatch;

    use super::*;

    const SAMPLES: usize = 3000;

    fn options() -> GeneratorOptions {
        GeneratorOptions { drift: 50.0, ..GeneratorOptions::new(3, 0.0005) }
    }

    fn silent(_: u64, _: u64) -> Result<()> {
        Ok(())
    }

    /// The whole log, from the batches of training, numbered by a map.
    fn held() -> (Vec<Vec<u32>>, Vec<u16>) {
        let mut batch = SampleBatch::new(Generator::shape());
        Generator::new(options()).unwrap().fill(0, SAMPLES, &mut batch).unwrap();
        let mut numbers: HashMap<(usize, i64), u32> = HashMap::new();
        let mut tables = Vec::new();
        let mut number = |table: usize, id: i64| {
            *numbers.entry((table, id)).or_insert_with(|| {
                tables.push(table as u16);
                tables.len() as u32 - 1
            })
        };
        let id = |table: usize, sample: usize| batch.values[table * SAMPLES + sample];
        let of_sample = |sample| {
            (0..GROUP_ROWS).map(|table| number(table, id(table, sample))).collect::<Vec<_>>()
        };
        ((0..SAMPLES).map(of_sample).collect(), tables)
    }

    #[test]
    fn samples_made_in_pieces_are_those_of_the_held_log() {
        let (groups, tables) = held();
        for threads in [1, 3] {
            let log = GeneratedLog::new(options(), SAMPLES as u64, threads, &mut silent).unwrap();
            assert_eq!(log.sizes(), (SAMPLES as u64, 26 * SAMPLES as u64, tables.len()));
            assert_eq!(*log.tables, tables);
            let mut rows = vec![0; 26];
            for (sample, group) in groups.iter().enumerate() {
                log.fill(sample as u64, &mut rows, |row| log.numbers[row as usize]);
                assert_eq!(&rows, group, "sample {sample}");
            }
        }
    }

    #[test]
    fn a_pass_counts_what_each_cache_counts_alone() {
        let (groups, tables) = held();
        let caches = ["ev_lfu", "group_frequency", "auto", "lru"]
            .map(|name| (PolicyKind::from_name(name).unwrap(), tables.len() / 20));
        let mut told = Vec::new();
        let mut progress = |done, total| {
            told.push((done, total));
            Ok(())
        };
        let log = GeneratedLog::new(options(), SAMPLES as u64, 2, &mut progress).unwrap();
        let counts = log.replay_each(&caches, 2000, 2, &mut silent).unwrap();
        for ((kind, capacity_rows), counts) in caches.into_iter().zip(counts) {
            let cache = ReplayCache::new(kind, tables.len(), capacity_rows).unwrap();
            let mut cache = cache.with_tables(tables.clone()).unwrap();
            groups[..2000].iter().for_each(|group| assert!(cache.ask(group).is_ok()));
            let before = cache.counts();
            groups[2000..].iter().for_each(|group| assert!(cache.ask(group).is_ok()));
            assert_eq!(counts, cache.counts().since(before), "{kind:?}");
            assert!(counts.perfect_hits > 0, "{kind:?}");
        }
        assert_eq!(told.last(), Some(&(SAMPLES as u64, SAMPLES as u64)));
    }
}
