//! Lookup of a batch: ids in, one vector per bag out.
//!
//! Indices are taken in order, in pieces whose rows fit the buffer together; each piece is
//! brought in one sorted read, then pooled by the kernels, adding to what the pieces before it
//! left. Additions thus happen in index order whatever the budget: same bits always.

#![expect(clippy::indexing_slicing, reason = "positions are those of a batch that was checked")]

use tierbed_core::{Bags, Result};
use tierbed_kernels::{
    BagRange, Destination, Feature, FeatureLayout, Kernels, PoolFeature, Pooling, Rows,
};

use crate::window::engine::{built, built_mut, WindowEngine};
use crate::window::row_buffer::{RowBuffer, Want, TOGETHER};

impl WindowEngine {
    /// Pools the rows of `bags` into `out`, overwritten: `[B, output_dim]`, or `[E, D]` without
    /// pooling.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range (nothing is read then), otherwise the store's.
    pub fn lookup(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        self.poison.check()?;
        layout.check(&self.schema, bags, out.len())?;
        self.make_room()?;
        self.ensure_buffer()?;
        out.fill(0.0);
        let mut piece = Piece { first: 0, end: 0 };
        while piece.first < bags.indices.len() {
            self.bring_piece(layout, bags, &mut piece)?;
            let starts = self.scratch.starts.as_slice();
            let placed = PlacedPiece { layout, bags, first: piece.first, starts };
            placed.pool(self.kernels, built(&self.buffer), out);
            piece.first = piece.end;
        }
        for (at, feature) in layout.features().iter().enumerate() {
            if feature.pooling == Pooling::Mean {
                self.kernels.mean_scale(bags.feature_offsets(at), feature.columns, out);
            }
        }
        self.note_lookup(layout);
        Ok(())
    }

    /// Pools the rows of `bags` into the places that `to` says: the bits of
    /// [`lookup`](Self::lookup), in one pass when all rows of the batch fit the buffer together.
    /// Otherwise by way of a matrix, which is not counted against the budget, as an output is not.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_to(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        to: &mut impl Destination,
    ) -> Result<()> {
        self.poison.check()?;
        layout.check(&self.schema, bags, layout.output_len(bags))?;
        self.make_room()?;
        self.ensure_buffer()?;
        let mut piece = Piece { first: 0, end: 0 };
        if !bags.indices.is_empty() {
            self.bring_piece(layout, bags, &mut piece)?;
        }
        if piece.end < bags.indices.len() {
            let mut matrix = vec![0.0; layout.output_len(bags)];
            self.lookup(layout, bags, &mut matrix)?;
            layout.scatter(bags, &matrix, to);
            return Ok(());
        }
        let buffer = built(&self.buffer);
        let starts = if bags.indices.is_empty() { &[][..] } else { &self.scratch.starts };
        let rows_of = |(at, feature): (usize, &Feature)| {
            let range = layout.range(bags, at);
            let rows = Rows {
                arena: buffer.arena(feature.table.0).0,
                starts: &starts[range.clone()],
                weights: bags.weights.map(|weights| &weights[range]),
            };
            let (offsets, columns) = (bags.feature_offsets(at), feature.columns);
            let pooling = feature.pooling;
            (rows, PoolFeature { feature: at, offsets, pooling, dim: columns.dim })
        };
        let features: Vec<_> = layout.features().iter().enumerate().map(rows_of).collect();
        self.kernels.pool_all_to(&features, to);
        self.note_lookup(layout);
        Ok(())
    }

    fn note_lookup(&mut self, layout: &FeatureLayout) {
        self.ahead.note_lookup(layout);
        if let Some(buffer) = &mut self.buffer {
            buffer.set_batch_done(self.ahead.batch_done());
        }
    }

    // Places rows from `piece.first` on until buffer or scratch is full; sets `piece.end`.
    fn bring_piece(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        piece: &mut Piece,
    ) -> Result<()> {
        let buffer = built_mut(&mut self.buffer);
        let limit = piece.first + self.scratch.lookup_indices_max();
        assert!(self.scratch.misses.is_empty(), "rows of a round before were not filled");
        buffer.begin_round();
        self.scratch.starts.clear();
        'features: for (at, feature) in layout.features().iter().enumerate() {
            let range = layout.range(bags, at);
            let words = buffer.arena(feature.table.0).1;
            let (first, end) = (range.start.max(piece.first), range.end.min(limit));
            for ids in bags.indices[first.min(end)..end].chunks(TOGETHER) {
                let guesses = buffer.guess(ids.iter().map(|&id| feature.row_key(id)));
                for &guess in &guesses[..ids.len()] {
                    let misses = &mut self.scratch.misses;
                    match buffer.place_near(guess, Want::Now, &mut self.store, misses)? {
                        Some(slot) => self.scratch.starts.push(slot as usize * words),
                        None => break 'features,
                    }
                }
            }
        }
        piece.end = piece.first + self.scratch.starts.len();
        assert!(piece.end > piece.first, "a buffer holds at least one row of each length");
        buffer.fill(&mut self.scratch.misses, &self.schema, &mut self.store)
    }
}

/// Indices `first..end` of a batch, whose rows are in the buffer together.
struct Piece {
    first: usize,
    end: usize,
}

/// The rows of a piece, in the buffer.
struct PlacedPiece<'a> {
    layout: &'a FeatureLayout,
    bags: &'a Bags<'a>,
    /// Position of the piece's first index.
    first: usize,
    /// Where the row of each index starts in its table's arena.
    starts: &'a [usize],
}

impl PlacedPiece<'_> {
    // Adds the rows to what the pieces before left in `out`.
    fn pool(&self, kernels: Kernels, buffer: &RowBuffer, out: &mut [f32]) {
        let Self { layout, bags, first, starts } = *self;
        let end = first + starts.len();
        assert!(end <= bags.indices.len(), "a piece ends at {end} of {}", bags.indices.len());
        for (at, feature) in layout.features().iter().enumerate() {
            let range = layout.range(bags, at);
            let (from, to) = (range.start.max(first), range.end.min(end));
            if from >= to {
                continue;
            }
            let arena = buffer.arena(feature.table.0).0;
            let starts = &starts[from - first..to - first];
            if layout.is_pooled() {
                let weights = bags.weights.map(|weights| &weights[from..to]);
                let bag_range = BagRange { offsets: bags.feature_offsets(at), first_index: from };
                kernels.pool_add(Rows { arena, starts, weights }, bag_range, feature.columns, out);
            } else {
                let dim = feature.columns.dim;
                kernels.gather_rows(arena, starts, dim, &mut out[from * dim..to * dim]);
            }
        }
    }
}
