//! Numeric kernels: pooling, gradients, optimizers, initial values, row codecs.
//!
//! Pure arithmetic on slices, with no input or output and no memory of its own. Rows are records
//! (weights, optimizer state, use count: [`tierbed_core::schema`]) that lie anywhere in one
//! arena of words; `starts` says where. Forwards, [`pool`] sums the rows of each bag; backwards,
//! [`grad`] sums the gradients of each row and [`optim`] applies one fused step to its record;
//! [`init`] says what a row holds that was never written.
//!
//! Invariant: **every result is the same to the last bit on every machine.** Each kernel is
//! written once over 16 lanes (`simd`) and compiled for plain registers, AVX2 and AVX-512. The
//! order of additions is part of a kernel's definition, products are rounded before they are
//! added (no fused multiply-add), and division and square root are those of IEEE 754. The one
//! exception is the payload and sign of NaN. The processor's rounding and denormal modes must be
//! the defaults.
//!
//! Broken preconditions (slices too short, starts outside the arena) are programmer errors and
//! panic; they never read or write out of bounds.

mod accumulate;
pub mod batch;
pub mod codec;
pub mod feature_layout;
pub mod grad;
pub mod init;
pub mod layout;
pub mod matrix;
pub mod optim;
mod philox;
pub mod pool;
mod pool_batch;
pub mod pool_to;
mod reduce;
mod simd;

pub use batch::{FeatureRows, Places};
pub use codec::{Codec, Codes, ProductQuantizer};
pub use feature_layout::{Feature, FeatureLayout};
pub use grad::{check_finite, not_finite, Grads, Groups, Occurrence, Upstream};
pub use init::{fill_initial, init_record};
pub use layout::{BagRange, Columns, Pooling, Rows};
pub use matrix::Matrix;
pub use optim::{FeatureStep, Hyper, Prepared, RowSums, SumsNeed};
pub use pool_to::{Destination, PoolFeature};
pub use simd::{prefetch, Isa};

use simd::{CheckedIsa, Job};
use tierbed_core::{Error, Result};

/// The kernels, compiled for one instruction set this processor has.
///
/// Its methods choose once per call and loop inside. One byte: pass it by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernels {
    isa: CheckedIsa,
}

impl Kernels {
    /// Returns the kernels of the widest instruction set this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self { isa: CheckedIsa::detect() }
    }

    /// Returns the kernels of `isa`, or `None` when this processor lacks it.
    #[must_use]
    pub fn with_isa(isa: Isa) -> Option<Self> {
        CheckedIsa::new(isa).map(|isa| Self { isa })
    }

    /// Returns the kernels that an option names: `auto` is the widest this processor has.
    ///
    /// # Errors
    /// `Invalid` when no instruction set of this processor has that name.
    pub fn named(isa: &str) -> Result<Self> {
        if isa == "auto" {
            return Ok(Self::detect());
        }
        let named = Isa::available().into_iter().find(|known| known.name() == isa);
        named.and_then(Self::with_isa).ok_or_else(|| {
            let known: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            Error::invalid("instruction set is unknown or not on this processor")
                .with("isa", isa)
                .with("available", known.join(", "))
        })
    }

    /// Returns the instruction set in use.
    #[must_use]
    pub fn isa(self) -> Isa {
        self.isa.get()
    }

    #[inline(always)]
    fn run<J: Job>(self, job: J) -> J::Output {
        self.isa.run(job)
    }
}

impl Default for Kernels {
    fn default() -> Self {
        Self::detect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_the_name_of_their_instruction_set() {
        assert_eq!(Kernels::named("auto").unwrap(), Kernels::detect());
        for isa in Isa::available() {
            assert_eq!(Kernels::named(isa.name()).unwrap().isa(), isa);
        }
        let error = Kernels::named("abacus").unwrap_err();
        assert!(error.to_string().contains("scalar"), "{error}");
    }
}
