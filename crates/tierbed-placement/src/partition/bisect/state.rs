//! Resume file of a bisection, written between levels.
//!
//! The order of rows after a level is all there is to know: the sizes of nodes follow from the
//! number of rows and pins, and a row's side in each split above follows from its place. Later runs
//! divide pins along that order without an exchange, and get the same nodes to the last bit. The
//! file belongs to one log and to one set of options. Format:
//! `docs/reference/formats/placement.md`.

use std::path::Path;

use tierbed_core::Result;

use super::levels::{AfterLevel, Known};
use super::{BisectionOptions, ExchangeRule, LevelReport};
use crate::hypergraph::Hypergraph;
use crate::resume::{checksum_of, halves, ResumeFile};

/// Levels after which the state is written, but for the last; those below are done sooner than
/// read back.
const STATE_LEVELS: u32 = 12;

/// A bisection that can be gone on with.
#[derive(Debug)]
pub(super) struct State {
    file: ResumeFile,
    /// Rows of the table, and those that are split.
    row_count: usize,
    split_count: usize,
}

/// Returns what names the bisection of `graph`, which is not split yet.
pub(crate) fn identity_of(graph: &Hypergraph, options: &BisectionOptions) -> Vec<u32> {
    let rule = match options.exchange_rule {
        ExchangeRule::Settling => 0,
        ExchangeRule::Steady => 1,
    };
    let mut identity = vec![options.rows_per_page, options.iteration_count, rule];
    identity.extend(halves(options.seed));
    identity.extend([checksum_of(&graph.pins), graph.rows.len() as u32]);
    identity
}

impl State {
    /// Names the bisection of `graph`; without a path nothing is kept.
    pub(super) fn new(path: Option<&Path>, graph: &Hypergraph, identity: Vec<u32>) -> Self {
        let file = ResumeFile::new(path.map(Path::to_path_buf), identity);
        Self { file, row_count: graph.row_count as usize, split_count: graph.rows.len() }
    }

    /// Bisects by `split`, which goes on from the levels that are kept and keeps others.
    ///
    /// # Errors
    ///
    /// `Corruption` for a damaged file, `Invalid` for one of another log or other options, `Io`,
    /// `NoSpace`, and what `report` returns.
    pub(super) fn go_on<T>(
        &self,
        report: &mut dyn FnMut(LevelReport) -> Result<()>,
        split: impl FnOnce(&Known, AfterLevel<'_>) -> Result<T>,
    ) -> Result<T> {
        let known = self.read()?;
        split(&known, &mut |level, rows| {
            report(level)?;
            let is_last = level.levels_done == level.level_count;
            if level.levels_done > known.levels_done
                && (level.levels_done <= STATE_LEVELS || is_last)
            {
                self.write(level.levels_done, rows)?;
            }
            Ok(())
        })
    }

    fn read(&self) -> Result<Known> {
        let mut known = Known::default();
        let Some(numbers) = self.file.read()? else { return Ok(known) };
        let (&levels_done, rows) = numbers.split_first().ok_or_else(|| self.file.damaged())?;
        if rows.len() != self.split_count {
            return Err(self.file.damaged());
        }
        known.levels_done = levels_done;
        known.places = vec![u32::MAX; self.row_count];
        for (place, &row) in (0..).zip(rows) {
            let place_of = known.places.get_mut(row as usize).filter(|place| **place == u32::MAX);
            *place_of.ok_or_else(|| self.file.damaged())? = place;
        }
        Ok(known)
    }

    /// Keeps the order of rows after `level` levels.
    fn write(&self, level: u32, rows: &[u32]) -> Result<()> {
        let mut numbers = Vec::with_capacity(1 + rows.len());
        numbers.push(level);
        numbers.extend_from_slice(rows);
        self.file.write(&numbers)
    }
}
