//! Rows noted since something was published, of whichever engine has them.

use tierbed_core::Result;

use crate::engine::TrainEngine;
use crate::planned::AnySink;
use crate::window::changes::{DeltaCount, Since};
use crate::window::changes_file::Rows;

/// A training engine that notes which rows change.
pub(crate) trait NotingEngine: TrainEngine {
    /// Returns the rows noted since what has any of these identities was published.
    ///
    /// # Errors
    /// Those of writing what is only in memory.
    fn noted_since(&mut self, identities: &[String]) -> Result<Since<Rows>>;

    /// Visits these rows as [`TrainEngine::scan_all`] does; those never written may be left out.
    ///
    /// # Errors
    /// The store's and those of `sink`.
    fn scan_noted(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()>;

    /// Begins to note anew: what has `identity` holds every row as it is now.
    ///
    /// # Errors
    /// Those of opening the engine.
    fn note_published(&mut self, identity: &str) -> Result<()>;

    /// Counts a delta that was published.
    ///
    /// # Errors
    /// As [`note_published`](Self::note_published).
    fn count_delta(&mut self, delta: DeltaCount) -> Result<()>;
}
