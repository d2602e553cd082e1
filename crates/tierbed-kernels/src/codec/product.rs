//! Product quantization: each part of a row becomes the nearest of 256 trained parts.
//!
//! Source: Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", 2011, §II.

#![expect(clippy::indexing_slicing, reason = "lengths are checked when codebooks are given")]

use super::decode::Decoder;
use crate::simd::{Lanes, LANES};
use tierbed_core::{Error, Result};

/// Entries of a codebook.
const ENTRIES: usize = 256;

/// Codebooks of one table.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductQuantizer {
    dim: usize,
    part_count: usize,
    /// `[part_count, 256, part_dim]`.
    codebooks: Vec<f32>,
}

impl ProductQuantizer {
    /// Takes codebooks of `part_count` parts for rows of `dim` numbers: `[part_count, 256,
    /// dim / part_count]`, as trained elsewhere.
    ///
    /// # Errors
    /// `Invalid` when `dim` is no multiple of `part_count`, the length is wrong, or a number is not
    /// finite.
    pub fn new(dim: usize, part_count: usize, codebooks: Vec<f32>) -> Result<Self> {
        if part_count == 0 || dim == 0 || !dim.is_multiple_of(part_count) {
            return Err(Error::invalid("dim must be a multiple of the number of parts")
                .with("dim", dim)
                .with("part_count", part_count));
        }
        if codebooks.len() != ENTRIES * dim {
            return Err(Error::invalid("codebooks must be [part_count, 256, dim / part_count]")
                .with("found", codebooks.len())
                .with("expected", ENTRIES * dim));
        }
        if !codebooks.iter().all(|value| value.is_finite()) {
            return Err(Error::invalid("codebooks must be finite"));
        }
        Ok(Self { dim, part_count, codebooks })
    }

    /// Returns the numbers of a row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the parts of a row: the bytes of its code.
    #[must_use]
    pub fn part_count(&self) -> usize {
        self.part_count
    }

    /// Returns the bytes of the codebooks in memory.
    #[must_use]
    pub fn codebook_bytes(&self) -> usize {
        size_of_val(self.codebooks.as_slice())
    }

    pub(super) fn encode(&self, row: &[f32], code: &mut [u8]) {
        let part_dim = self.dim / self.part_count;
        let books = self.codebooks.chunks_exact(ENTRIES * part_dim);
        for ((to, part), book) in code.iter_mut().zip(row.chunks_exact(part_dim)).zip(books) {
            let distance = |entry: &[f32]| -> f64 {
                let squared = |(&a, &b): (&f32, &f32)| (f64::from(a) - f64::from(b)).powi(2);
                entry.iter().zip(part).map(squared).sum()
            };
            let nearest = book
                .chunks_exact(part_dim)
                .map(distance)
                .enumerate()
                .min_by(|a, b| a.1.total_cmp(&b.1))
                .map_or(0, |(entry, _)| entry);
            // Below 256.
            *to = nearest as u8;
        }
    }

    pub(super) fn decoder(&self) -> ProductDecoder<'_> {
        let part_dim = self.dim / self.part_count;
        ProductDecoder { part_dim, codebooks: &self.codebooks }
    }
}

/// Decodes [`super::Codec::Product`].
#[derive(Clone, Copy)]
pub(super) struct ProductDecoder<'a> {
    part_dim: usize,
    codebooks: &'a [f32],
}

impl ProductDecoder<'_> {
    /// Copies numbers `at..at + len` of the code, of parts of any dim.
    #[inline(always)]
    fn gather<L: Lanes>(self, code: &[u8], at: usize, len: usize) -> L {
        let mut values = [0.0; LANES];
        let mut done = 0;
        while done < len {
            let (part, within) = ((at + done) / self.part_dim, (at + done) % self.part_dim);
            let count = (self.part_dim - within).min(len - done);
            let entry = part * ENTRIES + usize::from(code[part]);
            let from = &self.codebooks[entry * self.part_dim + within..][..count];
            values[done..done + count].copy_from_slice(from);
            done += count;
        }
        L::load(&values)
    }

    /// Copies numbers `at..at + 16` of the code, of parts of `DIM`, a divisor of 16.
    #[inline(always)]
    fn gather_whole<L: Lanes, const DIM: usize>(self, code: &[u8], at: usize) -> L {
        let entries = self.codebooks.as_chunks::<DIM>().0;
        let first = at / DIM;
        let mut values = [0.0; LANES];
        let parts = values.as_chunks_mut::<DIM>().0;
        for (i, (to, &byte)) in parts.iter_mut().zip(&code[first..]).enumerate() {
            *to = entries[(first + i) * ENTRIES + usize::from(byte)];
        }
        L::load(&values)
    }
}

impl Decoder for ProductDecoder<'_> {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        match self.part_dim {
            2 => self.gather_whole::<L, 2>(code, at),
            4 => self.gather_whole::<L, 4>(code, at),
            8 => self.gather_whole::<L, 8>(code, at),
            16 => self.gather_whole::<L, 16>(code, at),
            _ => self.gather(code, at, LANES),
        }
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        self.gather(code, at, len)
    }
}
