use std::collections::HashMap;
use std::io::Write;

use super::shape::COLUMNS;
use super::*;
use crate::generator::CRITEO_CARDINALITIES;

const SMALL: TraceOptions = TraceOptions { seed: 7, scale: 0.002 };

fn columns(options: &TraceOptions) -> Vec<Vec<u32>> {
    let mut columns = vec![Vec::new(); 26];
    Columns::new(options)
        .for_each(&mut |at, column, _| {
            columns[at] = column.to_vec();
            Ok(())
        })
        .unwrap();
    columns
}

fn overwrite(path: &Path, bytes: &[u8]) {
    std::fs::File::create(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_file_holds_the_columns_in_any_order_of_reading() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let mut done = Vec::new();
    let stats = write_trace(&SMALL, &path, &mut |count| {
        done.push(count);
        Ok(())
    })
    .unwrap();
    assert_eq!(done, (1..=26).collect::<Vec<_>>());
    let columns = columns(&SMALL);
    let mut reader = TraceReader::open(&path).unwrap();
    assert_eq!(reader.options(), &SMALL);
    assert_eq!(reader.sample_count(), 91_681);
    let rows: Vec<u64> = stats.columns.iter().map(|column| column.row_count).collect();
    assert_eq!(reader.row_counts()[..], rows);
    let mut ids = Vec::new();
    for (first, count) in [(0usize, 2048), (90_000, 1_681), (5, 1), (91_681, 0)] {
        reader.read(first as u64, count, &mut ids).unwrap();
        for (at, column) in columns.iter().enumerate() {
            let found = ids[at * count..(at + 1) * count].iter().map(|id| *id as u32);
            assert!(found.eq(column[first..first + count].iter().copied()), "C{}", at + 1);
        }
    }
    assert!(reader.read(91_681, 1, &mut ids).is_err());
    assert!(reader.read(u64::MAX, 2, &mut ids).is_err());
}

#[test]
fn ids_are_dense_by_first_appearance_and_chains_are_functions() {
    let columns = columns(&SMALL);
    for column in &columns {
        let mut next = 0;
        for id in column {
            assert!(*id <= next);
            next = next.max(id + 1);
        }
    }
    for pair in COLUMNS.windows(2).filter(|pair| pair[1].is_function) {
        let mut parents: HashMap<u32, u32> = HashMap::new();
        for (child, parent) in columns[pair[0].at].iter().zip(&columns[pair[1].at]) {
            assert_eq!(*parents.entry(*child).or_insert(*parent), *parent);
        }
    }
}

#[test]
fn a_smaller_trace_is_the_beginning_of_a_larger_one() {
    let small = columns(&SMALL);
    let large = columns(&TraceOptions { scale: 0.004, ..SMALL });
    for (small, large) in small.iter().zip(&large) {
        assert_eq!(small[..], large[..small.len()]);
    }
    assert_ne!(small, columns(&TraceOptions { seed: 8, ..SMALL }));
}

#[test]
fn rows_grow_and_repeat_as_the_processes_say() {
    let options = TraceOptions { seed: 3, scale: 0.01 };
    let mut stats = TraceStats::new(&options);
    Columns::new(&options)
        .for_each(&mut |at, column, row_count| {
            stats.count(at, column, row_count);
            Ok(())
        })
        .unwrap();
    let near = |found: u64, expected: f64, tolerance: f64, what: &str| {
        assert!((found as f64 / expected - 1.0).abs() < tolerance, "{what}: {found} {expected}");
    };
    let mut previous = 0.0;
    for shape in &COLUMNS {
        let column = &stats.columns[shape.at];
        let draws = if shape.is_function { previous } else { options.sample_count() as f64 };
        let (expected, once) = shape.growth.expect(draws);
        let largest = f64::from(shape.growth.token_count_max);
        previous = column.row_count as f64;
        if expected > 2_000.0 {
            let what = format!("C{}", shape.at + 1);
            near(column.row_count, expected.min(largest), 0.05, &what);
            if !shape.is_function && once > 1_000.0 {
                near(column.once_count, once, 0.08, &what);
            }
        }
    }
    assert!((12_800.0..14_300.0).contains(&stats.rows_per_batch()), "{}", stats.rows_per_batch());
}

// The processes' parameters against the published log, without drawing it.
#[test]
fn the_whole_trace_is_expected_to_be_as_large_as_the_log() {
    let mut draws = 0.0;
    let (mut rows, mut once) = (0.0, 0.0);
    for shape in &COLUMNS {
        if !shape.is_function {
            draws = CRITEO_SAMPLES as f64;
        }
        let (expected, expected_once) = shape.growth.expect(draws);
        let published = f64::from(CRITEO_CARDINALITIES[shape.at]);
        let expected = expected.min(f64::from(shape.growth.token_count_max));
        if published > 3_500.0 {
            let share = expected / published;
            assert!((0.97..1.03).contains(&share), "C{}: {expected} {published}", shape.at + 1);
        }
        if shape.at == 2 {
            once = expected_once;
        }
        rows += expected;
        draws = expected;
    }
    assert!((33.2e6..34.4e6).contains(&rows), "{rows}");
    assert!((0.88..0.90).contains(&(once / 10_131_227.0)), "{once}");
}

#[test]
fn damaged_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let options = TraceOptions { seed: 1, scale: 1e-5 };
    write_trace(&options, &path, &mut |_| Ok(())).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for at in [0, 9, 13, 20, 33, 41, 300] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        overwrite(&path, &bytes);
        let error = TraceReader::open(&path).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "byte {at}");
    }
    for len in [0, 100, 4096, whole.len() - 4096] {
        overwrite(&path, &whole[..len]);
        assert!(TraceReader::open(&path).is_err(), "{len}");
    }
    let mut bytes = whole.clone();
    bytes[4096..].fill(0xff);
    overwrite(&path, &bytes);
    let error = TraceReader::open(&path).unwrap().read(0, 10, &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption);
}

#[test]
fn bad_scales_and_a_stop_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for scale in [0.0, -1.0, 1.5, f64::NAN] {
        let options = TraceOptions { seed: 1, scale };
        assert!(write_trace(&options, &folder.path().join("t"), &mut |_| Ok(())).is_err());
    }
    let stopped =
        write_trace(&SMALL, &folder.path().join("t"), &mut |_| Err(Error::invalid("stop")));
    assert_eq!(stopped.unwrap_err().message(), "stop");
    assert!(TraceReader::open(&folder.path().join("t")).is_err(), "unfinished");
}
