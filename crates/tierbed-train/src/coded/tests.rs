#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

use tierbed_core::{ErrorKind, InitSpec};
use tierbed_kernels::Pooling;

use super::*;

const DIMS: [u32; 3] = [8, 64, 70];

fn table(name: &str, dim: u32) -> TableSchema {
    let init = InitSpec::Normal { mean: 0.0, std: 0.5 };
    TableSchema { init, seed: 7, ..TableSchema::plain(name, 40, dim) }
}

fn coded(codec: &Codec) -> CodedTables {
    let mut tables = CodedTables::new();
    for (at, dim) in DIMS.into_iter().enumerate() {
        tables.add_table(table(&format!("t{at}"), dim), codec.clone(), 0..40).unwrap();
    }
    tables
}

/// Every row of every table, decoded first and then pooled row by row.
fn pooled_naively(tables: &CodedTables, plan: &FeatureLayout, bags: &Bags<'_>) -> Vec<f32> {
    let mut out = vec![0.0f32; plan.output_len(bags)];
    for (at, feature) in plan.features().iter().enumerate() {
        let offsets = bags.feature_offsets(at);
        for bag in 0..bags.batch_size() {
            let place = &mut out[feature.columns.range(bag)];
            let range = offsets[bag] as usize..offsets[bag + 1] as usize;
            for index in range.clone() {
                let mut row = vec![0.0; feature.columns.dim];
                tables.read_rows(feature.table, bags.indices[index] as u64, &mut row).unwrap();
                for (sum, value) in place.iter_mut().zip(row) {
                    *sum += bags.weights.map_or(value, |weights| weights[index] * value);
                }
            }
            if feature.pooling == Pooling::Mean && !range.is_empty() {
                place.iter_mut().for_each(|sum| *sum /= range.len() as f32);
            }
        }
    }
    out
}

#[test]
fn lookups_have_the_bits_of_decoding_first() {
    let indices = [0, 39, 5, 5, 7, 1, 2, 3, 4, 39];
    let offsets = [0, 3, 3, 4, 4, 5, 6, 8, 10, 10];
    let weights: Vec<f32> = (1u8..11).map(|at| 1.0 / f32::from(at)).collect();
    for codec in Codec::FIXED {
        let mut tables = coded(&codec);
        let features =
            [(TableId(0), Pooling::Sum), (TableId(1), Pooling::Mean), (TableId(2), Pooling::Sum)];
        let plan = FeatureLayout::new(tables.schema(), &features).unwrap();
        for weights in [None, Some(weights.as_slice())] {
            let bags = Bags::new(&indices, &offsets, weights, 3).unwrap();
            let mut out = vec![f32::NAN; plan.output_len(&bags)];
            tables.lookup(&plan, &bags, &mut out).unwrap();
            assert_eq!(out, pooled_naively(&tables, &plan, &bags), "{}", codec.name());
        }
    }
}

#[test]
fn without_pooling_every_index_has_its_row() {
    let mut tables = coded(&Codec::Int8);
    let features = [(TableId(1), Pooling::None), (TableId(1), Pooling::None)];
    let plan = FeatureLayout::new(tables.schema(), &features).unwrap();
    let bags = Bags::new(&[3, 9, 9], &[0, 2, 3], None, 2).unwrap();
    let mut out = vec![f32::NAN; 3 * 64];
    tables.lookup(&plan, &bags, &mut out).unwrap();
    for (found, row) in out.chunks_exact(64).zip([3, 9, 9]) {
        let mut expected = vec![0.0; 64];
        tables.read_rows(TableId(1), row, &mut expected).unwrap();
        assert_eq!(found, expected);
    }
}

#[test]
fn rows_take_as_many_bytes_as_their_codes() {
    for (codec, row_bytes) in
        [(Codec::F32, 256), (Codec::F16, 128), (Codec::Bf16, 128), (Codec::Int8, 68)]
    {
        let tables = coded(&codec);
        assert_eq!(tables.held_bytes(TableId(1)).unwrap(), 40 * row_bytes);
        assert_eq!(tables.codes(TableId(1), 3, 2).unwrap().len(), 2 * row_bytes);
    }
}

#[test]
fn unwritten_rows_are_initial_ones_and_codes_move_as_they_are() {
    let tables = coded(&Codec::F32);
    let mut narrow = coded(&Codec::Bf16);
    let (mut exact, mut near) = (vec![0.0; 64], vec![0.0; 64]);
    for row in 0..40 {
        fill_initial(&table("t1", 64).init, 7, row, &mut exact);
        tables.read_rows(TableId(1), row, &mut near).unwrap();
        assert_eq!(near, exact);
        narrow.read_rows(TableId(1), row, &mut near).unwrap();
        for (near, exact) in near.iter().zip(&exact) {
            assert!((near - exact).abs() <= exact.abs() / 256.0);
        }
    }
    let moved = narrow.codes(TableId(1), 4, 3).unwrap().to_vec();
    narrow.write_codes(TableId(1), 20, &moved).unwrap();
    assert_eq!(narrow.codes(TableId(1), 20, 3).unwrap(), moved);
    exact.fill(0.25);
    narrow.write_rows(TableId(1), 22, &exact).unwrap();
    narrow.read_rows(TableId(1), 22, &mut near).unwrap();
    assert_eq!(near, exact);
    assert_eq!(narrow.codes(TableId(1), 20, 2).unwrap(), &moved[..256]);
}

#[test]
fn what_is_not_here_is_refused() {
    let mut tables = CodedTables::new();
    let id = tables.add_table(table("a", 8), Codec::F16, 10..20).unwrap();
    assert_eq!(tables.add_table(table("a", 8), Codec::F16, 10..20).unwrap(), id);
    assert_eq!(tables.kept_as(id).unwrap(), (&Codec::F16, 10..20));
    let refused = [
        tables.add_table(table("a", 8), Codec::Bf16, 10..20).map(drop),
        tables.add_table(table("a", 8), Codec::F16, 10..21).map(drop),
        tables.add_table(table("a", 9), Codec::F16, 10..20).map(drop),
        tables.add_table(table("b", 8), Codec::F16, 10..41).map(drop),
        tables.write_rows(id, 9, &[0.0; 8]),
        tables.write_rows(id, 10, &[0.0; 9]),
        tables.write_rows(id, 19, &[0.0; 16]),
        tables.write_rows(id, 10, &[1e6; 8]),
        tables.write_codes(id, 20, &[0; 16]),
        tables.read_rows(TableId(1), 10, &mut [0.0; 8]),
    ];
    for (at, error) in refused.into_iter().enumerate() {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid, "{at}");
    }
    let plan = FeatureLayout::new(tables.schema(), &[(id, Pooling::Sum)]).unwrap();
    for row in [9, 20] {
        let (indices, mut out) = ([row], [7.0; 8]);
        let bags = Bags::new(&indices, &[0, 1], None, 1).unwrap();
        assert_eq!(tables.lookup(&plan, &bags, &mut out).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(out, [7.0; 8]);
    }
    let too_large = InitSpec::Constant { value: 1e6 };
    let wild = TableSchema { init: too_large, ..table("wild", 8) };
    assert!(tables.add_table(wild.clone(), Codec::F16, 0..5).is_err());
    assert!(tables.add_table(wild, Codec::F32, 0..5).is_ok());
}
