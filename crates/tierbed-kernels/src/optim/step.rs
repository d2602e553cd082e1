//! Here are the gradients of a batch, step each of its rows once, in place.
//!
//! Gradients are passed once, from front to back. A row that is used once is stepped where its
//! gradient is met. A row that is used more often gets a sum that stays open until its last use;
//! then it is stepped and the sum is free for another row, so that few sums, which stay near, do
//! for many rows. Additions happen as in `Kernels::sum_grads_grouped`: onto +0, in index order,
//! features of one table after each other.
//!
//! ```text
//! state of a row   0: not in the batch   n: n uses to come, none met   OPEN | s: has sum s
//! ```

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per use, by slicing")]

use tierbed_core::{OptimizerKind, TableId};

use super::{AnyUpdate, Decay, NoDecay, Optimizer, Prepared, RowMut, L2};
use crate::batch::{blocks, FeatureRows, BLOCK_BAGS, INDICES_AHEAD};
use crate::layout::Pooling;
use crate::pool_batch::distinct;
use crate::simd::{prefetch, Job, Lanes, LANES, LINE_BYTES};
use crate::Kernels;

const OPEN: u32 = 1 << 31;
/// The sum that rows with one use borrow.
const BRIEF: u32 = 0;

/// One feature of a batch and the step of its table.
#[derive(Debug, Clone, Copy)]
pub struct FeatureStep<'a> {
    /// The rows, and where the gradients of their vectors lie.
    pub rows: FeatureRows<'a>,
    /// The table; features of one table are summed one after the other.
    pub table: TableId,
    /// The step of the table.
    pub step: &'a Prepared,
    /// What is added to the table's row numbers so that they differ from those of other tables.
    pub number_first: usize,
}

/// Work arrays of [`Kernels::step_batch`], kept from batch to batch.
#[derive(Debug, Default)]
pub struct OpenSums {
    /// State of each row, of all tables; all 0 between batches.
    states: Vec<u32>,
    sums: Sums,
}

#[derive(Debug, Default)]
struct Sums {
    /// Each sum has the batch's longest dim, padded to whole vectors.
    words: Vec<f32>,
    /// Where the first one begins: on the border of a cache line.
    first: usize,
    stride: usize,
    /// Uses to come of the row of each sum.
    left: Vec<u32>,
    /// Sums without a row.
    free: Vec<u32>,
}

impl OpenSums {
    /// Returns the most bytes that batches of `index_count` indices, with rows of at most `dim`
    /// weights numbered below `number_count`, can take.
    #[must_use]
    pub fn memory_bytes(index_count: u64, dim: usize, number_count: u64) -> u64 {
        // An open row has two uses or more; vectors grow by doubling, `states` does not.
        let sum_count = 2 + index_count / 2;
        4 * number_count + 2 * sum_count * (4 * dim.next_multiple_of(LANES) as u64 + 2 * 4)
    }

    // Counts the uses of all rows and makes room for a first sum; returns the number of rows.
    fn begin(&mut self, features: &[FeatureStep<'_>], number_count: usize) -> usize {
        let use_count: usize = features.iter().map(|feature| feature.rows.numbers.len()).sum();
        assert!(use_count < OPEN as usize, "a batch holds fewer than 2^31 indices");
        let known = self.states.len();
        if known < number_count {
            self.states.reserve_exact(number_count - known);
            self.states.resize(number_count, 0);
        }
        let (mut row_count, mut open_max) = (0, 0);
        for feature in features {
            let states = &mut self.states[feature.number_first..];
            for &number in feature.rows.numbers {
                let state = &mut states[number as usize];
                row_count += usize::from(*state == 0);
                open_max += usize::from(*state == 1);
                *state += 1;
            }
        }
        let dim = features.iter().map(|feature| feature.rows.columns.dim).max().unwrap_or(0);
        self.sums.clear(dim.next_multiple_of(LANES), 1 + open_max);
        row_count
    }
}

impl Sums {
    // Makes room for `count` sums at a time.
    fn clear(&mut self, stride: usize, count: usize) {
        self.stride = stride;
        self.left.clear();
        self.left.resize(count, 0);
        self.free.clear();
        self.free.extend((BRIEF + 1..count as u32).rev());
        let wanted = count * stride + LANES;
        if self.words.len() < wanted {
            self.words.resize(wanted, 0.0);
        }
        // A vector that lies in two lines costs twice.
        self.first = self.words.as_ptr().align_offset(LINE_BYTES).min(LANES);
    }

    #[inline(always)]
    fn sum_mut(&mut self, sum: u32) -> &mut [f32] {
        &mut self.words[self.first + sum as usize * self.stride..][..self.stride]
    }

    /// Adds a gradient to the sum of the row in `state`; returns the sum if that was the last.
    #[inline(always)]
    fn meet<L: Lanes, const SCALED: bool>(
        &mut self,
        state: &mut u32,
        grad: &[f32],
        scale: OneScale,
    ) -> Option<&[f32]> {
        let found = *state;
        if found == 1 {
            *state = 0;
            let sum = self.sum_mut(BRIEF);
            add_scaled::<L, true, SCALED>(sum, grad, scale);
            return Some(sum);
        }
        if found & OPEN == 0 {
            // There are as many as rows that are used more than once.
            let sum = self.free.pop().unwrap_or(BRIEF);
            self.left[sum as usize] = found - 1;
            *state = OPEN | sum;
            add_scaled::<L, true, SCALED>(self.sum_mut(sum), grad, scale);
            return None;
        }
        let sum = found & !OPEN;
        let left = &mut self.left[sum as usize];
        *left -= 1;
        let is_last = *left == 0;
        if is_last {
            *state = 0;
            self.free.push(sum);
        }
        let sum = self.sum_mut(sum);
        add_scaled::<L, false, SCALED>(sum, grad, scale);
        is_last.then_some(sum)
    }
}

impl Kernels {
    /// Sums the gradients of each row over all its uses and applies one step to its record, in
    /// place: weights, state, and one more use in the last word of the record. Returns how many
    /// rows were stepped.
    ///
    /// `grad` is `[B, stride]`, or `[E, stride]` for features without pooling. Row numbers plus
    /// `number_first` are below `number_count`.
    ///
    /// # Panics
    /// When parts of a feature do not belong together, features differ in their number of bags,
    /// or a row, number or vector lies outside what there is.
    pub fn step_batch(
        self,
        grad: &[f32],
        features: &[FeatureStep<'_>],
        sums: &mut OpenSums,
        (arena, number_count): (&mut [f32], usize),
    ) -> usize {
        let Some(batch_size) = features.first().map(|feature| feature.rows.bag_count()) else {
            return 0;
        };
        for FeatureStep { rows, .. } in features {
            rows.check();
            assert_eq!(rows.bag_count(), batch_size, "features must have one bag per sample");
            assert!(rows.columns.dim < rows.places.words, "a record ends with its use count");
        }
        let row_count = sums.begin(features, number_count);
        let is_shared = |one: &FeatureStep<'_>| {
            features.iter().filter(|other| other.table == one.table).count() > 1
        };
        let (shared, alone): (Vec<_>, Vec<_>) = features.iter().copied().partition(is_shared);
        for key in distinct(alone.iter().map(FeatureStep::key)) {
            let group: Vec<_> = alone.iter().copied().filter(|one| one.key() == key).collect();
            self.step_group(grad, &group, sums, arena);
        }
        for feature in shared {
            self.step_group(grad, &[feature], sums, arena);
        }
        row_count
    }

    // All features of `group` have the same key.
    fn step_group(
        self,
        grad: &[f32],
        group: &[FeatureStep<'_>],
        sums: &mut OpenSums,
        arena: &mut [f32],
    ) {
        let Some(first) = group.first() else { return };
        macro_rules! with {
            ($variant:ident) => {{
                let steps = |step: &Prepared| match step.update {
                    AnyUpdate::$variant(optimizer) => Some(optimizer),
                    _ => None,
                };
                let steps: Vec<_> = group.iter().filter_map(|one| steps(one.step)).collect();
                self.step_with(&steps, Batch { grad, group, sums, arena });
            }};
        }
        match first.step.update {
            AnyUpdate::Sgd(_) => with!(Sgd),
            AnyUpdate::Adagrad(_) => with!(Adagrad),
            AnyUpdate::RowWiseAdagrad(_) => with!(RowWiseAdagrad),
            AnyUpdate::Adam(_) => with!(Adam),
            AnyUpdate::PartialRowWiseAdam(_) => with!(PartialRowWiseAdam),
        }
    }

    #[inline(always)]
    fn step_with<O: Optimizer>(self, optimizers: &[O], batch: Batch<'_>) {
        let decay = |feature: &FeatureStep<'_>| feature.step.weight_decay;
        if batch.group.iter().all(|feature| decay(feature) == 0.0) {
            let decays = vec![NoDecay; optimizers.len()];
            self.step_scaled(optimizers, &decays, batch);
        } else {
            let decays: Vec<_> = batch.group.iter().map(|feature| L2(decay(feature))).collect();
            self.step_scaled(optimizers, &decays, batch);
        }
    }
}

impl Kernels {
    #[inline(always)]
    fn step_scaled<O: Optimizer, D: Decay>(self, optimizers: &[O], decays: &[D], batch: Batch<'_>) {
        let is_plain = |feature: &FeatureStep<'_>| {
            feature.rows.pooling == Pooling::Sum && feature.rows.weights.is_none()
        };
        if batch.group.iter().all(is_plain) {
            self.run(StepBatch::<_, _, false> { optimizers, decays, batch });
        } else {
            self.run(StepBatch::<_, _, true> { optimizers, decays, batch });
        }
    }
}

impl FeatureStep<'_> {
    /// What features must share to be stepped in turns by one loop.
    fn key(&self) -> (usize, OptimizerKind, bool) {
        (self.rows.columns.dim, self.step.kind, self.step.weight_decay == 0.0)
    }
}

/// What a loop over a batch looks at.
struct Batch<'a> {
    grad: &'a [f32],
    group: &'a [FeatureStep<'a>],
    sums: &'a mut OpenSums,
    arena: &'a mut [f32],
}

/// With `SCALED`, gradients have weights or counts, or belong to indices.
struct StepBatch<'a, O, D, const SCALED: bool> {
    optimizers: &'a [O],
    decays: &'a [D],
    batch: Batch<'a>,
}

impl<O: Optimizer, D: Decay, const SCALED: bool> Job for StepBatch<'_, O, D, SCALED> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { optimizers, decays, batch } = self;
        let Batch { grad, group, sums, arena } = batch;
        let Some(batch_size) = group.first().map(|feature| feature.rows.bag_count()) else {
            return;
        };
        for block in blocks(batch_size) {
            for ((feature, optimizer), decay) in group.iter().zip(optimizers).zip(decays) {
                let turn = Turn { feature, optimizer, decay: *decay, grad };
                for bag in block.clone() {
                    turn.step_bag::<L, SCALED>(bag, sums, arena);
                }
            }
        }
    }
}

/// A feature's turn in a block.
struct Turn<'a, O, D> {
    feature: &'a FeatureStep<'a>,
    optimizer: &'a O,
    decay: D,
    grad: &'a [f32],
}

impl<O: Optimizer, D: Decay> Turn<'_, O, D> {
    #[inline(always)]
    fn step_bag<L: Lanes, const SCALED: bool>(
        &self,
        bag: usize,
        sums: &mut OpenSums,
        arena: &mut [f32],
    ) {
        let rows = &self.feature.rows;
        let FeatureRows { numbers, places, columns, .. } = *rows;
        let states = &mut sums.states[self.feature.number_first..];
        let indices = rows.indices(bag);
        let scale = Scale::of(rows, indices.len());
        // The block after this one lies on pages no processor looks at by itself.
        prefetch(self.grad, columns.start(bag + BLOCK_BAGS), columns.dim);
        for index in indices {
            if let Some(&soon) = numbers.get(index + INDICES_AHEAD) {
                // Whether it is stepped there is not asked: a wrong guess costs more.
                prefetch(arena, places.start(soon), places.words);
                prefetch(states, soon as usize, 1);
            }
            let vector = if SCALED { rows.vector(bag, index) } else { bag };
            let vector = &self.grad[columns.range(vector)];
            let number = numbers[index];
            let state = &mut states[number as usize];
            let Some(sum) = sums.sums.meet::<L, SCALED>(state, vector, scale.at(index)) else {
                continue;
            };
            let record = &mut arena[places.start(number)..][..places.words];
            let (weights, rest) = record.split_at_mut(columns.dim);
            let [state @ .., use_count] = rest else { continue };
            let row = RowMut { weights, state };
            self.optimizer.update::<L, D>(row, &sum[..columns.dim], self.decay);
            *use_count = f32::from_bits(use_count.to_bits().saturating_add(1));
        }
    }
}

/// What is done to the gradients of one bag before they are added.
#[derive(Clone, Copy)]
struct Scale<'a> {
    weights: Option<&'a [f32]>,
    count: Option<f32>,
}

/// Weight of an index and count of its bag, where they apply.
type OneScale = (Option<f32>, Option<f32>);

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
        (self.weights.map(|weights| weights[index]), self.count)
    }
}

/// Adds the scaled gradient to `sum`, or to +0 when the sum is `NEW`.
#[inline(always)]
fn add_scaled<L: Lanes, const NEW: bool, const SCALED: bool>(
    sum: &mut [f32],
    grad: &[f32],
    scale: OneScale,
) {
    let (sums, _) = sum.as_chunks_mut::<LANES>();
    let (full, part) = grad.as_chunks::<LANES>();
    for (sum, grad) in sums.iter_mut().zip(full) {
        add_lanes::<L, NEW, SCALED>(sum, L::load(grad), scale);
    }
    if let (false, Some(sum)) = (part.is_empty(), sums.get_mut(full.len())) {
        add_lanes::<L, NEW, SCALED>(sum, L::load_part(part), scale);
    }
}

// No closures: one that is not inlined has no vector instructions.
#[inline(always)]
fn add_lanes<L: Lanes, const NEW: bool, const SCALED: bool>(
    sum: &mut [f32; LANES],
    mut grad: L,
    (weight, count): OneScale,
) {
    if let (true, Some(weight)) = (SCALED, weight) {
        grad = L::splat(weight).mul(grad);
    }
    if let (true, Some(count)) = (SCALED, count) {
        grad = grad.div(L::splat(count));
    }
    let old = if NEW { L::splat(0.0) } else { L::load(sum) };
    old.add(grad).store(sum);
}
