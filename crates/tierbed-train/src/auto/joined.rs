//! One batch of the plan for several collections, each of which looks up and steps its features.
//!
//! The plan knows the batch as one: the features of all collections side by side. Before they look
//! it up, the whole batch is [expected](AutoEngine::expect_joined). Then each lookup and each step
//! is a [`Piece`] of it. The engine goes on to the next batch when all features are stepped, or
//! when whoever looks ahead says that no more steps come.

use std::ops::Range;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Bags, Result, TableId};
use tierbed_kernels::{FeatureLayout, Grads};

use crate::auto::engine::AutoEngine;
use crate::auto::noting::NotingEngine;
#[cfg(doc)]
use crate::engine::TrainEngine;
use crate::planned::Piece;

/// A batch that was expected as a whole.
pub(crate) struct JoinedBatch {
    layout: FeatureLayout,
    /// Where features begin and end among the ids, `[F + 1]`.
    bounds: Vec<i64>,
    /// Of the ids of each feature.
    crcs: Vec<u32>,
    /// Of each feature, whether it was stepped.
    is_stepped: Vec<bool>,
}

impl JoinedBatch {
    // The features of `layout` among those of the batch, if `bags` are what the batch has of them.
    fn place_of(&self, layout: &FeatureLayout, bags: &Bags<'_>) -> Option<Range<usize>> {
        let (all, own) = (self.layout.features(), layout.features());
        let first = all.iter().position(|feature| Some(feature.table) == first_table(layout))?;
        let features = first..first + own.len();
        let of_batch = all.get(features.clone())?;
        let is_alike = of_batch.iter().zip(own).all(|(a, b)| a.table == b.table);
        let bounds = self.bounds.get(first..=features.end)?;
        let before = *bounds.first()?;
        let is_here = is_alike
            && bags.bounds().eq(bounds.iter().map(|bound| bound - before))
            && crcs_of(bags).eq(self.crcs.get(features.clone())?.iter().copied());
        is_here.then_some(features)
    }

    fn has_step(&self) -> bool {
        self.is_stepped.contains(&true)
    }

    fn has_stepped_table_of(&self, layout: &FeatureLayout) -> bool {
        let features = self.layout.features().iter().zip(&self.is_stepped);
        let mut stepped = features.filter(|(_, is_stepped)| **is_stepped);
        stepped.any(|(of_batch, _)| layout.features().iter().any(|own| own.table == of_batch.table))
    }
}

// As a plan knows its batches: by checksums of ids.
#[expect(clippy::indexing_slicing, reason = "bags are checked when they are made")]
fn crcs_of<'a>(bags: &'a Bags<'a>) -> impl Iterator<Item = u32> + 'a {
    let ids = |(begin, end): (i64, i64)| &bags.indices[begin as usize..end as usize];
    let bounds = bags.bounds().zip(bags.bounds().skip(1));
    bounds.map(move |bounds| crc32c(bytemuck::cast_slice(ids(bounds))))
}

fn first_table(layout: &FeatureLayout) -> Option<TableId> {
    layout.features().first().map(|feature| feature.table)
}

impl AutoEngine {
    /// Makes sure that `bags`, one bag per feature of all collections, are the next batch of the
    /// plan: their features may then be looked up and stepped in several calls. Returns whether a
    /// plan is followed still; another batch moves the rows, if they may.
    ///
    /// # Errors
    /// As [`TrainEngine::expect`].
    pub fn expect_joined(&mut self, layout: &FeatureLayout, bags: &Bags<'_>) -> Result<bool> {
        self.end_joined()?;
        self.planned_or_moved(layout, bags, |engine| engine.expect(layout, bags))?;
        if self.planned_mut().is_none() {
            return Ok(false);
        }
        self.joined = Some(JoinedBatch {
            layout: layout.clone(),
            bounds: bags.bounds().collect(),
            crcs: crcs_of(bags).collect(),
            is_stepped: vec![false; layout.features().len()],
        });
        Ok(true)
    }

    /// Ends the batch that was [expected](Self::expect_joined), if it was stepped in part: what
    /// was not stepped stays as it is. Without a step it stays the next batch of the plan, for
    /// [`skip`](TrainEngine::skip). Returns whether there was a step.
    ///
    /// # Errors
    /// An error of the disk, which poisons the engine.
    pub fn end_joined(&mut self) -> Result<bool> {
        let Some(joined) = self.joined.take() else { return Ok(false) };
        match self.planned_mut().filter(|_| joined.has_step()) {
            Some(planned) => planned.engine.finish_pieces().map(|()| true),
            None => Ok(false),
        }
    }

    // Ends a batch that was stepped in part, before a call that is of no piece of it.
    pub(crate) fn end_stepped(&mut self) -> Result<()> {
        match self.joined.as_ref().is_some_and(JoinedBatch::has_step) {
            true => self.end_joined().map(drop),
            false => Ok(()),
        }
    }

    /// Returns the engine that has the rows, with no batch that is stepped in part.
    pub(crate) fn whole_engine(&mut self) -> Result<&mut dyn NotingEngine> {
        self.end_stepped()?;
        self.engine()
    }

    /// Looks up a piece of the batch that was expected; `None` when `bags` are none.
    pub(crate) fn lookup_joined(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Option<Result<()>> {
        let joined = self.joined.take()?;
        let found = joined.place_of(layout, bags);
        let result = found.zip(self.planned_mut()).map(|(features, planned)| {
            planned.engine.lookup_piece_into(
                Piece { batch: None, first_feature: features.start, layout, bags },
                out,
            )
        });
        self.joined = Some(joined);
        result
    }

    /// Steps a piece of the batch that was expected, and ends the batch when all are stepped;
    /// `None` when `bags` are none that may be stepped.
    pub(crate) fn update_joined(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        grads: &mut Grads<'_>,
    ) -> Option<Result<()>> {
        let mut joined = self.joined.take()?;
        let found = joined.place_of(layout, bags);
        // A table is stepped once for a batch.
        let found = found.filter(|_| !joined.has_stepped_table_of(layout));
        let result = found.zip(self.planned_mut()).map(|(features, planned)| {
            let grads = Grads { output: grads.output, weights: grads.weights.as_deref_mut() };
            planned.update_piece(
                Piece { batch: None, first_feature: features.start, layout, bags },
                grads,
            )?;
            let stepped = joined.is_stepped.iter_mut().skip(features.start).take(features.len());
            stepped.for_each(|is_stepped| *is_stepped = true);
            Ok(())
        });
        let is_whole = joined.is_stepped.iter().all(|&is_stepped| is_stepped);
        self.joined = Some(joined);
        match result {
            Some(Ok(())) if is_whole => Some(self.end_joined().map(drop)),
            result => result,
        }
    }
}
