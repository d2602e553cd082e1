//! A fixed shuffle of `0..row_count` that needs no memory: the hash by which rows are divided.
//!
//! Every number has one place and every place one number, so shards are of equal size and no map
//! is needed. Steps that are reversible within `bits` bits are walked until the number is in range:
//!
//! ```text
//! id ─▶ xor ─▶ (x ^= x >> s; x *= odd) × 3 ─▶ x ^= x >> s ─▶ ≥ row_count? again
//! ```
//!
//! Source: a cycle walk over a small block cipher (Black and Rogaway, 2002). What matters here is
//! only that neighbours part: nobody is kept from guessing.

/// Odd numbers with bits of no pattern, from the digits of the golden ratio and its powers.
const FACTORS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
/// So that 0 does not stay where it is.
const OFFSET: u64 = 0x2545_f491_4f6c_dd1d;

/// The shuffle of `row_count` numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scatter {
    row_count: u64,
    mask: u64,
    shift: u32,
}

impl Scatter {
    /// Makes the shuffle of at least one number.
    pub(crate) fn new(row_count: u64) -> Self {
        assert!(row_count > 0, "a table has rows");
        let bits = (64 - (row_count - 1).leading_zeros()).max(1);
        Self { row_count, mask: u64::MAX >> (64 - bits), shift: bits.div_ceil(2) }
    }

    /// Returns the place of number `id`.
    pub(crate) fn place_of(self, id: u64) -> u64 {
        assert!(id < self.row_count, "number {id} of {}", self.row_count);
        let mut place = self.forward(id);
        while place >= self.row_count {
            place = self.forward(place);
        }
        place
    }

    /// Returns the number at `place`.
    pub(crate) fn id_at(self, place: u64) -> u64 {
        assert!(place < self.row_count, "place {place} of {}", self.row_count);
        let mut id = self.backward(place);
        while id >= self.row_count {
            id = self.backward(id);
        }
        id
    }

    fn forward(self, mut x: u64) -> u64 {
        x ^= OFFSET & self.mask;
        for factor in FACTORS {
            x ^= x >> self.shift;
            x = x.wrapping_mul(factor) & self.mask;
        }
        x ^ (x >> self.shift)
    }

    fn backward(self, mut x: u64) -> u64 {
        // The shift is at least half of the bits, so the step is its own reverse.
        x ^= x >> self.shift;
        for factor in FACTORS.into_iter().rev() {
            x = x.wrapping_mul(inverse(factor)) & self.mask;
            x ^= x >> self.shift;
        }
        x ^ (OFFSET & self.mask)
    }
}

/// Returns the reverse of an odd factor modulo 2^64, and so modulo every smaller power of two.
/// Each step doubles the bits that are right; a factor is right to itself in three.
const fn inverse(factor: u64) -> u64 {
    let mut found = factor;
    let mut step = 0;
    while step < 5 {
        found = found.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(found)));
        step += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn factors_have_reverses() {
        assert!(FACTORS.iter().all(|&factor| factor.wrapping_mul(inverse(factor)) == 1));
    }

    #[test]
    fn neighbours_part_and_shards_are_met_evenly() {
        // Of 8 shards, 16 neighbours meet 7.06 on average if they fall at random.
        let scatter = Scatter::new(100_000);
        let met: u32 = (0..100_000 / 16)
            .map(|block| {
                let shards = (16 * block..16 * (block + 1)).map(|id| scatter.place_of(id) % 8);
                shards.fold(0u32, |met, shard| met | 1 << shard).count_ones()
            })
            .sum();
        let mean = f64::from(met) / (100_000.0 / 16.0);
        assert!((7.0..7.12).contains(&mean), "{mean}");
    }

    proptest! {
        #[test]
        fn every_number_has_one_place(row_count in 1u64..3000) {
            let scatter = Scatter::new(row_count);
            let mut places: Vec<u64> = (0..row_count).map(|id| scatter.place_of(id)).collect();
            prop_assert!((0..row_count).zip(&places).all(|(id, &at)| scatter.id_at(at) == id));
            places.sort_unstable();
            prop_assert!(places.into_iter().eq(0..row_count));
        }

        #[test]
        fn large_numbers_come_back(row_count in 1u64..1 << 40, number: u64) {
            let (scatter, id) = (Scatter::new(row_count), number % row_count);
            prop_assert_eq!(scatter.id_at(scatter.place_of(id)), id);
        }
    }
}
