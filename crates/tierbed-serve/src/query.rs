//! Queries: the bags of a request under one plan, and the matrix that answers them.
//!
//! A request is one query for all its pooled features, so that they share pages, and one for each
//! unpooled feature, which has as many rows as indices.

use std::ops::{Deref, Range};
use std::sync::Arc;

use axum::body::Bytes;
use tierbed_core::store::out_of_range;
use tierbed_core::{Bags, Result, Schema};
use tierbed_snapshot::{Ask, Begun, LookupStats, PendingLookup, PublishedIds, View};

use crate::features::Feature;
use crate::gateway::{Answers, Asking, ShardedRows};
use crate::known::Heads;
use crate::plans::{Plan, Plans};

/// What is looked up: rows, and the rows of raw ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) snapshot: &'a View<'a>,
    pub(crate) ids: &'a PublishedIds,
    pub(crate) features: &'a [Feature],
    pub(crate) plans: &'a Plans,
    pub(crate) heads: &'a Heads,
}

impl<'a> Source<'a> {
    /// Returns a served feature by its position.
    ///
    /// # Panics
    /// When there are not so many.
    pub(crate) fn feature(&self, at: usize) -> &'a Feature {
        let Some(feature) = self.features.get(at) else {
            panic!("feature {at} of {} is asked for", self.features.len());
        };
        feature
    }
}

/// Ids of a request: in the body they came in, where they lie as words do, or copied.
#[derive(Debug, Clone)]
pub(crate) enum Ids {
    Copied(Vec<i64>),
    InPlace(Bytes),
}

impl Ids {
    /// Takes little-endian words; what is left over at the end is the caller's mistake.
    pub(crate) fn from_le(bytes: Bytes) -> Self {
        if bytemuck::try_cast_slice::<u8, i64>(&bytes).is_ok() {
            return Self::InPlace(bytes);
        }
        let (words, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "{} bytes are no words", bytes.len());
        Self::Copied(words.iter().map(|word| i64::from_le_bytes(*word)).collect())
    }

    /// Returns some of the ids; those in a body are not copied.
    ///
    /// # Panics
    /// When they are not all there.
    #[expect(clippy::indexing_slicing, reason = "documented to panic")]
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::Copied(ids) => Self::Copied(ids[range].to_vec()),
            Self::InPlace(bytes) => {
                let size = size_of::<i64>();
                Self::InPlace(bytes.slice(range.start * size..range.end * size))
            }
        }
    }
}

impl Deref for Ids {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        match self {
            Self::Copied(ids) => ids,
            // Looked at when it was taken.
            Self::InPlace(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

/// A matrix of 32-bit floats, with room before it for the head of an answer.
#[derive(Debug, Default)]
pub(crate) struct Matrix {
    words: Vec<f32>,
    first: usize,
    /// Bytes before the head, which ends where the elements begin.
    unused: usize,
}

impl Matrix {
    /// Makes room for `len` elements behind `head`.
    fn behind(head: &[u8], len: usize) -> Self {
        let first = head.len().div_ceil(size_of::<f32>());
        let unused = first * size_of::<f32>() - head.len();
        let mut words = vec![0.0; first + len];
        let (start, _) = words.split_at_mut(first);
        bytemuck::cast_slice_mut(start).split_at_mut(unused).1.copy_from_slice(head);
        Self { words, first, unused }
    }

    pub(crate) fn get(&self) -> &[f32] {
        self.words.split_at(self.first).1
    }

    pub(crate) fn get_mut(&mut self) -> &mut [f32] {
        self.words.split_at_mut(self.first).1
    }

    /// Returns the elements; where there is no head, they are not copied.
    pub(crate) fn into_elements(mut self) -> Vec<f32> {
        self.words.drain(..self.first);
        self.words
    }

    /// Returns head and elements as bytes, not copied.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Words(self.words)).slice(self.unused..)
    }
}

/// Words as the bytes of an answer: in memory as on the wire, since both are little-endian.
struct Words(Vec<f32>);

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Bags of the features of a plan, feature by feature.
#[derive(Debug)]
pub(crate) struct Query {
    pub(crate) plan: Arc<Plan>,
    values: Ids,
    /// Bag bounds, `[F * B + 1]`.
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    /// The answer, once it has been looked up.
    pub(crate) matrix: Matrix,
}

impl Query {
    /// Checks the bags and wraps them.
    ///
    /// # Errors
    /// Those of [`Bags::new`].
    pub(crate) fn new(
        plan: Arc<Plan>,
        values: Ids,
        offsets: Vec<i64>,
        weights: Option<Vec<f32>>,
    ) -> Result<Self> {
        Bags::new(&values, &offsets, weights.as_deref(), plan.asked.len())?;
        Ok(Self { plan, values, offsets, weights, matrix: Matrix::default() })
    }

    pub(crate) fn bags(&self) -> Bags<'_> {
        bags_of(&self.plan, &self.values, &self.offsets, self.weights.as_deref())
    }

    pub(crate) fn row_count(&self) -> usize {
        self.plan.layout.output_rows(&self.bags())
    }

    /// Makes room for the answer behind `head`.
    pub(crate) fn make_room(&mut self, head: &[u8]) {
        self.matrix = Matrix::behind(head, self.plan.layout.output_len(&self.bags()));
    }

    /// Returns the elements of a vector of the plan's feature `at`.
    #[expect(clippy::indexing_slicing, reason = "positions are those of the plan's features")]
    pub(crate) fn dim(&self, at: usize) -> usize {
        self.plan.layout.features()[at].columns.dim
    }

    /// Returns the vectors of the plan's feature `at`, one slice per row.
    #[expect(clippy::indexing_slicing, reason = "columns of a plan lie within its output")]
    pub(crate) fn vectors(&self, at: usize) -> impl ExactSizeIterator<Item = &[f32]> {
        let columns = self.plan.layout.features()[at].columns.range(0);
        let rows = self.matrix.get().chunks_exact(self.plan.layout.output_dim());
        rows.map(move |row| &row[columns.clone()])
    }

    /// Checks that the ids of tables without an open vocabulary are rows.
    ///
    /// # Errors
    /// `Invalid`, naming table and id.
    pub(crate) fn check_ids(&self, source: Source<'_>) -> Result<()> {
        let bags = self.bags();
        for (at, feature) in self.plan.layout.features().iter().enumerate() {
            if source.ids.has(feature.table) {
                continue;
            }
            let table = source.snapshot.schema().table(feature.table)?;
            let Some(ids) = self.values.get(self.plan.layout.range(&bags, at)) else {
                panic!("bags of feature {at} lie beyond their {} ids", self.values.len());
            };
            let is_bad = |id: &i64| *id as u64 >= table.row_count;
            if let Some(id) = ids.iter().copied().find(is_bad) {
                return Err(out_of_range(table, id));
            }
        }
        Ok(())
    }

    /// Looks the bags up; the matrix must have room.
    ///
    /// # Errors
    /// Those of [`View::lookup`].
    pub(crate) fn look_up(&mut self, source: Source<'_>) -> Result<LookupStats> {
        let Self { plan, values, offsets, weights, matrix } = self;
        let bags = bags_of(plan, values, offsets, weights.as_deref());
        look_up(source, plan, &bags, matrix.get_mut())
    }

    /// Begins to look the bags up, without waiting; ids are rows. Pages are asked for only if the
    /// lookup `may_read_async`. The matrix must have room.
    ///
    /// # Errors
    /// Those of [`View::begin_lookup`].
    pub(crate) fn begin(
        &mut self,
        Source { snapshot, .. }: Source<'_>,
        may_read_async: bool,
    ) -> Result<Begun> {
        let Self { plan, values, offsets, weights, matrix } = self;
        let bags = bags_of(plan, values, offsets, weights.as_deref());
        if may_read_async {
            return snapshot.begin_lookup(&plan.layout, &bags, matrix.get_mut());
        }
        let found = snapshot.lookup_resident(&plan.layout, &bags, matrix.get_mut())?;
        Ok(found.map_or(Begun::Left, Begun::Done))
    }

    /// Begins to ask shards for the bags; ids are rows.
    ///
    /// # Errors
    /// Those of [`ShardedRows::begin`].
    pub(crate) fn begin_elsewhere(&mut self, rows: &ShardedRows) -> Result<Asking> {
        rows.begin(&[self.ask()])
    }

    /// Ends a lookup of these bags which shards have answered. The matrix must have room.
    ///
    /// # Errors
    /// Those of [`ShardedRows::finish`].
    pub(crate) fn finish_elsewhere(
        &mut self,
        rows: &ShardedRows,
        answers: Answers,
        schema: &Schema,
    ) -> Result<LookupStats> {
        rows.finish(answers, schema, &mut [self.ask()])
    }

    fn ask(&mut self) -> Ask<'_> {
        let Self { plan, values, offsets, weights, matrix } = self;
        let bags = bags_of(plan, values, offsets, weights.as_deref());
        Ask { plan: &plan.layout, bags, out: matrix.get_mut() }
    }

    /// Ends a lookup of these bags whose pages have come.
    ///
    /// # Errors
    /// Those of [`PendingLookup::finish`].
    pub(crate) fn finish(&mut self, pending: PendingLookup) -> Result<LookupStats> {
        let Self { plan, values, offsets, weights, matrix } = self;
        let bags = bags_of(plan, values, offsets, weights.as_deref());
        pending.finish(&plan.layout, &bags, matrix.get_mut())
    }
}

/// Returns the bags of a query, whose matrix may be borrowed beside them.
fn bags_of<'a>(
    plan: &Plan,
    indices: &'a [i64],
    offsets: &'a [i64],
    weights: Option<&'a [f32]>,
) -> Bags<'a> {
    Bags { indices, offsets, weights, feature_count: plan.asked.len() }
}

/// Looks up bags of raw ids.
///
/// # Errors
/// Those of [`View::lookup`].
pub(crate) fn look_up(
    Source { snapshot, ids, .. }: Source<'_>,
    plan: &Plan,
    bags: &Bags<'_>,
    out: &mut [f32],
) -> Result<LookupStats> {
    if ids.is_empty() {
        return snapshot.lookup(&plan.layout, bags, out);
    }
    let mut rows = vec![0; bags.indices.len()];
    ids.translate(snapshot, &plan.layout, bags, &mut rows)?;
    let bags = Bags { indices: &rows, ..*bags };
    snapshot.lookup(&plan.layout, &bags, out)
}
