//! One kernel body for scalar code, AVX2 and AVX-512, with equal bits.
//!
//! A kernel is a [`Job`]: a generic body over [`Lanes`], 16 numbers wide whatever the processor.
//! [`CheckedIsa::run`] compiles it once per instruction set, inside a function that may use that
//! set; everything in a body is `#[inline(always)]` so that it lands in there. Lane arithmetic is
//! IEEE 754 single precision, one rounding per operation, so 16 lanes give the same bits however
//! many registers hold them.
//!
//! All `unsafe` of this crate lives in this folder.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

/// Lanes of a vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// What every processor of the target has; the reference.
    Scalar,
    /// x86-64 with AVX2: two registers of 8 lanes.
    Avx2,
    /// x86-64 with AVX-512F and VL: one register of 16 lanes.
    Avx512,
}

impl Isa {
    /// Every instruction set, narrowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Returns the widest instruction set this processor has.
    #[must_use]
    pub fn detect() -> Self {
        CheckedIsa::detect().get()
    }

    /// Returns every instruction set this processor has, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns its lower-case name: `scalar`, `avx2` or `avx512`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            // Half precision has a flag of its own; no processor has AVX2 without it.
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            // All but one forgotten kind have both.
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Scalar
    }
}

/// An instruction set that this processor was seen to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckedIsa(Isa);

impl CheckedIsa {
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    pub(crate) fn detect() -> Self {
        Self(Isa::available().pop().unwrap_or(Isa::Scalar))
    }

    pub(crate) fn get(self) -> Isa {
        self.0
    }

    /// Runs `job` compiled for this instruction set.
    ///
    /// Inlined, as is everything above it up to the public method: a job is then built once, where
    /// it is called. Copying its just-written fields costs more than a short row's arithmetic.
    #[inline(always)]
    pub(crate) fn run<J: Job>(self, job: J) -> J::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` and `detect` saw that the processor has AVX2.
            Isa::Avx2 => unsafe { avx2::run(job) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` and `detect` saw that the processor has AVX-512F and VL.
            Isa::Avx512 => unsafe { avx512::run(job) },
            _ => scalar::run(job),
        }
    }
}

/// A kernel body with its arguments.
pub(crate) trait Job {
    /// What it returns.
    type Output;

    /// Runs the body. Implementations MUST be `#[inline(always)]`, and so must every function
    /// they pass lanes through.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Sixteen `f32` in registers.
///
/// Values exist only inside a [`Job`] run by [`CheckedIsa::run`]: that is what lets the
/// implementations use instructions without asking again whether the processor has them.
pub(crate) trait Lanes: Copy {
    /// Returns `value` in every lane.
    fn splat(value: f32) -> Self;
    /// Reads 16 values; any alignment.
    fn load(from: &[f32; LANES]) -> Self;
    /// Writes 16 values; any alignment.
    fn store(self, to: &mut [f32; LANES]);
    /// Writes 16 values past the caches where they fill a cache line, otherwise as `store` does;
    /// [`fence`] makes them visible before what follows.
    #[inline(always)]
    fn stream(self, to: &mut [f32; LANES]) {
        self.store(to);
    }
    /// Reads fewer than 16 values; the other lanes are +0.
    fn load_part(from: &[f32]) -> Self;
    /// Writes the first `to.len()` lanes, fewer than 16.
    fn store_part(self, to: &mut [f32]);
    /// Reads 16 numbers, little-endian.
    fn from_f32(from: &[u8; 4 * LANES]) -> Self;
    /// Reads 16 bytes as numbers 0 to 255.
    fn from_bytes(from: &[u8; LANES]) -> Self;
    /// Reads 16 half-precision numbers, little-endian.
    fn from_f16(from: &[u8; 2 * LANES]) -> Self;
    /// Reads the upper halves of 16 numbers, little-endian.
    fn from_bf16(from: &[u8; 2 * LANES]) -> Self;
    /// Returns entry `codes[lane]` of `table` in each lane; codes are below 16.
    fn lookup(codes: &[u8; LANES], table: &[f32; LANES]) -> Self;
    /// Returns `self + other`.
    fn add(self, other: Self) -> Self;
    /// Returns `self - other`.
    fn sub(self, other: Self) -> Self;
    /// Returns `self * other`.
    fn mul(self, other: Self) -> Self;
    /// Returns `self / other`.
    fn div(self, other: Self) -> Self;
    /// Returns the square roots.
    fn sqrt(self) -> Self;

    /// Adds the lanes by a fixed tree: lane `l` to lane `l + 8`, then 4, then 2, then 1 apart.
    #[inline(always)]
    fn reduce_add(self) -> f32 {
        let mut sums = [0.0; LANES];
        self.store(&mut sums);
        let [a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7] = sums;
        let [c0, c1, c2, c3] = [a0 + b0, a1 + b1, a2 + b2, a3 + b3];
        let [d0, d1, d2, d3] = [a4 + b4, a5 + b5, a6 + b6, a7 + b7];
        ((c0 + d0) + (c2 + d2)) + ((c1 + d1) + (c3 + d3))
    }
}

/// Orders all streamed writes before every later write, such as a signal.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of the target has SSE2; a fence touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// Asks the processor to bring `words[start..start + len]` near. Costs no check: where there are no
/// such words, nothing happens.
#[inline(always)]
pub fn prefetch<T>(words: &[T], start: usize, len: usize) {
    let per_line = const { LINE_BYTES / size_of::<T>() };
    let first = words.as_ptr().wrapping_add(start);
    for line in 0..len.div_ceil(per_line) {
        let address = first.wrapping_add(line * per_line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint: it reads nothing as far as the program can see, and no
        // address makes it fail.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_there_and_detect_is_the_widest() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        assert_eq!(available.last(), Some(&Isa::detect()));
        assert!(available.iter().all(|&isa| CheckedIsa::new(isa).is_some()));
        assert_eq!(Isa::ALL.map(Isa::name), ["scalar", "avx2", "avx512"]);
    }

    /// Loads and stores every length up to a whole vector next to guard values.
    struct CopyParts;

    impl Job for CopyParts {
        type Output = Vec<Vec<f32>>;

        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let from: Vec<f32> = (1..=16u8).map(f32::from).collect();
            let copy = |len: usize| {
                let mut to = vec![-1.0; LANES + 1];
                let lanes = L::load_part(&from[..len]);
                lanes.store_part(&mut to[..len]);
                let mut whole = [9.0; LANES];
                lanes.store(&mut whole);
                to.extend(whole);
                to
            };
            (0..LANES).map(copy).collect()
        }
    }

    #[test]
    fn parts_are_zero_padded_and_leave_neighbours_alone() {
        for isa in Isa::available() {
            let copies = CheckedIsa::new(isa).unwrap().run(CopyParts);
            for (len, copy) in copies.iter().enumerate() {
                let (to, whole) = copy.split_at(LANES + 1);
                for (at, &value) in to.iter().enumerate() {
                    let expected = if at < len { at as f32 + 1.0 } else { -1.0 };
                    assert_eq!(value, expected, "{} len {len} lane {at}", isa.name());
                }
                assert!(whole[len..].iter().all(|value| value.to_bits() == 0));
            }
        }
    }

    #[test]
    fn prefetch_outside_the_arena_is_harmless() {
        prefetch(&[0.0; 4], 2, 100);
        prefetch(&[0.0; 4], usize::MAX, 100);
        prefetch(&[0.0; 40], 1, 39);
    }
}
