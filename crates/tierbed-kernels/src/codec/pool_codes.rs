//! Decoding fused with pooling: the codes of a bag in, one vector out.
//!
//! A block of 64 columns stays in registers while the codes of a bag pass by, in index order, as
//! with rows that are not coded (`accumulate`). So the bits are those of decoding first.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use std::ops::Range;

use super::decode::{
    code_at, with_decoder, Codes, Decoder, WithDecoder, FAR_ARENA_BYTES, PREFETCH_AHEAD,
};
use crate::accumulate::{BLOCK, BLOCK_LANES};
use crate::pool_to::{Destination, FeatureBags, FeatureRange, PoolFeature, PoolTo, Pooled};
use crate::simd::{prefetch, Lanes, LANES};
use crate::Kernels;

/// The rows of one feature, as codes of which every one begins inside the arena.
#[derive(Clone, Copy)]
struct Coded<'a, D> {
    decoder: D,
    codes: Codes<'a>,
    code_bytes: usize,
    is_far: bool,
}

impl<'a, D: Decoder> Coded<'a, D> {
    fn new(decoder: D, codes: Codes<'a>, dim: usize) -> Self {
        let code_bytes = codes.codec.code_bytes(dim);
        Self { decoder, codes, code_bytes, is_far: codes.arena.len() >= FAR_ARENA_BYTES }
    }

    /// Returns the code of index `i`, and asks for that of one further on.
    #[inline(always)]
    fn code(&self, i: usize) -> &'a [u8] {
        let Codes { arena, starts, .. } = self.codes;
        if let (true, Some(&ahead)) = (self.is_far, starts.get(i + PREFETCH_AHEAD)) {
            prefetch(arena, ahead, self.code_bytes);
        }
        code_at(arena, starts[i], self.code_bytes)
    }

    /// Sums columns `at..` of the rows: `FULL` registers, and then a part if `TAIL`.
    #[inline(always)]
    fn sum_block<L: Lanes, const FULL: usize, const TAIL: bool>(
        &self,
        range: Range<usize>,
        at: usize,
        sum: &mut [f32],
    ) {
        let (sum_full, sum_part) = sum.as_chunks_mut::<LANES>();
        let sum_full = &mut sum_full[..FULL];
        let mut full = [L::splat(0.0); FULL];
        let mut part = L::splat(0.0);
        for i in range {
            let code = self.code(i);
            let head = self.decoder.head(code);
            let weight = self.codes.weights.map(|weights| L::splat(weights[i]));
            let scale = |lanes: L| weight.map_or(lanes, |weight| weight.mul(lanes));
            for (k, lanes) in full.iter_mut().enumerate() {
                *lanes = lanes.add(scale(self.decoder.full::<L>(head, code, at + k * LANES)));
            }
            if TAIL {
                let from = at + FULL * LANES;
                part = part.add(scale(self.decoder.part::<L>(head, code, from, sum_part.len())));
            }
        }
        for (lanes, to) in full.iter().zip(sum_full) {
            lanes.store(to);
        }
        if TAIL {
            part.store_part(sum_part);
        }
    }
}

impl<D: Decoder> Pooled for Coded<'_, D> {
    // There is a loop for each codec and instruction set already.
    const IS_SHAPED: bool = false;

    #[inline(always)]
    fn index_count(&self) -> usize {
        self.codes.starts.len()
    }

    #[inline(always)]
    fn sum<L: Lanes, const REST: usize, const TAIL: bool>(
        &self,
        rows: Range<usize>,
        to: &mut [f32],
    ) {
        // 64 columns at a time, the vectors left, and then what is less than one.
        let mut blocks = to.chunks_exact_mut(BLOCK);
        let mut at = 0;
        for block in &mut blocks {
            self.sum_block::<L, BLOCK_LANES, false>(rows.clone(), at, block);
            at += BLOCK;
        }
        let rest = blocks.into_remainder();
        let (full, rest) = rest.split_at_mut(rest.len() / LANES * LANES);
        match full.len() / LANES {
            3 => self.sum_block::<L, 3, false>(rows.clone(), at, full),
            2 => self.sum_block::<L, 2, false>(rows.clone(), at, full),
            1 => self.sum_block::<L, 1, false>(rows.clone(), at, full),
            _ => {}
        }
        at += full.len();
        if !rest.is_empty() {
            self.sum_block::<L, 0, true>(rows, at, rest);
        }
    }

    #[inline(always)]
    fn copy<L: Lanes, const REST: usize, const TAIL: bool>(&self, row: usize, to: &mut [f32]) {
        let code = self.code(row);
        let head = self.decoder.head(code);
        let (full, part) = to.as_chunks_mut::<LANES>();
        let mut at = 0;
        for lanes in full {
            self.decoder.full::<L>(head, code, at).store(lanes);
            at += LANES;
        }
        if !part.is_empty() {
            self.decoder.part::<L>(head, code, at, part.len()).store_part(part);
        }
    }
}

impl FeatureBags for Codes<'_> {
    fn check(&self, of: &PoolFeature<'_>) {
        assert!(self.codec.check_dim(of.dim).is_ok(), "the codec keeps rows of another dim");
        check_weights(self);
    }

    #[inline(always)]
    fn pool_bags_to(
        self,
        kernels: Kernels,
        of: FeatureRange<'_>,
        near: &mut [f32],
        to: &mut impl Destination,
    ) {
        with_decoder(self.codec, PoolCodesTo { kernels, codes: self, of, near, to });
    }
}

/// Some bags of a feature, on their way to their places once the decoder is known.
struct PoolCodesTo<'a, T> {
    kernels: Kernels,
    codes: Codes<'a>,
    of: FeatureRange<'a>,
    near: &'a mut [f32],
    to: &'a mut T,
}

impl<T: Destination> WithDecoder for PoolCodesTo<'_, T> {
    #[inline(always)]
    fn call<D: Decoder>(self, decoder: D) {
        let Self { kernels, codes, of: FeatureRange { of, bags }, near, to } = self;
        let source = Coded::new(decoder, codes, of.dim);
        kernels.run(PoolTo { source, bags, of, near, to });
    }
}

impl Kernels {
    /// Pools the decoded rows of the bags of all features into their places, as
    /// [`pool_all_to`](Kernels::pool_all_to) does with rows that are not coded; without pooling
    /// each row goes to its place.
    ///
    /// # Panics
    /// When weights are not `[E]`, a place is not `[dim]`, a code lies outside its arena, or a dim
    /// is not one the codec keeps.
    pub fn pool_codes_to(
        self,
        features: &[(Codes<'_>, PoolFeature<'_>)],
        to: &mut dyn Destination,
    ) {
        self.pool_features_to(features, &mut Anywhere(to));
    }
}

/// Any destination: one set of loops for all, as there is one for each codec and instruction set,
/// and a call per vector costs little beside decoding its rows.
struct Anywhere<'a>(&'a mut dyn Destination);

impl Destination for Anywhere<'_> {
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        self.0.vector(feature, at)
    }

    fn is_far(&self) -> bool {
        self.0.is_far()
    }

    fn finish(&mut self, feature: usize, at: usize) {
        self.0.finish(feature, at);
    }
}

fn check_weights(codes: &Codes<'_>) {
    if let Some(weights) = codes.weights {
        assert_eq!(weights.len(), codes.starts.len(), "weights must have one value per index");
    }
}
