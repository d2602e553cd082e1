//! Decoding of codes to f32.
//!
//! A codec decodes 16 numbers at a time ([`Decoder`]); the loop over rows is here, once for all
//! codecs, that over bags in `pool_codes`. The end of a row that fills no vector reads whatever
//! bytes follow and drops the lanes it must not have: no copy, where the arena goes on.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use super::evstore::{Evstore16, Evstore4, Evstore8};
use super::float::{Bf16, F16, F32};
use super::gauss4::Gauss4;
use super::int4::Int4;
use super::int8::Int8;
use super::Codec;
use crate::accumulate::{by_shape, Shaped, BLOCK, BLOCK_LANES};
use crate::simd::{prefetch, Job, Lanes, LANES};
use crate::Kernels;

/// How many rows ahead of the loop the processor is asked to fetch, from arenas no cache holds.
pub(super) const PREFETCH_AHEAD: usize = 8;
/// From this size on an arena is taken to be outside the nearest cache.
pub(super) const FAR_ARENA_BYTES: usize = 256 << 10;

/// Codes of rows of one table, in index order, somewhere in an arena.
#[derive(Debug, Clone, Copy)]
pub struct Codes<'a> {
    /// How they are coded.
    pub codec: &'a Codec,
    /// Codes of any number of tables, `[bytes]`.
    pub arena: &'a [u8],
    /// First byte of the code of each index, `[E]`; duplicates allowed.
    pub starts: &'a [usize],
    /// Weight of each index, `[E]`, when pooling is weighted.
    pub weights: Option<&'a [f32]>,
}

/// Numbers of one code, 16 at a time. Everything MUST be `#[inline(always)]`.
pub(super) trait Decoder: Copy {
    /// What is read once per row: its scale, for instance.
    type Head: Copy;

    /// Reads the head of the code that begins `code`.
    fn head(self, code: &[u8]) -> Self::Head;

    /// Returns numbers `at..at + 16` of the code that begins `code`; `at` is a multiple of 16.
    fn full<L: Lanes>(self, head: Self::Head, code: &[u8], at: usize) -> L;

    /// Returns the last `len` numbers, from `at` on, fewer than 16; the other lanes are anything.
    fn part<L: Lanes>(self, head: Self::Head, code: &[u8], at: usize, len: usize) -> L;
}

impl Kernels {
    /// Decodes each row to `out`, `[E, dim]`: pooling "none". Weights do not apply.
    ///
    /// # Panics
    /// When `out` is not `[E, dim]`, a code lies outside the arena, or `dim` is not one the codec
    /// keeps ([`Codec::check_dim`]).
    pub fn decode_rows(self, codes: Codes<'_>, dim: usize, out: &mut [f32]) {
        let codec = codes.codec;
        assert!(codec.check_dim(dim).is_ok(), "the codec keeps rows of another dim");
        assert_eq!(out.len(), codes.starts.len() * dim, "out must be [E, dim]");
        let code_bytes = codec.code_bytes(dim);
        struct Call<'a>(Kernels, Codes<'a>, usize, usize, &'a mut [f32]);
        impl WithDecoder for Call<'_> {
            #[inline(always)]
            fn call<D: Decoder>(self, decoder: D) {
                let Self(kernels, codes, code_bytes, dim, out) = self;
                kernels.run(DecodeRows { decoder, codes, code_bytes, dim, out });
            }
        }
        with_decoder(codec, Call(self, codes, code_bytes, dim, out));
    }

    /// Decodes the `code` of one row to `out`, `[dim]`.
    ///
    /// # Panics
    /// As [`decode_rows`](Self::decode_rows).
    pub fn decode_row(self, codec: &Codec, code: &[u8], out: &mut [f32]) {
        let dim = out.len();
        self.decode_rows(Codes { codec, arena: code, starts: &[0], weights: None }, dim, out);
    }
}

/// What is to be done with a decoder, whichever it is.
pub(super) trait WithDecoder {
    fn call<D: Decoder>(self, decoder: D);
}

/// Chooses the decoder, once per call.
pub(super) fn with_decoder(codec: &Codec, then: impl WithDecoder) {
    match codec {
        Codec::F32 => then.call(F32),
        Codec::F16 => then.call(F16),
        Codec::Bf16 => then.call(Bf16),
        Codec::Int8 => then.call(Int8),
        Codec::Int4 => then.call(Int4),
        Codec::Gauss4 => then.call(Gauss4),
        Codec::Evstore16 => then.call(Evstore16),
        Codec::Evstore8 => then.call(Evstore8),
        Codec::Evstore4 => then.call(Evstore4),
        Codec::Product(quantizer) => then.call(quantizer.decoder()),
    }
}

struct DecodeRows<'a, D> {
    decoder: D,
    codes: Codes<'a>,
    code_bytes: usize,
    dim: usize,
    out: &'a mut [f32],
}

impl<D: Decoder> Job for DecodeRows<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.dim;
        by_shape::<L, _>(self, dim);
    }
}

impl<D: Decoder> Shaped for DecodeRows<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let Self { decoder, codes: Codes { arena, starts, .. }, code_bytes, dim, out } = self;
        let is_far = arena.len() >= FAR_ARENA_BYTES;
        for (i, (&start, to)) in starts.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
            if let (true, Some(&ahead)) = (is_far, starts.get(i + PREFETCH_AHEAD)) {
                prefetch(arena, ahead, code_bytes);
            }
            let code = code_at(arena, start, code_bytes);
            let head = decoder.head(code);
            let mut blocks = to.chunks_exact_mut(BLOCK);
            let mut at = 0;
            for block in &mut blocks {
                decode_block::<L, D, BLOCK_LANES, false>(decoder, head, code, at, block);
                at += BLOCK;
            }
            if REST > 0 || TAIL {
                let rest = blocks.into_remainder();
                decode_block::<L, D, REST, TAIL>(decoder, head, code, at, rest);
            }
        }
    }
}

/// Decodes numbers `at..` into `to`: `FULL` vectors, and then a part if `TAIL`.
#[inline(always)]
fn decode_block<L: Lanes, D: Decoder, const FULL: usize, const TAIL: bool>(
    decoder: D,
    head: D::Head,
    code: &[u8],
    at: usize,
    to: &mut [f32],
) {
    let (full, part) = to.as_chunks_mut::<LANES>();
    for (i, lanes) in full[..FULL].iter_mut().enumerate() {
        decoder.full::<L>(head, code, at + i * LANES).store(lanes);
    }
    if TAIL {
        decoder.part::<L>(head, code, at + FULL * LANES, part.len()).store_part(part);
    }
}

/// Returns the arena from the code at `start` on, which is wholly inside.
#[inline(always)]
pub(super) fn code_at(arena: &[u8], start: usize, code_bytes: usize) -> &[u8] {
    let code = &arena[start..];
    assert!(code.len() >= code_bytes, "a code must lie inside its arena");
    code
}

/// Returns `N` bytes from `at` on, of which `len` belong to the code: what follows when there is
/// enough, else zeroes.
#[inline(always)]
pub(super) fn padded<const N: usize>(code: &[u8], at: usize, len: usize) -> [u8; N] {
    let from = &code[at..];
    if let Some(whole) = from.first_chunk() {
        return *whole;
    }
    let mut bytes = [0; N];
    bytes[..len].copy_from_slice(&from[..len]);
    bytes
}

/// Returns `N` bytes of the code from `at` on.
#[inline(always)]
pub(super) fn chunk<const N: usize>(code: &[u8], at: usize) -> &[u8; N] {
    match code[at..].first_chunk() {
        Some(chunk) => chunk,
        None => panic!("a code must lie inside its arena"),
    }
}
