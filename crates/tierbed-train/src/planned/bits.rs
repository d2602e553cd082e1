//! Packed integers: side by side, each with the same few bits.
//!
//! Number `i` of `width` bits occupies bits `i * width..(i + 1) * width`, least significant bit
//! first. Behind the last packed section of a block at least [`PAD_BYTES`] follow, so that a
//! reader may always load eight bytes.

/// Widest number that one unaligned load of eight bytes holds.
pub(crate) const WIDTH_MAX: u32 = 56;
/// Bytes that must follow the last packed number.
pub(crate) const PAD_BYTES: usize = 8;

/// Returns the bits that `value` needs; 0 for 0.
pub(crate) fn width_of(value: u64) -> u32 {
    u64::BITS - value.leading_zeros()
}

/// Packs numbers behind what is already in `bytes`.
#[derive(Debug)]
pub(crate) struct BitWriter<'a> {
    bytes: &'a mut Vec<u8>,
    pending: u64,
    pending_bits: u32,
}

impl<'a> BitWriter<'a> {
    pub(crate) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self { bytes, pending: 0, pending_bits: 0 }
    }

    /// Adds the low `width` bits of `value`, which must hold all of it.
    #[inline]
    pub(crate) fn push(&mut self, value: u64, width: u32) {
        debug_assert!(width <= WIDTH_MAX && width_of(value) <= width, "{value} in {width} bits");
        if width > u32::BITS {
            self.push_word(value & u64::from(u32::MAX), u32::BITS);
            return self.push_word(value >> u32::BITS, width - u32::BITS);
        }
        self.push_word(value, width);
    }

    /// Adds the low `width` bits, at most 32, of `value`, which must hold all of it.
    #[inline]
    pub(crate) fn push_short(&mut self, value: u32, width: u32) {
        debug_assert!(width <= u32::BITS && width_of(value.into()) <= width);
        self.push_word(u64::from(value), width);
    }

    // At most 31 bits wait, so 32 more always fit.
    #[inline]
    fn push_word(&mut self, value: u64, width: u32) {
        self.pending |= value << self.pending_bits;
        self.pending_bits += width;
        if self.pending_bits >= u32::BITS {
            self.bytes.extend((self.pending as u32).to_le_bytes());
            self.pending >>= u32::BITS;
            self.pending_bits -= u32::BITS;
        }
    }

    /// Fills the last byte with zeros.
    pub(crate) fn finish(self) {
        let bytes = self.pending.to_le_bytes();
        let count = self.pending_bits.div_ceil(8) as usize;
        self.bytes.extend(bytes.iter().take(count));
    }
}

/// Numbers packed in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BitSlice<'a> {
    bytes: &'a [u8],
    first_bit: usize,
    width: u32,
}

impl<'a> BitSlice<'a> {
    /// Reads numbers of `width` bits from bit `first_bit` of `bytes` on.
    pub(crate) fn new(bytes: &'a [u8], first_bit: usize, width: u32) -> Self {
        Self { bytes, first_bit, width: width.min(WIDTH_MAX) }
    }

    /// Keeps the first `count` numbers only.
    ///
    /// # Panics
    /// When the bytes end before these numbers and their padding.
    pub(crate) fn first(self, count: usize) -> Self {
        let end = (self.first_bit + count * self.width as usize).div_ceil(8) + PAD_BYTES;
        assert!(end <= self.bytes.len(), "{count} numbers end at {end} of {}", self.bytes.len());
        Self { bytes: self.bytes.split_at(end).0, ..self }
    }

    /// Returns number `at`; `None` past the end of the bytes.
    #[inline(always)]
    pub(crate) fn get(&self, at: usize) -> Option<u64> {
        let bit = self.first_bit + at * self.width as usize;
        let word = self.bytes.get(bit / 8..)?.first_chunk::<8>()?;
        let mask = (1u64 << self.width) - 1;
        Some((u64::from_le_bytes(*word) >> (bit % 8)) & mask)
    }
}

/// Returns the bytes of `count` numbers of `width` bits.
pub(crate) fn packed_bytes(count: usize, width: u32) -> usize {
    (count * width as usize).div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_width_comes_back(
            width in 0u32..=56,
            seeds in proptest::collection::vec(any::<u64>(), 0..70),
        ) {
            let values: Vec<u64> = seeds.iter().map(|seed| seed & ((1u64 << width) - 1)).collect();
            let mut bytes = vec![0xAA; 3];
            let mut writer = BitWriter::new(&mut bytes);
            values.iter().for_each(|&value| writer.push(value, width));
            writer.finish();
            prop_assert_eq!(bytes.len(), 3 + packed_bytes(values.len(), width));
            bytes.extend([0xFF; PAD_BYTES]);
            let slice = BitSlice::new(&bytes, 24, width);
            for (at, &value) in values.iter().enumerate() {
                prop_assert_eq!(slice.get(at), Some(value));
            }
        }

        #[test]
        fn random_bytes_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..20),
            at in 0usize..200,
            width in 0u32..70,
        ) {
            let _ = BitSlice::new(&bytes, at % 9, width).get(at);
        }
    }
}
