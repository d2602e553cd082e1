//! Error bounds of every codec, and equal bits on every instruction set.

#![allow(clippy::indexing_slicing, reason = "a test that panics has failed, as it should")]

use std::sync::Arc;

use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use super::*;
use crate::{BagRange, Columns, Destination, Isa, Kernels, Matrix, PoolFeature, Pooling, Rows};

const DIMS: [usize; 12] = [1, 2, 7, 9, 15, 16, 17, 18, 36, 64, 65, 100];

/// Numbers near normal with standard deviation `scale`: sums of twelve uniform ones.
fn normal_row(rng: &mut SplitMix64, dim: usize, scale: f32) -> Vec<f32> {
    let mut unit = || (rng.next_u64() >> 40) as f32 / (1 << 24) as f32;
    (0..dim).map(|_| ((0..12).map(|_| unit()).sum::<f32>() - 6.0) * scale).collect()
}

/// Every codec for rows of `dim`, a product codec trained on nothing among them.
fn codecs(dim: usize) -> Vec<Codec> {
    let mut rng = SplitMix64::new(3);
    let part_count = (1..=dim).rev().find(|parts| dim.is_multiple_of(*parts) && *parts <= 8);
    let codebooks = normal_row(&mut rng, 256 * dim, 0.1);
    let product = ProductQuantizer::new(dim, part_count.unwrap(), codebooks).unwrap();
    let mut codecs = Codec::FIXED.to_vec();
    codecs.push(Codec::Product(Arc::new(product)));
    codecs
}

/// Encodes rows behind one another; returns the arena and where each begins.
fn encode_all(codec: &Codec, rows: &[Vec<f32>]) -> (Vec<u8>, Vec<usize>) {
    let code_bytes = codec.code_bytes(rows[0].len());
    let mut arena = vec![0; code_bytes * rows.len()];
    for (row, code) in rows.iter().zip(arena.chunks_exact_mut(code_bytes)) {
        codec.encode(row, code).unwrap();
    }
    (arena, (0..rows.len()).map(|row| row * code_bytes).collect())
}

fn decode_all(
    kernels: Kernels,
    codec: &Codec,
    arena: &[u8],
    starts: &[usize],
    dim: usize,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; starts.len() * dim];
    kernels.decode_rows(Codes { codec, arena, starts, weights: None }, dim, &mut out);
    out
}

/// Returns the root mean square error relative to that of zeroes.
fn relative_error(codec: &Codec, dim: usize, scale: f32) -> f64 {
    let mut rng = SplitMix64::new(7);
    let rows: Vec<_> = (0..200).map(|_| normal_row(&mut rng, dim, scale)).collect();
    let (arena, starts) = encode_all(codec, &rows);
    let found = decode_all(Kernels::detect(), codec, &arena, &starts, dim);
    let (mut errors, mut squares) = (0.0, 0.0);
    for (&value, found) in rows.iter().flatten().zip(found) {
        let unit = f64::from(scale);
        errors += ((f64::from(value) - f64::from(found)) / unit).powi(2);
        squares += (f64::from(value) / unit).powi(2);
    }
    (errors / squares).sqrt()
}

#[test]
fn every_instruction_set_decodes_the_same_bits() {
    let mut rng = SplitMix64::new(1);
    for dim in DIMS {
        let rows: Vec<_> = (0..9).map(|_| normal_row(&mut rng, dim, 0.3)).collect();
        for codec in codecs(dim) {
            let (arena, mut starts) = encode_all(&codec, &rows);
            starts.push(starts[2]);
            let expected =
                decode_all(Kernels::with_isa(Isa::Scalar).unwrap(), &codec, &arena, &starts, dim);
            assert!(expected.iter().all(|value| value.is_finite()));
            for isa in Isa::available() {
                let kernels = Kernels::with_isa(isa).unwrap();
                let found = decode_all(kernels, &codec, &arena, &starts, dim);
                let is_same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(is_same, "{} dim {dim} on {}", codec.name(), isa.name());
            }
        }
    }
}

#[test]
fn pooling_codes_is_pooling_what_they_decode_to() {
    let mut rng = SplitMix64::new(2);
    let offsets = [0, 0, 3, 4, 7, 7, 9];
    let weights = [1.0, -0.5, 2.0, 0.25, 1.0, 3.0, -1.0, 0.5, 1.5];
    for dim in DIMS {
        let rows: Vec<_> = (0..9).map(|_| normal_row(&mut rng, dim, 0.3)).collect();
        let columns = Columns { stride: dim + 3, first: 2, dim };
        for (codec, weights) in
            codecs(dim).iter().flat_map(|codec| [(codec, None), (codec, Some(&weights[..]))])
        {
            let (arena, starts) = encode_all(codec, &rows);
            for isa in Isa::available() {
                let kernels = Kernels::with_isa(isa).unwrap();
                let decoded = decode_all(kernels, codec, &arena, &starts, dim);
                let row_starts: Vec<usize> = (0..9).map(|row| row * dim).collect();
                let plain = Rows { arena: &decoded, starts: &row_starts, weights };
                let bags = BagRange::whole(&offsets);
                let mut expected = vec![0.0; 6 * columns.stride];
                let mut found = expected.clone();
                kernels.pool_add(plain, bags, columns, &mut expected);
                let codes = Codes { codec, arena: &arena, starts: &starts, weights };
                let of = PoolFeature { feature: 0, offsets: &offsets, pooling: Pooling::Sum, dim };
                let mut matrix = Matrix::new(&mut found, std::iter::once(columns));
                kernels.pool_codes_to(&[(codes, of)], &mut matrix);
                assert_eq!(found, expected, "{} dim {dim} on {}", codec.name(), isa.name());
            }
        }
    }
}

#[test]
fn row_wise_codecs_keep_rows_of_every_size() {
    let bounds = [
        (Codec::F16, 3e-4),
        (Codec::Bf16, 2.5e-3),
        (Codec::Int8, 6e-3),
        (Codec::Int4, 0.09),
        (Codec::Gauss4, 0.1),
    ];
    for (codec, most) in &bounds {
        for scale in [1.0, 0.01, 3.1e-4, 1e-20, 1e30] {
            if *codec == Codec::F16 && !(1e-3..=1e3).contains(&scale) {
                continue;
            }
            for dim in [32, 36, 64, 100] {
                let error = relative_error(codec, dim, scale);
                assert!(error <= *most, "{} errs by {error} at {scale}, dim {dim}", codec.name());
            }
        }
    }
    assert_eq!(relative_error(&Codec::F32, 36, 1e-20), 0.0);
}

/// Source: the reason for a scale per row; the released ranges are [-0.65, 0.65] and [-1, 1].
#[test]
fn fixed_ranges_lose_small_rows_and_four_scaled_bits_beat_eight_fixed_ones() {
    for (codec, least) in [(Codec::Evstore8, 0.5), (Codec::Evstore4, 0.5)] {
        assert!(relative_error(&codec, 36, 3.1e-4) > least, "{}", codec.name());
    }
    assert!(relative_error(&Codec::Int4, 36, 0.01) < relative_error(&Codec::Evstore8, 36, 0.01));
    assert!(relative_error(&Codec::Evstore16, 36, 0.1) < 1e-3);
}

#[test]
fn a_product_codec_finds_the_nearest_entries() {
    let mut rng = SplitMix64::new(5);
    let rows: Vec<_> = (0..256).map(|_| normal_row(&mut rng, 48, 0.3)).collect();
    for part_dim in [1, 2, 3, 4, 6, 8, 16, 24, 48] {
        // Entry e of every part's codebook is that part of row e: rows come back as they were.
        let part_count = 48 / part_dim;
        let mut codebooks = Vec::new();
        for part in 0..part_count {
            codebooks.extend(rows.iter().flat_map(|row| &row[part_dim * part..][..part_dim]));
        }
        let quantizer = ProductQuantizer::new(48, part_count, codebooks).unwrap();
        let codec = Codec::Product(Arc::new(quantizer));
        assert_eq!(codec.code_bytes(48), part_count);
        let (arena, starts) = encode_all(&codec, &rows);
        let found = decode_all(Kernels::detect(), &codec, &arena, &starts, 48);
        assert_eq!(found, rows.concat(), "parts of {part_dim}");
    }
}

#[test]
fn refuses_what_it_cannot_keep() {
    let refused = |codec: &Codec, row: &[f32]| {
        let mut code = vec![0; codec.code_bytes(row.len())];
        codec.encode(row, &mut code).unwrap_err().kind() == ErrorKind::Invalid
    };
    for codec in &Codec::FIXED[1..] {
        assert!(refused(codec, &[0.0, f32::NAN]), "{}", codec.name());
        assert!(refused(codec, &[f32::INFINITY, 0.0]), "{}", codec.name());
        assert!(refused(codec, &[2e38, 0.0]), "{}", codec.name());
        assert!(refused(codec, &[]), "{}", codec.name());
    }
    assert!(refused(&Codec::F16, &[70_000.0]));
    assert_eq!(Codec::Int8.encode(&[1.0], &mut [0; 3]).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(Codec::by_name("int3").unwrap_err().kind(), ErrorKind::Invalid);
    assert!(Codec::FIXED.iter().all(|codec| Codec::by_name(codec.name()).unwrap() == *codec));
    for (dim, parts, len) in [(12, 5, 256 * 12), (12, 0, 256 * 12), (12, 4, 12), (0, 1, 0)] {
        assert!(ProductQuantizer::new(dim, parts, vec![0.0; len]).is_err());
    }
    assert!(ProductQuantizer::new(2, 1, vec![f32::NAN; 512]).is_err());
}

proptest! {
    #[test]
    fn any_bytes_decode_and_any_numbers_encode(
        bytes in prop::collection::vec(any::<u8>(), 1..200),
        row in prop::collection::vec(-1e38f32..1e38, 1..40),
    ) {
        for codec in codecs(row.len()) {
            let code_bytes = codec.code_bytes(row.len());
            if bytes.len() >= code_bytes {
                let starts = [0, bytes.len() - code_bytes];
                decode_all(Kernels::detect(), &codec, &bytes, &starts, row.len());
            }
            if codec != Codec::F16 {
                let (arena, starts) = encode_all(&codec, std::slice::from_ref(&row));
                let found = decode_all(Kernels::detect(), &codec, &arena, &starts, row.len());
                prop_assert!(found.iter().all(|value| value.is_finite()), "{}", codec.name());
            }
        }
    }
}

/// A matrix whose vectors are written past the caches.
struct Far<'a>(Matrix<'a>);

impl Destination for Far<'_> {
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        self.0.vector(feature, at)
    }

    fn is_far(&self) -> bool {
        true
    }
}

#[test]
fn codes_pooled_to_places_have_the_bits_of_the_matrix() {
    let mut rng = SplitMix64::new(11);
    // An empty bag, and a bag of one index.
    let (offsets, weights) = ([0, 3, 3, 4, 9], [0.5, 2.0, -1.0, 0.25, 1.5, 3.0, 0.1, 7.0, 0.3]);
    for dim in DIMS {
        let rows: Vec<_> = (0..9).map(|_| normal_row(&mut rng, dim, 0.3)).collect();
        for codec in codecs(dim) {
            let (arena, starts) = encode_all(&codec, &rows);
            for (weights, is_far, pooling) in [
                (None, false, Pooling::Sum),
                (Some(weights.as_slice()), true, Pooling::Mean),
                (None, true, Pooling::Sum),
            ] {
                let codes = Codes { codec: &codec, arena: &arena, starts: &starts, weights };
                let columns = Columns::whole(dim);
                let mut expected = vec![0.0; 4 * dim];
                let scalar = Kernels::with_isa(Isa::Scalar).unwrap();
                let decoded = decode_all(scalar, &codec, &arena, &starts, dim);
                let row_starts: Vec<usize> = (0..9).map(|row| row * dim).collect();
                let plain = Rows { arena: &decoded, starts: &row_starts, weights };
                scalar.pool_add(plain, BagRange::whole(&offsets), columns, &mut expected);
                if pooling == Pooling::Mean {
                    scalar.mean_scale(&offsets, columns, &mut expected);
                }
                for isa in Isa::available() {
                    let mut found = vec![f32::NAN; 4 * dim];
                    let mut near = Matrix::new(&mut found, std::iter::once(columns));
                    let feature = PoolFeature { feature: 0, offsets: &offsets, pooling, dim };
                    let kernels = Kernels::with_isa(isa).unwrap();
                    if is_far {
                        kernels.pool_codes_to(&[(codes, feature)], &mut Far(near));
                    } else {
                        kernels.pool_codes_to(&[(codes, feature)], &mut near);
                    }
                    assert_eq!(found, expected, "{} {} dim {dim}", codec.name(), isa.name());
                }
            }
        }
    }
}
