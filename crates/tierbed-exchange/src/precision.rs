//! Precision of numbers in transit.
//!
//! Vectors are added up in f32 whatever they travel in; a narrow one is rounded once, where it is
//! written. So the rounding does not depend on the rank that holds a row: equal bits for any number
//! of ranks, and against f32 these distances at most:
//!
//! | precision | bytes of `dim` numbers | distance |
//! |---|---|---|
//! | `f32` | 4 dim | none |
//! | `f16` | 2 dim | 2^-11 of the number; 2^-25 below 2^-14; infinite above 65,504 |
//! | `bf16` | 2 dim | 2^-8 of the number |
//! | `int8` | 4 + dim | 1/500 of the row's range, and 1/128 of its largest magnitude at its ends |

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use tierbed_core::{Error, Result};
use tierbed_kernels::codec::{Codec, Codes};
use tierbed_kernels::Kernels;

/// What the numbers of a vector are on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// IEEE half precision; what is too large becomes infinite.
    F16,
    /// The upper half of an f32, rounded.
    Bf16,
    /// One byte each, between the bounds of the row; rows only.
    Int8,
}

impl Precision {
    /// Every precision, widest first.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Returns the precision of this name.
    ///
    /// # Errors
    /// `Invalid`, listing the names, when there is none.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name).ok_or_else(|| {
            Error::invalid("no such precision")
                .with("precision", name)
                .with("known", Self::ALL.map(Self::name).join(", "))
        })
    }

    /// Returns the bytes of a vector of `dim` numbers.
    #[must_use]
    pub fn vector_bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => dim.saturating_mul(4),
            Self::F16 | Self::Bf16 => dim.saturating_mul(2),
            Self::Int8 => Codec::Int8.code_bytes(dim.min(usize::MAX / 2)),
        }
    }

    /// Writes `vector`, `[dim]`, to `to`, `[vector_bytes]`.
    ///
    /// # Errors
    /// `Invalid` when `Int8` meets a number that is not finite or beyond 1e38.
    ///
    /// # Panics
    /// When `to` has another length.
    pub fn write(self, vector: &[f32], to: &mut [u8]) -> Result<()> {
        assert_eq!(to.len(), self.vector_bytes(vector.len()), "a place for the vector");
        match self {
            Self::F32 => to.copy_from_slice(bytemuck::cast_slice(vector)),
            Self::F16 => halves(to).reinterpret_cast_mut::<f16>().convert_from_f32_slice(vector),
            Self::Bf16 => halves(to).reinterpret_cast_mut::<bf16>().convert_from_f32_slice(vector),
            Self::Int8 => Codec::Int8.encode(vector, to)?,
        }
        Ok(())
    }

    /// Reads `count` vectors of `dim` numbers that lie one behind the other: `[count, dim]`.
    ///
    /// # Panics
    /// When `from` is shorter.
    #[must_use]
    pub fn read(self, kernels: Kernels, from: &[u8], count: usize, dim: usize) -> Vec<f32> {
        let codec = match self {
            Self::F32 => Codec::F32,
            Self::F16 => Codec::F16,
            Self::Bf16 => Codec::Bf16,
            Self::Int8 => Codec::Int8,
        };
        let bytes = self.vector_bytes(dim);
        let starts: Vec<usize> = (0..count).map(|at| at * bytes).collect();
        let mut out = vec![0.0; count * dim];
        let codes = Codes { codec: &codec, arena: from, starts: &starts, weights: None };
        kernels.decode_rows(codes, dim, &mut out);
        out
    }
}

/// Returns bytes as numbers of two, to which places in a region are aligned.
fn halves(to: &mut [u8]) -> &mut [u16] {
    bytemuck::cast_slice_mut(to)
}
