//! Sums and sums of products in one fixed order.
//!
//! Sixteen partial sums: lane `l` adds the terms of elements `l`, `l + 16`, `l + 32`, ... onto +0,
//! the last part padded with +0; then the lanes are added by the tree of `Lanes::reduce_add`.

use crate::simd::{Job, Lanes, LANES};
use crate::Kernels;

impl Kernels {
    /// Returns the sum of `a[i] * b[i]`, in the fixed order.
    ///
    /// # Panics
    /// When the lengths differ.
    #[must_use]
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "both sides of a dot product must be equally long");
        self.run(Dot { a, b })
    }
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Job for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        let (a_full, a_part) = self.a.as_chunks::<LANES>();
        let (b_full, b_part) = self.b.as_chunks::<LANES>();
        let mut sum = L::splat(0.0);
        for (a, b) in a_full.iter().zip(b_full) {
            sum = sum.add(L::load(a).mul(L::load(b)));
        }
        sum.add(L::load_part(a_part).mul(L::load_part(b_part))).reduce_add()
    }
}
