//! Files of neighbours: what was written comes back, and nothing else ever does.

use std::collections::BTreeMap;

use tierbed_core::checksum::crc32c;
use tierbed_core::env::SplitMix64;
use tierbed_core::{ErrorKind, RowId, TableId, TableSchema};
use tierbed_io::{AlignedBuf, MemoryDevice};

use super::*;

fn schema() -> Schema {
    let table = |(name, dim, rows): (&str, u32, u64)| TableSchema::plain(name, rows, dim);
    let tables = [("a", 16, 700), ("other", 8, 50), ("b", 16, 1000), ("none", 16, 3)];
    Schema::new(tables.map(table).to_vec()).unwrap()
}

fn key(table: u32, row: u64) -> RowKey {
    RowKey::new(TableId(table), RowId(row))
}

fn empty() -> Arc<dyn Device> {
    Arc::new(MemoryDevice::new("near"))
}

/// Neighbours of rows of `a` and `b`, among both; every fifth row has none.
fn some_neighbours() -> BTreeMap<RowKey, RowKey> {
    let mut rng = SplitMix64::new(5);
    let rows = (0..700).map(|row| key(0, row)).chain((0..1000).map(|row| key(2, row)));
    let near = rows.filter(|key| key.row.0 % 5 > 0).map(|of| {
        let near = if rng.below(2) == 0 { key(0, rng.below(700)) } else { key(2, rng.below(1000)) };
        (of, near)
    });
    near.collect()
}

fn written(schema: &Schema, near: &BTreeMap<RowKey, RowKey>) -> Arc<dyn Device> {
    let device = empty();
    let has = |table: TableId| table.0 == 0 || table.0 == 2;
    NeighbourFile::write(&device, schema, has, &|key| near.get(&key).copied()).unwrap();
    device
}

fn find(file: &NeighbourFile, key: RowKey) -> Result<Option<RowKey>> {
    let Some((block, word)) = file.place_of(key) else { return Ok(None) };
    let mut buffer = AlignedBuf::new(PAGE_BYTES);
    let words = file.read(block, &mut buffer)?;
    file.neighbour(key, words, word)
}

#[test]
fn what_was_written_comes_back() {
    let (schema, near) = (schema(), some_neighbours());
    let file = NeighbourFile::open(written(&schema, &near), &schema).unwrap();
    for (table, rows) in (0..).zip(schema.tables().iter().map(|table| table.row_count)) {
        assert_eq!(file.has(TableId(table)), table == 0 || table == 2);
        for row in 0..rows {
            let key = key(table, row);
            let expected = near.get(&key).copied().filter(|near| *near != key);
            assert_eq!(find(&file, key).unwrap(), expected, "{key:?}");
        }
    }
    for absent in [key(0, 700), key(2, u64::MAX), key(9, 0)] {
        assert_eq!(file.place_of(absent), None);
    }
}

#[test]
fn a_header_may_fill_several_blocks() {
    let tables = (0..700).map(|at| TableSchema::plain(format!("t{at}"), 3, 4));
    let schema = Schema::new(tables.collect()).unwrap();
    let device = empty();
    let has = |table: TableId| table.0 % 2 == 1;
    NeighbourFile::write(&device, &schema, has, &|of| Some(key(699 - of.table.0, of.row.0)))
        .unwrap();
    let file = NeighbourFile::open(device, &schema).unwrap();
    for table in 0..700 {
        let expected = (table % 2 == 1).then(|| key(699 - table, 2));
        assert_eq!(find(&file, key(table, 2)).unwrap(), expected);
    }
}

/// Whatever byte is wrong: opening or reading fails, or the answers are those that were written.
#[test]
fn every_wrong_byte_is_noticed() {
    let (schema, near) = (schema(), some_neighbours());
    let device = written(&schema, &near);
    let pages = device.len_bytes().unwrap() / PAGE_BYTES as u64;
    let mut rng = SplitMix64::new(1);
    let (mut refused, mut failed) = (0, 0);
    for at in (0..pages).flat_map(|page| (0..64).map(move |at| page * PAGE_BYTES as u64 + at)) {
        let mut byte = [0];
        device.read_at(at, &mut byte).unwrap();
        device.write_at(at, &[byte[0] ^ 1 << rng.below(8)]).unwrap();
        match NeighbourFile::open(Arc::clone(&device), &schema) {
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Invalid));
                assert!(error.to_string().contains("remedy"), "{error}");
                refused += 1;
            }
            Ok(file) => {
                for of in near.keys() {
                    match find(&file, *of) {
                        Ok(found) => assert_eq!(found, near.get(of).copied().filter(|n| n != of)),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Corruption);
                            assert!(error.to_string().contains("write the neighbours again"));
                            failed += 1;
                        }
                    }
                }
            }
        }
        device.write_at(at, &byte).unwrap();
    }
    assert_eq!(refused, 64, "the header is read when the file is opened");
    assert!(failed > 64 * 300, "{failed}");
}

#[test]
fn torn_and_other_files_are_refused() {
    let (schema, near) = (schema(), some_neighbours());
    let whole = written(&schema, &near).len_bytes().unwrap();
    for len_bytes in [0, 100, 4095, 4096, whole - 4096, whole - 1, whole + 1, whole + 4096] {
        let device = written(&schema, &near);
        device.set_len(len_bytes).unwrap();
        let error = NeighbourFile::open(Arc::clone(&device), &schema).unwrap_err();
        let expected = if len_bytes < 4096 { ErrorKind::Invalid } else { ErrorKind::Corruption };
        assert_eq!(error.kind(), expected, "{len_bytes} bytes: {error}");
        assert!(error.to_string().contains("remedy"));
    }
    let other = empty();
    other.write_at(0, &[7; 3 * PAGE_BYTES]).unwrap();
    let error = NeighbourFile::open(other, &schema).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("does not hold neighbours"), "{error}");
}

#[test]
fn neighbours_of_other_tables_are_refused() {
    let tables = schema().tables().to_vec();
    let device = written(&schema(), &some_neighbours());
    let changes: [fn(&mut Vec<TableSchema>); 5] = [
        |tables| tables[0].name = "c".to_owned(),
        |tables| tables[2].row_count += 1,
        |tables| tables[1].dim = 16,
        |tables| tables.swap(0, 2),
        |tables| drop(tables.pop()),
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut other = tables.clone();
        change(&mut other);
        let other = Schema::new(other).unwrap();
        let error = NeighbourFile::open(Arc::clone(&device), &other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{at}");
        assert!(error.to_string().contains("of other tables"), "{at}: {error}");
    }
}

#[test]
fn neighbours_that_cannot_answer_are_not_written() {
    for near in [key(1, 0), key(0, 700), key(4, 0)] {
        let error =
            NeighbourFile::write(&empty(), &schema(), |table| table.0 == 0, &|_| Some(near));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid, "{near:?}");
    }
}

/// Words whose checksum is right may still be wrong.
#[test]
fn a_neighbour_that_no_table_has_is_corruption() {
    let schema = schema();
    let device = written(&schema, &some_neighbours());
    let mut block = AlignedBuf::new(PAGE_BYTES);
    for wrong in [1 << 40, 700, 9 << 40, u64::MAX - 1, (1 << 40) - 1] {
        let at = PAGE_BYTES as u64;
        device.read_at(at, &mut block).unwrap();
        block[8..16].copy_from_slice(&u64::to_le_bytes(wrong));
        let crc = crc32c(&block[4..]);
        block[..4].copy_from_slice(&crc.to_le_bytes());
        device.write_at(at, &block).unwrap();
        let file = NeighbourFile::open(Arc::clone(&device), &schema).unwrap();
        assert_eq!(find(&file, key(0, 0)).unwrap_err().kind(), ErrorKind::Corruption, "{wrong:x}");
    }
}

#[test]
fn neighbours_are_read_from_names() {
    let parse = |text: &str| NeighbourOptions::parse(text, || Ok(empty()));
    let given = parse("neighbours:second_chance:2.5:inline").unwrap().unwrap();
    assert_eq!((given.share, given.is_inline), (2.5, true));
    let given = parse("neighbours").unwrap().unwrap();
    assert_eq!((given.share, given.is_inline), (4.0, false));
    assert!(parse("int8:group_frequency:1").unwrap().is_none());
    for wrong in ["lru", "second_chance:0", "second_chance:x", "second_chance:1:now"] {
        assert!(parse(&format!("neighbours:{wrong}")).is_err(), "{wrong}");
    }
    assert!(parse("neighbours:second_chance:1:inline:1").is_err());
}
