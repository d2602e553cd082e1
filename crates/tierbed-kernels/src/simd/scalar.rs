//! Sixteen lanes without vector instructions: the reference all others must equal.

#![expect(clippy::indexing_slicing, reason = "codes are numbers of lanes")]

use super::{Job, Lanes, LANES};

/// Runs `job` with what every processor has.
#[inline(never)]
pub(super) fn run<J: Job>(job: J) -> J::Output {
    job.run::<ScalarLanes>()
}

/// Sixteen numbers, one by one (the compiler may still pair them up; the bits do not change).
#[derive(Clone, Copy)]
pub(crate) struct ScalarLanes([f32; LANES]);

impl ScalarLanes {
    #[inline(always)]
    fn zip(mut self, other: Self, op: impl Fn(f32, f32) -> f32) -> Self {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a = op(*a, b);
        }
        self
    }
}

impl Lanes for ScalarLanes {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }

    #[inline(always)]
    fn load_part(from: &[f32]) -> Self {
        assert!(from.len() < LANES, "a part has fewer than 16 values");
        let mut lanes = [0.0; LANES];
        for (lane, &value) in lanes.iter_mut().zip(from) {
            *lane = value;
        }
        Self(lanes)
    }

    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        assert!(to.len() < LANES, "a part has fewer than 16 values");
        for (value, lane) in to.iter_mut().zip(self.0) {
            *value = lane;
        }
    }

    #[inline(always)]
    fn from_f32(from: &[u8; 4 * LANES]) -> Self {
        let mut lanes = [0.0; LANES];
        for (lane, &bytes) in lanes.iter_mut().zip(from.as_chunks().0) {
            *lane = f32::from_le_bytes(bytes);
        }
        Self(lanes)
    }

    #[inline(always)]
    fn from_bytes(from: &[u8; LANES]) -> Self {
        Self(from.map(f32::from))
    }

    #[inline(always)]
    fn from_f16(from: &[u8; 2 * LANES]) -> Self {
        let mut lanes = [0.0; LANES];
        for (lane, &bytes) in lanes.iter_mut().zip(from.as_chunks().0) {
            *lane = half::f16::from_le_bytes(bytes).to_f32();
        }
        Self(lanes)
    }

    #[inline(always)]
    fn from_bf16(from: &[u8; 2 * LANES]) -> Self {
        let mut lanes = [0.0; LANES];
        for (lane, &[low, high]) in lanes.iter_mut().zip(from.as_chunks().0) {
            *lane = f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
        }
        Self(lanes)
    }

    #[inline(always)]
    fn lookup(codes: &[u8; LANES], table: &[f32; LANES]) -> Self {
        Self(codes.map(|code| table[usize::from(code)]))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn sqrt(mut self) -> Self {
        for lane in &mut self.0 {
            *lane = lane.sqrt();
        }
        self
    }
}
