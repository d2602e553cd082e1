//! Hierarchical features: the coarse token that goes with each fine one.
//!
//! Criteo's widest features are functions of one another (C3 fixes C12, which fixes C21, ...). The
//! function here needs no table of the tokens: child `x` (tokens are numbered by popularity) is the
//! *first* of its parent when `P(x + 1)` passes a whole number that `P(x)` had not, and then has
//! that parent; else it joins an older parent by its hash, popular ones more often.
//! `P(x) = min(x, parents * (x / children)^exponent)` says how many parents the `x` most
//! popular children have: the head maps one to one, the tail shares ever more, and every parent
//! has a child. `P` is tabulated in whole numbers, so that every machine gets the same answer.

#![expect(clippy::indexing_slicing, reason = "there is a step for every child")]

use tierbed_core::env::mix64;

/// Steps of an octave that are tabulated.
const STEP_BITS: u32 = 4;
/// Fraction bits of tabulated values: with 24 bits of whole part, products stay below 2^64.
const FRACTION_BITS: u32 = 36;

#[derive(Debug, Clone, Copy, Default)]
struct Step {
    start: u32,
    value: u64,
    slope: u64,
}

/// The function from one feature's tokens to another's.
#[derive(Debug, Clone)]
pub(crate) struct Hierarchy {
    steps: Vec<Step>,
    parent_count: u32,
    skew: u32,
    seed: u64,
}

/// How children spread over parents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    /// Growth of parents with children, above 0 and at most 1.
    pub(crate) exponent: f64,
    /// How strongly later children prefer popular parents: 1 is not at all.
    pub(crate) skew: u32,
}

impl Hierarchy {
    /// Prepares the function from `0..child_count` onto `0..parent_count`; at most 2^24 children,
    /// not fewer than parents.
    pub(crate) fn new(child_count: u32, parent_count: u32, spread: Spread, seed: u64) -> Self {
        assert!(child_count >= parent_count && parent_count > 0 && child_count <= 1 << 24);
        let parents = f64::from(parent_count);
        let one = f64::from(1u32 << 18) * f64::from(1u32 << 18);
        let value = |x: u32| {
            let share = f64::from(x) / f64::from(child_count);
            let grown = parents * libm::pow(share, spread.exponent);
            (grown.min(f64::from(x)) * one) as u64
        };
        let mut steps = Vec::new();
        let mut start = 0;
        while start < child_count {
            let end = step_end(start).min(child_count);
            let last = u64::from(parent_count) << FRACTION_BITS;
            let (from, to) = (value(start), if end == child_count { last } else { value(end) });
            // Rounded up, so that the last step does not end short of the last parent.
            let slope = (to - from).div_ceil(u64::from(end - start));
            steps.push(Step { start, value: from, slope });
            start = end;
        }
        Self { steps, parent_count, skew: spread.skew, seed }
    }

    /// Returns how many parents the first `x` children have, with fraction.
    fn parents_before(&self, x: u32) -> u64 {
        let step = self.steps[step_index(x).min(self.steps.len() - 1)];
        step.value + step.slope * u64::from(x - step.start)
    }

    /// Returns the parent of `child`.
    pub(crate) fn parent(&self, child: u32) -> u32 {
        let before = (self.parents_before(child) >> FRACTION_BITS) as u32;
        let after = (self.parents_before(child + 1) >> FRACTION_BITS) as u32;
        if after > before {
            return before.min(self.parent_count - 1);
        }
        let uniform = mix64(self.seed ^ u64::from(child)) >> 32;
        let mut share = uniform;
        for _ in 1..self.skew {
            share = (share * uniform) >> 32;
        }
        ((share * u64::from(after)) >> 32) as u32
    }
}

/// Index of the step of `x`: single numbers below 32, then 16 steps an octave.
fn step_index(x: u32) -> usize {
    if x < 2 << STEP_BITS {
        return x as usize;
    }
    let shift = x.ilog2() - STEP_BITS;
    (((shift + 1) << STEP_BITS) + ((x >> shift) - (1 << STEP_BITS))) as usize
}

fn step_end(start: u32) -> u32 {
    if start < 2 << STEP_BITS {
        start + 1
    } else {
        start + (1 << (start.ilog2() - STEP_BITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_child_has_a_parent_and_every_parent_a_child() {
        for (children, parents) in
            [(1, 1), (16, 16), (40, 3), (33, 32), (5_000, 4_900), (70_000, 900)]
        {
            for exponent in [0.5, 0.84, 1.0] {
                let spread = Spread { exponent, skew: 2 };
                let hierarchy = Hierarchy::new(children, parents, spread, 7);
                let mut seen = vec![false; parents as usize];
                for child in 0..children {
                    seen[hierarchy.parent(child) as usize] = true;
                }
                let missing = seen.iter().filter(|seen| !**seen).count();
                assert_eq!(missing, 0, "{children} {parents} {exponent}");
            }
        }
    }

    #[test]
    fn the_head_maps_one_to_one() {
        let spread = Spread { exponent: 0.91, skew: 3 };
        let hierarchy = Hierarchy::new(5_461_305, 2_202_607, spread, 7);
        assert!((0..100).all(|child| hierarchy.parent(child) == child));
    }

    #[test]
    fn steps_are_numbered_in_order() {
        let mut start = 0;
        for index in 0..300 {
            assert_eq!(step_index(start), index);
            let end = step_end(start);
            assert_eq!(step_index(end - 1), index);
            start = end;
        }
    }
}
