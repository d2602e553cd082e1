//! Initial values of rows never written.
//!
//! A pure function of (seed, row, element): elements `4 * k` to `4 * k + 3` of row `r` come from
//! the random bits of counter `[r low, r high, k, 0]` under key `[seed low, seed high]`
//! (Philox4x32-10). So a row can be left out of the files until its first update, rows may be
//! initialised in any order and by any number of machines, and the values never change: they are
//! part of the format of a store.

#![expect(clippy::indexing_slicing, reason = "a record is sliced by the layout of its table")]

use std::f64::consts::TAU;

use tierbed_core::{InitSpec, OptimizerKind, TableSchema};

use crate::philox::{high, low, philox4x32};

/// Elements per block of random bits.
const BLOCK: usize = 4;

/// Fills `out`, `[dim]`, with the initial weights of row `row` under `seed`.
///
/// Uniform values have 24 random bits, normal ones are Box-Muller pairs; both are computed in
/// `f64` with `libm`, then rounded, so every machine gets the same bits.
pub fn fill_initial(spec: &InitSpec, seed: u64, row: u64, out: &mut [f32]) {
    match *spec {
        InitSpec::Constant { value } => out.fill(value),
        InitSpec::Uniform { low, high } => {
            fill_blocks(seed, row, out, |bits| bits.map(|bits| uniform(bits, low, high)));
        }
        InitSpec::Normal { mean, std } => {
            let (mean, std) = (f64::from(mean), f64::from(std));
            fill_blocks(seed, row, out, |[a, b, c, d]| {
                let ([z0, z1], [z2, z3]) = (normal_pair(a, b), normal_pair(c, d));
                [z0, z1, z2, z3].map(|z| (mean + std * z) as f32)
            });
        }
    }
}

/// Fills a whole record of `table` as it is before the row's first update: initial weights,
/// initial state (`state_init` in the accumulators of the Adagrads, 0 in Adam's moments), use
/// count 0.
///
/// # Panics
/// When `record` is not `record_words` of the table.
pub fn init_record(table: &TableSchema, row: u64, record: &mut [f32]) {
    assert_eq!(record.len(), table.record_words(), "record must be one record of the table");
    let dim = table.dim as usize;
    let (weights, rest) = record.split_at_mut(dim);
    fill_initial(&table.init, table.seed, row, weights);
    let (state, use_count) = rest.split_at_mut(table.optimizer.state_words(dim));
    state.fill(match table.optimizer {
        OptimizerKind::Adagrad | OptimizerKind::RowWiseAdagrad => table.state_init,
        OptimizerKind::Sgd | OptimizerKind::Adam | OptimizerKind::PartialRowWiseAdam => 0.0,
    });
    use_count.fill(f32::from_bits(0));
}

fn fill_blocks(seed: u64, row: u64, out: &mut [f32], values: impl Fn([u32; 4]) -> [f32; 4]) {
    let key = [low(seed), high(seed)];
    for (block, out) in (0u32..).zip(out.chunks_mut(BLOCK)) {
        let values = values(philox4x32([low(row), high(row), block, 0], key));
        out.copy_from_slice(&values[..out.len()]);
    }
}

/// Returns a value in `[low, high)` (`low` itself when they are equal).
fn uniform(bits: u32, low: f32, high: f32) -> f32 {
    let unit = f64::from(bits >> 8) * (1.0 / f64::from(1u32 << 24));
    let value = (f64::from(low) + (f64::from(high) - f64::from(low)) * unit) as f32;
    // Rounding to f32 may reach `high`, which is outside.
    if value < high {
        value
    } else {
        high.next_down().max(low)
    }
}

/// Returns two independent standard normal values.
///
/// Source: Box, Muller, Ann. Math. Stat. 1958. The first unit is in `(0, 1]`, so its logarithm
/// is finite.
fn normal_pair(bits0: u32, bits1: u32) -> [f64; 2] {
    let scale = 1.0 / (1u64 << 32) as f64;
    let radius = (-2.0 * libm::log((f64::from(bits0) + 1.0) * scale)).sqrt();
    let angle = TAU * (f64::from(bits1) * scale);
    [radius * libm::cos(angle), radius * libm::sin(angle)]
}

#[cfg(test)]
mod tests;
