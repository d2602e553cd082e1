//! Philox, a counter-based random generator: any output without those before it.
//!
//! Philox4x32-10: ten rounds of multiplication and exchange turn 128 bits of counter and 64 bits
//! of key into 128 random bits. No state, so any row's bits can be had at any time, by anyone.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, §4.3.

/// Rounds of the recommended, statistically safe variant.
const ROUNDS: usize = 10;
/// Multipliers of words 0 and 2.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key words after each round: the golden ratio and sqrt(3) - 1, times 2^32.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns the 128 random bits of `counter` under `key`.
pub(crate) fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let product0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let product1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        c0 = high(product1) ^ c1 ^ k0;
        c1 = low(product1);
        c2 = high(product0) ^ c3 ^ k1;
        c3 = low(product0);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// Returns the lower 32 bits.
pub(crate) fn low(value: u64) -> u32 {
    value as u32
}

/// Returns the upper 32 bits.
pub(crate) fn high(value: u64) -> u32 {
    (value >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published vectors of the authors' reference implementation.
    #[test]
    fn equals_the_published_vectors() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
