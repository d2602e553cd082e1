//! Four-bit codec between the two bounds per row that err least.
//!
//! With 16 levels the extremes of a row cost everybody precision. The search shrinks the range from
//! both ends, on a coarse grid and then around the best point, and keeps what has the least squared
//! error after the final least-squares fit of scale and bias to the codes chosen.

#![expect(clippy::indexing_slicing, reason = "lengths are checked by the caller")]

use half::bf16;

use super::decode::Decoder;
use super::int8::{bounds, Affine};
use super::nibbles;
use crate::simd::Lanes;

/// Bytes of scale and bias.
pub(super) const HEAD_BYTES: usize = super::int8::HEAD_BYTES;
/// Steps between the least and the greatest code.
const STEPS: f32 = 15.0;
/// Points of the coarse grid, per end.
const GRID: u8 = 6;
/// Share of the range between two of them.
const GRID_STEP: f32 = 0.06;

/// How much of the range is cut off below and above.
#[derive(Clone, Copy)]
struct Cut {
    low: f32,
    high: f32,
}

impl Cut {
    /// Returns the meaning of codes over `low..=high` without what is cut off.
    fn affine(self, low: f32, high: f32) -> Affine {
        let range = high - low;
        let (low, high) = (low + self.low * range, high - self.high * range);
        rounded((high - low) / STEPS, low)
    }
}

/// Returns scale and bias as they can be kept.
fn rounded(scale: f32, bias: f32) -> Affine {
    let keep = |value: f32| bf16::from_f32(value).to_f32() + 0.0;
    Affine { scale: keep(scale.max(0.0)), bias: keep(bias) }
}

/// Returns the squared error of `row`, relative to `unit` squared so that it cannot overflow.
fn error_of(row: &[f32], affine: Affine, unit: f32) -> f64 {
    let error = |&value: &f32| {
        let difference = (value - affine.value(affine.nearest(value, STEPS))) / unit;
        f64::from(difference) * f64::from(difference)
    };
    row.iter().map(error).sum()
}

/// Returns scale and bias that fit the codes `affine` chooses, by least squares.
fn refit(row: &[f32], affine: Affine) -> Affine {
    let count = row.len() as f64;
    let (mut code_sum, mut value_sum, mut code_squares, mut products) = (0.0, 0.0, 0.0, 0.0);
    for &value in row {
        let (code, value) = (f64::from(affine.nearest(value, STEPS)), f64::from(value));
        code_sum += code;
        value_sum += value;
        code_squares += code * code;
        products += code * value;
    }
    let spread = count * code_squares - code_sum * code_sum;
    if spread <= 0.0 {
        return affine;
    }
    let scale = (count * products - code_sum * value_sum) / spread;
    rounded(scale as f32, ((value_sum - scale * code_sum) / count) as f32)
}

/// Returns the meaning of codes that errs least of those tried.
fn search(row: &[f32]) -> Affine {
    let (low, high) = bounds(row);
    let unit = high - low;
    if unit <= 0.0 {
        return rounded(0.0, low);
    }
    let mut best = (Cut { low: 0.0, high: 0.0 }, f64::INFINITY);
    let consider = |cut: Cut, best: &mut (Cut, f64)| {
        let error = error_of(row, cut.affine(low, high), unit);
        if error < best.1 {
            *best = (cut, error);
        }
    };
    for below in 0..GRID {
        for above in 0..GRID {
            let cut = Cut { low: f32::from(below) * GRID_STEP, high: f32::from(above) * GRID_STEP };
            consider(cut, &mut best);
        }
    }
    for step in [GRID_STEP / 2.0, GRID_STEP / 4.0] {
        let centre = best.0;
        for (below, above) in [
            (-1.0, -1.0),
            (-1.0, 0.0),
            (-1.0, 1.0),
            (0.0, -1.0),
            (0.0, 1.0),
            (1.0, -1.0),
            (1.0, 0.0),
            (1.0, 1.0),
        ] {
            let cut = Cut { low: centre.low + below * step, high: centre.high + above * step };
            consider(cut, &mut best);
        }
    }
    let found = best.0.affine(low, high);
    let fitted = refit(row, found);
    if error_of(row, fitted, unit) < best.1 {
        fitted
    } else {
        found
    }
}

pub(super) fn encode(row: &[f32], code: &mut [u8]) {
    let affine = search(row);
    affine.write(code);
    let codes = row.iter().map(|&value| affine.nearest(value, STEPS));
    nibbles::pack(codes, row.len(), &mut code[HEAD_BYTES..]);
}

/// Decodes [`super::Codec::Int4`].
#[derive(Clone, Copy)]
pub(super) struct Int4;

impl Decoder for Int4 {
    type Head = Affine;

    #[inline(always)]
    fn head(self, code: &[u8]) -> Affine {
        Affine::read(code)
    }

    #[inline(always)]
    fn full<L: Lanes>(self, head: Affine, code: &[u8], at: usize) -> L {
        head.lanes(&nibbles::full(&code[HEAD_BYTES..], at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, head: Affine, code: &[u8], at: usize, len: usize) -> L {
        head.lanes(&nibbles::part(&code[HEAD_BYTES..], at, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_few_far_numbers_give_way_to_the_many_near_ones() {
        let row: Vec<f32> = (0..256).map(|i| (i as f32 * 0.37).sin().powi(9)).collect();
        let (low, high) = bounds(&row);
        let whole = Cut { low: 0.0, high: 0.0 }.affine(low, high);
        let found = search(&row);
        assert!(error_of(&row, found, 1.0) < 0.9 * error_of(&row, whole, 1.0));
    }

    #[test]
    fn equal_numbers_need_no_scale() {
        let affine = search(&[0.5; 8]);
        assert_eq!((affine.scale, affine.bias), (0.0, 0.5));
    }
}
