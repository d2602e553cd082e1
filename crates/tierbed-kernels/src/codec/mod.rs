//! Row codecs of tiers and snapshots: f32 rows in fewer bytes.
//!
//! A *code* is a row of `dim` numbers in [`Codec::code_bytes`] bytes, without optimizer state.
//! Encoding is done once, offline or when a row enters a tier, by plain loops; decoding is on the
//! read path and runs on lanes, alone ([`Kernels::decode_rows`]) or fused with pooling
//! ([`Kernels::pool_codes_to`]). As everywhere in this crate, the same bits on every machine.
//!
//! ```text
//! f32     | dim x f32 |                     f16, bf16 | dim x 2 bytes |
//! int8    | scale bf16 | bias bf16 | dim x u8 |        value = code * scale + bias
//! int4    | scale bf16 | bias bf16 | dim nibbles |     the range clipped where that errs less
//! gauss4  | scale bf16 | dim nibbles |                 value = level[nibble] * scale
//! product | part_count x u8 |                          each part is a row of a trained codebook
//! ```
//!
//! Scales belong to a row, so small rows keep their shape: a fixed range turns them to noise.
//! The `evstore*` codecs have such a fixed range and exist to reproduce that system only.
//! Scale and bias are bf16: two bytes, with the range of f32, so that no row is too small or too
//! large; codes are chosen for the rounded scale, so rounding costs range and not truth.
//!
//! Source: EVStore §4.3 (mixed precision). Differs: scale and bias per row, because the published
//! fixed ranges lose rows that are small (`docs/explanation/papers/evstore.md`).
//!
//! [`Kernels::decode_rows`]: crate::Kernels::decode_rows
//! [`Kernels::pool_codes_to`]: crate::Kernels::pool_codes_to

mod decode;
mod evstore;
mod float;
mod gauss4;
mod int4;
mod int8;
mod nibbles;
mod pool_codes;
mod product;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use decode::Codes;
pub use product::ProductQuantizer;

use tierbed_core::{Error, Result};

/// Largest magnitude that can be coded: sums and differences of two such numbers are finite.
pub const CODED_MAX: f32 = 1e38;

/// How the numbers of a row are kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Codec {
    /// As they are, 4 bytes each.
    F32,
    /// IEEE half precision, 2 bytes each; magnitudes up to 65,504.
    F16,
    /// The upper half of an f32, 2 bytes each.
    Bf16,
    /// One byte each, between the least and the greatest number of the row.
    Int8,
    /// Four bits each, between bounds searched for the least squared error of the row.
    Int4,
    /// Four bits each: 16 levels that err least on normal numbers, times a scale per row.
    Gauss4,
    /// Two bytes each, exactly as EVStore's released code keeps them: for reproduction.
    Evstore16,
    /// One byte each over the fixed range -1 to 1, as EVStore's released code: for reproduction.
    Evstore8,
    /// Four bits each over 15 fixed levels, as EVStore's released code: for reproduction.
    Evstore4,
    /// A few bytes per row: indices into codebooks trained on the table.
    Product(Arc<ProductQuantizer>),
}

impl Codec {
    /// Every codec that needs no training.
    pub const FIXED: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Int8,
        Self::Int4,
        Self::Gauss4,
        Self::Evstore16,
        Self::Evstore8,
        Self::Evstore4,
    ];

    /// Codecs that keep what they need of a row's range with the row: those a file of rows may be
    /// written in.
    pub const PER_ROW: [Self; 6] =
        [Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Int4, Self::Gauss4];

    /// Returns its name, as options and files spell it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Gauss4 => "gauss4",
            Self::Evstore16 => "evstore16",
            Self::Evstore8 => "evstore8",
            Self::Evstore4 => "evstore4",
            Self::Product(_) => "product",
        }
    }

    /// Returns the codec of this name.
    ///
    /// # Errors
    /// `Invalid`, listing the names, when there is none; also for `product`, which needs codebooks.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::FIXED.into_iter().find(|codec| codec.name() == name).ok_or_else(|| {
            Error::invalid("no such codec")
                .with("codec", name)
                .with("known", Self::FIXED.map(|codec| codec.name()).join(", "))
        })
    }

    /// Returns the bytes of the code of a row of `dim` numbers.
    #[must_use]
    pub fn code_bytes(&self, dim: usize) -> usize {
        match self {
            Self::F32 => 4 * dim,
            Self::F16 | Self::Bf16 | Self::Evstore16 => 2 * dim,
            Self::Int8 => int8::HEAD_BYTES + dim,
            Self::Int4 => int4::HEAD_BYTES + nibbles::bytes(dim),
            Self::Gauss4 => gauss4::HEAD_BYTES + nibbles::bytes(dim),
            Self::Evstore8 => dim,
            Self::Evstore4 => nibbles::bytes(dim),
            Self::Product(quantizer) => quantizer.part_count(),
        }
    }

    /// Checks that rows of `dim` numbers can be kept so.
    ///
    /// # Errors
    /// `Invalid` when `dim` is 0, or not the dim a product codec was trained for.
    pub fn check_dim(&self, dim: usize) -> Result<()> {
        match self {
            _ if dim == 0 => Err(Error::invalid("a row has at least one number")),
            Self::Product(quantizer) if quantizer.dim() != dim => {
                Err(Error::invalid("codebooks were trained for another dim")
                    .with("trained_dim", quantizer.dim())
                    .with("dim", dim))
            }
            _ => Ok(()),
        }
    }

    /// Encodes `row`, `[dim]`, into `code`, `[code_bytes]`.
    ///
    /// # Errors
    /// `Invalid` when the row or the code has the wrong length, or a number is not finite or
    /// larger than the codec can keep ([`CODED_MAX`]; 65,504 for f16). `f32` keeps anything.
    pub fn encode(&self, row: &[f32], code: &mut [u8]) -> Result<()> {
        self.check_dim(row.len())?;
        if code.len() != self.code_bytes(row.len()) {
            return Err(Error::invalid("code has the wrong length")
                .with("code_bytes", code.len())
                .with("expected_bytes", self.code_bytes(row.len())));
        }
        let value_max = match self {
            Self::F32 => f32::INFINITY,
            Self::F16 => float::F16_MAX,
            _ => CODED_MAX,
        };
        let is_within = |value: &f32| value.abs() <= value_max;
        if value_max.is_finite() && !row.iter().all(is_within) {
            return Err(Error::invalid("row has a number that this codec cannot keep")
                .with("codec", self.name())
                .with("value_max", value_max)
                .with("remedy", "keep this table as f32, or look for a diverged model"));
        }
        match self {
            Self::F32 => float::encode_f32(row, code),
            Self::F16 => float::encode_f16(row, code),
            Self::Bf16 => float::encode_bf16(row, code),
            Self::Int8 => int8::encode(row, code),
            Self::Int4 => int4::encode(row, code),
            Self::Gauss4 => gauss4::encode(row, code),
            Self::Evstore16 => evstore::encode16(row, code),
            Self::Evstore8 => evstore::encode8(row, code),
            Self::Evstore4 => evstore::encode4(row, code),
            Self::Product(quantizer) => quantizer.encode(row, code),
        }
        Ok(())
    }
}
