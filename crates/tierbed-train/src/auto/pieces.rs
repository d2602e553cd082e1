//! Batches that are looked up and stepped piece by piece, as ranks of an exchange do.

use tierbed_core::{Bags, Result};
use tierbed_kernels::{Destination, FeatureLayout, Grads};

use crate::auto::engine::{AutoEngine, State};
use crate::engine::TrainEngine;
use crate::planned::Piece;

impl AutoEngine {
    /// Returns whether training follows a plan.
    #[must_use]
    pub fn follows_plan(&self) -> bool {
        matches!(self.state, State::Planned(_))
    }

    /// Brings the rows of batches that are looked up piece by piece; returns how many fit. By
    /// window [`note_looked_up`](Self::note_looked_up) tells when one is done.
    ///
    /// # Errors
    /// As for [`TrainEngine::prefetch`].
    pub fn prefetch_pieces(
        &mut self,
        layout: &FeatureLayout,
        batches: &[Bags<'_>],
    ) -> Result<usize> {
        match self.planned_mut() {
            Some(planned) => planned.prefetch(layout, batches),
            None => self.by_number()?.prefetch_pieces(layout, batches),
        }
    }

    /// Notes that `count` batches of [`prefetch_pieces`](Self::prefetch_pieces) were looked up.
    pub fn note_looked_up(&mut self, count: usize) {
        if let State::Windowed(windowed) = &mut self.state {
            windowed.engine.note_looked_up(count);
        }
    }

    /// Makes sure that `bags`, one bag per feature of all pieces, may be trained on next. Returns
    /// whether they are the next batch of a plan; another batch moves the rows, if they may.
    ///
    /// # Errors
    /// As [`TrainEngine::expect`].
    pub fn expect_pieces(&mut self, layout: &FeatureLayout, bags: &Bags<'_>) -> Result<bool> {
        self.planned_or_moved(layout, bags, |engine| engine.expect(layout, bags))?;
        Ok(self.follows_plan())
    }

    /// Looks up a piece of the batch that was expected, where `to` says.
    ///
    /// # Errors
    /// As [`TrainEngine::lookup`].
    pub fn lookup_piece(&mut self, piece: Piece<'_>, to: &mut impl Destination) -> Result<()> {
        match self.planned_mut() {
            Some(planned) => planned.engine.lookup_piece(piece, to),
            None => self.lookup_to(piece.layout, piece.bags, to, true).map(drop),
        }
    }

    /// Steps a piece of the batch that was expected, each once, then
    /// [`finish_pieces`](Self::finish_pieces).
    ///
    /// # Errors
    /// As [`TrainEngine::update`]; along a plan errors behind the first piece poison the store.
    pub fn update_piece(&mut self, piece: Piece<'_>, grads: Grads<'_>) -> Result<()> {
        match self.planned_mut() {
            Some(planned) => planned.update_piece(piece, grads),
            None => self.update(piece.layout, piece.bags, grads, None),
        }
    }

    /// Goes on to the next batch: all pieces of the one that was expected are stepped.
    ///
    /// # Errors
    /// As [`TrainEngine::update`].
    pub fn finish_pieces(&mut self) -> Result<()> {
        self.planned_mut().map_or(Ok(()), |planned| planned.engine.finish_pieces())
    }
}
