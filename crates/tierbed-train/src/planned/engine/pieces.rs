//! The next batch of the plan, looked up and stepped piece by piece.
//!
//! Ranks of an exchange ask for some features at a time, in layouts of their own. The plan knows
//! their batch as one: all features, one bag each. An id of a piece has the entry that it has in
//! the batch, so that a piece needs no more than its place in it.

#![expect(clippy::indexing_slicing, reason = "bounds are those of the batch that was unpacked")]

use std::borrow::Cow;
use std::ops::Range;

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::{Destination, FeatureLayout, Grads};

use super::lookup::{feature_rows, pool_to};
use super::update::Unpacked;
use super::PlannedEngine;

/// Some features of a batch, one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Ids of the whole batch, as it was [expected](PlannedEngine::prepare); `None` when `bags`
    /// have all ids of their features, which the caller has compared with that batch.
    pub batch: Option<&'a [i64]>,
    /// Number of the first feature in the batch.
    pub first_feature: usize,
    /// Tables, pooling and columns of the features.
    pub layout: &'a FeatureLayout,
    /// Their bags: of each feature all ids of the batch, or some of them in the same order.
    pub bags: &'a Bags<'a>,
}

impl Piece<'_> {
    // Tells whether its bags have all ids of the batch in `range`, its features.
    fn has_all_of(&self, range: Range<usize>) -> bool {
        match self.batch {
            Some(batch) => batch[range] == *self.bags.indices,
            None => range.len() == self.bags.indices.len(),
        }
    }
}

impl PlannedEngine {
    /// Pools the rows of `piece`, of the batch that was expected last, where `to` says.
    ///
    /// # Errors
    /// `Invalid` when no batch was expected, or it has no such piece: nothing is changed then.
    pub fn lookup_piece(&mut self, piece: Piece<'_>, to: &mut impl Destination) -> Result<()> {
        self.bring_back()?;
        let mut starts = std::mem::take(&mut self.scratch.starts);
        let result = self.pool_piece(piece, &mut starts, to);
        self.scratch.starts = starts;
        result
    }

    /// As [`lookup_piece`](Self::lookup_piece) into `out`, overwritten: `[B, output_dim]`, or
    /// `[E, D]` without pooling.
    ///
    /// # Errors
    /// As [`lookup_piece`](Self::lookup_piece), and for an output of another size.
    pub fn lookup_piece_into(&mut self, piece: Piece<'_>, out: &mut [f32]) -> Result<()> {
        piece.layout.check_shape(piece.bags, out.len())?;
        self.bring_back()?;
        let entries = self.entries_of(piece)?;
        let features = feature_rows(&self.pipeline, &entries, piece.layout, piece.bags);
        self.kernels.pool_batch(self.pipeline.current.arena(), &features, out);
        Ok(())
    }

    fn pool_piece(
        &self,
        piece: Piece<'_>,
        starts: &mut Vec<usize>,
        to: &mut impl Destination,
    ) -> Result<()> {
        let entries = self.entries_of(piece)?;
        let features = feature_rows(&self.pipeline, &entries, piece.layout, piece.bags);
        pool_to(self.kernels, self.pipeline.current.arena(), &features, starts, to);
        Ok(())
    }

    /// Steps the rows of `piece`, which has all ids of its features. All pieces of the batch are
    /// stepped once, each table in one of them; [`finish_pieces`](Self::finish_pieces) follows.
    ///
    /// # Errors
    /// As [`lookup_piece`](Self::lookup_piece); shapes out of range. Behind the first piece every
    /// error poisons the engine: reopen it at the last checkpoint.
    pub fn update_piece(&mut self, piece: Piece<'_>, grads: Grads<'_>) -> Result<()> {
        let result = self.step_piece(piece, grads);
        match self.is_in_pieces {
            true => self.poison.on_any(result),
            false => result,
        }
    }

    fn step_piece(&mut self, piece: Piece<'_>, mut grads: Grads<'_>) -> Result<()> {
        let Piece { layout, bags, .. } = piece;
        grads.check_weights(bags)?;
        self.poison.check()?;
        layout.check_shape(bags, grads.output.len())?;
        let range = self.range_of(piece)?;
        if !piece.has_all_of(range.clone()) {
            return Err(Error::invalid("a step of a piece takes all ids of its features"));
        }
        self.bring_back()?;
        self.note_window()?;
        let steps = self.next_steps(layout)?;
        // The entries are borrowed from what the step needs too.
        let entries = std::mem::take(&mut self.scratch.entries);
        let own = &entries[range];
        if let Some(weights_grad) = grads.weights.as_deref_mut() {
            for rows in feature_rows(&self.pipeline, own, layout, bags) {
                self.weight_grads(&rows, grads.output, weights_grad);
            }
        }
        let stepped =
            self.step_rows(Unpacked { entries: own, plan: layout, bags }, &steps, grads.output);
        self.scratch.entries = entries;
        stepped?;
        self.is_in_pieces = true;
        Ok(())
    }

    /// Goes on to the next batch of the plan: all pieces of this one are stepped.
    ///
    /// # Errors
    /// `Invalid` when no batch was expected; an error of the disk poisons the engine.
    pub fn finish_pieces(&mut self) -> Result<()> {
        self.poison.check()?;
        self.check_expected()?;
        self.is_in_pieces = false;
        self.counters.step_count += 1;
        self.finish_batch()
    }

    /// Makes sure that no batch is stepped in part.
    ///
    /// # Errors
    /// `Poisoned`.
    pub(super) fn check_whole(&mut self) -> Result<()> {
        if self.is_in_pieces {
            let half = Err(Error::invalid("a batch was stepped in part"));
            let _: Result<()> = self.poison.on_any(half);
        }
        self.poison.check()
    }

    fn check_expected(&self) -> Result<()> {
        match self.scratch.unpacked {
            Some(unpacked) if unpacked.position == self.position() => Ok(()),
            _ => Err(Error::invalid("no batch of the plan was expected")),
        }
    }

    // Where the ids of the piece's features are in the batch.
    fn range_of(&self, piece: Piece<'_>) -> Result<Range<usize>> {
        self.check_expected()?;
        let bounds = &self.scratch.bounds;
        let end = piece.first_feature + piece.layout.features().len();
        let entry_count = self.scratch.entries.len();
        let is_its = piece.batch.is_none_or(|batch| batch.len() == entry_count);
        let is_its = is_its && end < bounds.len();
        if !is_its {
            return Err(Error::invalid("the batch that was expected has no such piece"));
        }
        Ok(bounds[piece.first_feature] as usize..bounds[end] as usize)
    }

    // The entry of each id of the piece.
    fn entries_of(&self, piece: Piece<'_>) -> Result<Cow<'_, [u32]>> {
        let range = self.range_of(piece)?;
        let entries = &self.scratch.entries;
        if piece.has_all_of(range.clone()) {
            return Ok(Cow::Borrowed(&entries[range]));
        }
        let batch = piece.batch;
        let batch = batch.ok_or_else(|| Error::invalid("a piece lacks ids of its features"))?;
        let mut own = Vec::with_capacity(piece.bags.indices.len());
        for at in 0..piece.layout.features().len() {
            let feature = piece.first_feature + at;
            let bounds = &self.scratch.bounds[feature..=feature + 1];
            let of_batch = bounds[0] as usize..bounds[1] as usize;
            let mut rest = batch[of_batch.clone()].iter().zip(&entries[of_batch]);
            for &id in &piece.bags.indices[piece.layout.range(piece.bags, at)] {
                // They come in the order of the batch: what was passed comes no more.
                let found = rest.find(|(&of_batch, _)| of_batch == id);
                let (_, &entry) = found.ok_or_else(|| {
                    Error::invalid("a piece has an id that its batch has not").with("id", id)
                })?;
                own.push(entry);
            }
        }
        Ok(Cow::Owned(own))
    }
}
