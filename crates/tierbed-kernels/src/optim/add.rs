//! Adding the gradients of a batch to the sums of its rows.
//!
//! Features with a table of their own are added in blocks of samples, side by side, so that the
//! gradient is passed once, from front to back. Features that share a table follow each other, as
//! the order of additions says.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per use, by slicing")]

use std::ops::Range;

use super::sums::RowSums;
use super::FeatureStep;
use crate::accumulate::{by_shape, Shaped};
use crate::batch::{FeatureRows, INDICES_AHEAD};
use crate::layout::Pooling;
use crate::simd::{Job, Lanes, LANES};
use crate::Kernels;

/// Samples of a block: the sums of a feature are found and asked for before any is added to.
const BLOCK_BAGS: usize = 32;

/// How adding ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Added {
    /// All gradients are in the sums, and all are numbers.
    Numbers,
    /// All are in the sums, and some are nan or inf.
    NotFinite,
    /// The sums had no room for all.
    NoRoom,
}

impl Kernels {
    /// Adds the gradients of `features`, all of `dim`, to the sums of their rows.
    pub(super) fn add_features(
        self,
        grad: &[f32],
        features: &[&FeatureStep<'_>],
        sums: &mut RowSums,
    ) -> Added {
        let Some(first) = features.first() else { return Added::Numbers };
        let dim = first.rows.columns.dim;
        self.run(AddFeatures { grad, features, dim, sums })
    }
}

struct AddFeatures<'a> {
    grad: &'a [f32],
    features: &'a [&'a FeatureStep<'a>],
    dim: usize,
    sums: &'a mut RowSums,
}

impl Job for AddFeatures<'_> {
    type Output = Added;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Added {
        let dim = self.dim;
        by_shape::<L, _>(self, dim)
    }
}

impl<'a> Shaped for AddFeatures<'a> {
    type Output = Added;

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) -> Added {
        let Self { grad, features, sums, .. } = self;
        let is_alone = |one: &FeatureStep<'_>| {
            features.iter().filter(|other| other.table == one.table).count() == 1
        };
        let parts = |one: &&'a FeatureStep<'a>| Part::of(one, sums.table_at(one));
        let (alone, sharing): (Vec<_>, Vec<_>) =
            features.iter().map(parts).partition(|part| is_alone(part.feature));
        let mut adder = Adder::<L> { grad, sums, differences: L::splat(0.0) };
        let bag_count = features.first().map_or(0, |one| one.rows.bag_count());
        let blocks = || (0..bag_count).step_by(BLOCK_BAGS);
        let side_by_side = blocks().flat_map(|first| alone.iter().map(move |part| (first, part)));
        let in_turns = sharing.iter().flat_map(|part| blocks().map(move |first| (first, part)));
        for (first, part) in side_by_side.chain(in_turns) {
            let bags = first..(first + BLOCK_BAGS).min(bag_count);
            let has_room = match part.way {
                Way::OneHot => adder.add_one_hot::<REST, TAIL>(part, bags),
                Way::Plain => adder.add_bags::<REST, TAIL, false>(part, bags),
                Way::Scaled => adder.add_bags::<REST, TAIL, true>(part, bags),
            };
            if !has_room {
                return Added::NoRoom;
            }
        }
        match adder.differences.reduce_add() == 0.0 {
            true => Added::Numbers,
            false => Added::NotFinite,
        }
    }
}

/// A feature whose gradients are added.
struct Part<'a> {
    feature: &'a FeatureStep<'a>,
    /// Of its table, among those of the sums.
    table_at: usize,
    way: Way,
}

impl<'a> Part<'a> {
    fn of(feature: &'a FeatureStep<'a>, table_at: usize) -> Self {
        Self { feature, table_at, way: Way::of(&feature.rows) }
    }
}

/// How the gradients of a feature are added.
#[derive(Clone, Copy)]
enum Way {
    /// As they are, one for each bag.
    OneHot,
    /// As they are.
    Plain,
    /// With weights or counts, or belonging to indices.
    Scaled,
}

impl Way {
    fn of(rows: &FeatureRows<'_>) -> Self {
        match rows.pooling == Pooling::Sum && rows.weights.is_none() {
            true if rows.is_one_hot() => Self::OneHot,
            true => Self::Plain,
            false => Self::Scaled,
        }
    }
}

struct Adder<'a, L> {
    grad: &'a [f32],
    sums: &'a mut RowSums,
    /// The sum of `g - g` over all gradients: 0 for numbers, nan as soon as one is nan or inf.
    differences: L,
}

impl<L: Lanes> Adder<'_, L> {
    /// Adds the gradients of bags of one index each. Returns whether there was room.
    #[inline(always)]
    fn add_one_hot<const REST: usize, const TAIL: bool>(
        &mut self,
        part: &Part<'_>,
        bags: Range<usize>,
    ) -> bool {
        let FeatureRows { numbers, columns, .. } = part.feature.rows;
        let Some(mut open) = self.sums.open(part.feature, part.table_at, bags.len()) else {
            return false;
        };
        let mut vectors = [0; BLOCK_BAGS];
        for (vector, &number) in vectors.iter_mut().zip(&numbers[bags.clone()]) {
            *vector = open.find(number);
            open.prefetch_sum(*vector);
        }
        for &soon in numbers[bags.end..].iter().take(BLOCK_BAGS) {
            open.prefetch(soon);
        }
        for (bag, &vector) in bags.zip(&vectors) {
            let gradient = &self.grad[columns.range(bag)];
            let sum = open.sum(vector);
            add::<L, REST, TAIL, false>(sum, gradient, OneScale::ONE, &mut self.differences);
        }
        open.close();
        true
    }

    #[inline(always)]
    fn add_bags<const REST: usize, const TAIL: bool, const SCALED: bool>(
        &mut self,
        part: &Part<'_>,
        bags: Range<usize>,
    ) -> bool {
        let rows = &part.feature.rows;
        let FeatureRows { numbers, columns, .. } = *rows;
        let index_count = rows.indices(bags.end - 1).end - rows.indices(bags.start).start;
        let Some(mut open) = self.sums.open(part.feature, part.table_at, index_count) else {
            return false;
        };
        for bag in bags {
            let indices = rows.indices(bag);
            let scale = Scale::of(rows, indices.len());
            for index in indices {
                if let Some(&soon) = numbers.get(index + INDICES_AHEAD) {
                    open.prefetch(soon);
                }
                let of = if SCALED { rows.vector(bag, index) } else { bag };
                let gradient = &self.grad[columns.range(of)];
                let vector = open.find(numbers[index]);
                let sum = open.sum(vector);
                add::<L, REST, TAIL, SCALED>(sum, gradient, scale.at(index), &mut self.differences);
            }
        }
        open.close();
        true
    }
}

/// What is done to the gradients of one bag before they are added.
#[derive(Clone, Copy)]
struct Scale<'a> {
    weights: Option<&'a [f32]>,
    count: Option<f32>,
}

/// Weight of an index and count of its bag, where they apply.
#[derive(Clone, Copy)]
struct OneScale {
    weight: Option<f32>,
    count: Option<f32>,
}

impl OneScale {
    /// Leaves a gradient as it is.
    const ONE: Self = Self { weight: None, count: None };
}

impl<'a> Scale<'a> {
    #[inline(always)]
    fn of(rows: &FeatureRows<'a>, count: usize) -> Self {
        let is_pooled = rows.pooling != Pooling::None;
        Self {
            weights: rows.weights.filter(|_| is_pooled),
            count: (rows.pooling == Pooling::Mean).then_some(count as f32),
        }
    }

    #[inline(always)]
    fn at(self, index: usize) -> OneScale {
        OneScale { weight: self.weights.map(|weights| weights[index]), count: self.count }
    }
}

/// Adds the scaled gradient to `sum`, and its difference from itself to `differences`.
#[inline(always)]
fn add<L: Lanes, const REST: usize, const TAIL: bool, const SCALED: bool>(
    sum: &mut [f32],
    grad: &[f32],
    scale: OneScale,
    differences: &mut L,
) {
    let (sums, _) = sum.as_chunks_mut::<LANES>();
    let (full, part) = grad.as_chunks::<LANES>();
    let (blocks, rest) = sums.split_at_mut(full.len() - REST);
    let (blocks_grad, rest_grad) = full.split_at(full.len() - REST);
    for (sum, grad) in blocks.iter_mut().zip(blocks_grad) {
        add_lanes::<L, SCALED>(sum, L::load(grad), scale, differences);
    }
    let (rest, last) = rest.split_at_mut(REST);
    for (sum, grad) in rest.iter_mut().zip(&rest_grad[..REST]) {
        add_lanes::<L, SCALED>(sum, L::load(grad), scale, differences);
    }
    if let (true, Some(sum)) = (TAIL, last.first_mut()) {
        add_lanes::<L, SCALED>(sum, L::load_part(part), scale, differences);
    }
}

// No closures: one that is not inlined has no vector instructions.
#[inline(always)]
fn add_lanes<L: Lanes, const SCALED: bool>(
    sum: &mut [f32; LANES],
    mut grad: L,
    scale: OneScale,
    differences: &mut L,
) {
    *differences = differences.add(grad.sub(grad));
    if let (true, Some(weight)) = (SCALED, scale.weight) {
        grad = L::splat(weight).mul(grad);
    }
    if let (true, Some(count)) = (SCALED, scale.count) {
        grad = grad.div(L::splat(count));
    }
    L::load(sum).add(grad).store(sum);
}
