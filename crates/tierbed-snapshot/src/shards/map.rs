//! Where each row of a divided model lies: its shard, and its row there.

use std::path::Path;

use tierbed_core::schema::TableSchema;
use tierbed_core::store::out_of_range;
use tierbed_core::{Budget, Error, Reservation, Result, TableId};
use tierbed_io::{Folder, FsFolder, OpenMode};

use super::manifest::{DividedTable, Division, ShardInfo, ShardsManifest, SHARDS_NAME};
use super::row_map::{RowMap, RowMapShape};
use super::scatter::Scatter;

/// Where a row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Located {
    /// The shard; `None`: any, because all have it.
    pub shard: Option<u32>,
    /// Its id in the snapshot of that shard.
    pub row: u64,
}

/// An open `shards.json`: it tells of ids of all tables which shard has them.
#[derive(Debug)]
pub struct ShardMap {
    manifest: ShardsManifest,
    divided: Vec<Divided>,
    memory: Reservation,
}

/// A division that is ready to be asked.
#[derive(Debug)]
enum Divided {
    Whole(u32),
    Everywhere,
    Rows(Vec<u64>),
    Hash(Scatter),
    Placed(RowMap),
}

impl ShardMap {
    /// Opens a folder with `shards.json`, or that file, in any memory that it takes.
    ///
    /// # Errors
    /// As [`open_in`](Self::open_in).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_file = path.file_name().is_some_and(|name| name == SHARDS_NAME);
        let folder = match path.parent() {
            Some(parent) if is_file && parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) if is_file => parent,
            _ => path,
        };
        Self::open_in(&FsFolder::open(folder)?, &Budget::unlimited())
    }

    /// Opens `shards.json` of `folder`. Maps are read whole, and counted in `budget` before.
    ///
    /// # Errors
    /// `Invalid` when the folder holds no shards or the budget does not reach, `Corruption` for
    /// other bytes than were written, naming file and block; `Io`.
    pub fn open_in(folder: &dyn Folder, budget: &Budget) -> Result<Self> {
        Self::of(ShardsManifest::read(folder)?, folder, budget)
    }

    /// Opens the maps that `manifest` names.
    pub(crate) fn of(
        manifest: ShardsManifest,
        folder: &dyn Folder,
        budget: &Budget,
    ) -> Result<Self> {
        let shapes = manifest.tables.iter().map(|table| shape_of(table, manifest.shard_count()));
        let maps_bytes: u64 = shapes.flatten().map(RowMapShape::memory_bytes).sum();
        let bounds_bytes: usize = manifest.tables.iter().map(bounds_bytes).sum();
        let memory = budget.reserve("shard map", maps_bytes + bounds_bytes as u64)?;
        let divided = manifest.tables.iter().map(|table| {
            Divided::open(table, manifest.shard_count(), folder)
                .map_err(|error| error.with("table", &table.name))
        });
        let divided = divided.collect::<Result<_>>()?;
        Ok(Self { manifest, divided, memory })
    }

    /// Returns what `shards.json` says.
    #[must_use]
    pub fn manifest(&self) -> &ShardsManifest {
        &self.manifest
    }

    /// Returns how many shards there are.
    #[must_use]
    pub fn shard_count(&self) -> u32 {
        self.manifest.shard_count()
    }

    /// Returns how many servers of each shard are wanted.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.manifest.replicas
    }

    /// Returns the number of the publish, which the snapshots of all its shards carry.
    #[must_use]
    pub fn publish(&self) -> u64 {
        self.manifest.publish
    }

    /// Returns the snapshots of the shards, by number.
    #[must_use]
    pub fn shards(&self) -> &[ShardInfo] {
        &self.manifest.shards
    }

    /// Returns the tables, in id order.
    #[must_use]
    pub fn tables(&self) -> &[DividedTable] {
        &self.manifest.tables
    }

    /// Returns the id of the table called `name`, the same in every shard's snapshot.
    #[must_use]
    pub fn table_id(&self, name: &str) -> Option<TableId> {
        let at = self.manifest.tables.iter().position(|table| table.name == name)?;
        Some(TableId(at as u32))
    }

    /// Returns the bytes that bounds and maps take in memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Appends to `found` where each of `ids` of `table` lies, in their order, repeated ones
    /// included.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or an id outside it; `found` is as before then.
    pub fn locate(&self, table: TableId, ids: &[i64], found: &mut Vec<Located>) -> Result<()> {
        let (named, divided) = self.table(table)?;
        if let Some(&id) = ids.iter().find(|&&id| id < 0 || id as u64 >= named.row_count) {
            let schema = TableSchema::plain(&named.name, named.row_count, named.dim);
            return Err(out_of_range(&schema, id));
        }
        let shard_count = self.shard_count();
        found.extend(ids.iter().map(|&id| divided.locate(id as u64, shard_count)));
        Ok(())
    }

    /// Returns where row `row` of `table` lies.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or a row outside it.
    pub fn locate_row(&self, table: TableId, row: u64) -> Result<Located> {
        let (named, divided) = self.table(table)?;
        if row >= named.row_count {
            let schema = TableSchema::plain(&named.name, named.row_count, named.dim);
            return Err(out_of_range(&schema, row));
        }
        Ok(divided.locate(row, self.shard_count()))
    }

    /// Returns how many rows of `table` the snapshot of `shard` has.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or shard.
    pub fn rows_of(&self, table: TableId, shard: u32) -> Result<u64> {
        let (named, divided) = self.table(table)?;
        let shard_count = self.shard_count();
        if shard >= shard_count {
            return Err(Error::invalid("no such shard")
                .with("shard", shard)
                .with("shards", shard_count));
        }
        Ok(match divided {
            Divided::Everywhere => named.row_count,
            Divided::Whole(holder) if *holder == shard => named.row_count,
            Divided::Whole(_) => 0,
            Divided::Rows(bounds) => bound(bounds, shard + 1) - bound(bounds, shard),
            Divided::Hash(_) => {
                let (rows, shards) = (named.row_count, u64::from(shard_count));
                rows / shards + u64::from(u64::from(shard) < rows % shards)
            }
            Divided::Placed(map) => map.rows_of(shard),
        })
    }

    /// Returns the id, over all shards, of row `row` of `table` in the snapshot of `shard`; `None`
    /// when it has no such row. The reverse of [`locate`](Self::locate).
    ///
    /// # Errors
    /// `Invalid` for an unknown table or shard.
    pub fn global_of(&self, table: TableId, shard: u32, row: u64) -> Result<Option<u64>> {
        if row >= self.rows_of(table, shard)? {
            return Ok(None);
        }
        let (_, divided) = self.table(table)?;
        Ok(Some(match divided {
            Divided::Everywhere | Divided::Whole(_) => row,
            Divided::Rows(bounds) => bound(bounds, shard) + row,
            Divided::Hash(scatter) => {
                scatter.id_at(row * u64::from(self.shard_count()) + u64::from(shard))
            }
            Divided::Placed(map) => map.global_of(shard, row),
        }))
    }

    fn table(&self, table: TableId) -> Result<(&DividedTable, &Divided)> {
        let at = table.0 as usize;
        let known = self.manifest.tables.get(at).zip(self.divided.get(at));
        known.ok_or_else(|| {
            Error::invalid("no such table")
                .with("table_id", table.0)
                .with("tables", self.divided.len())
        })
    }
}

impl Divided {
    fn open(table: &DividedTable, shard_count: u32, folder: &dyn Folder) -> Result<Self> {
        Ok(match &table.divided {
            Division::Whole { shard } => Self::Whole(*shard),
            Division::Everywhere => Self::Everywhere,
            Division::Rows { bounds } => Self::Rows(bounds.clone()),
            Division::Hash => Self::Hash(Scatter::new(table.row_count)),
            Division::Placed { file, crc32c } => {
                let shape = RowMapShape { row_count: table.row_count, shard_count };
                let device = folder.open(file, OpenMode::ReadOnly)?;
                Self::Placed(RowMap::load(shape, device.as_ref(), *crc32c)?)
            }
        })
    }
}

impl Divided {
    #[inline]
    fn locate(&self, row: u64, shard_count: u32) -> Located {
        let one = |shard: u32, row| Located { shard: Some(shard), row };
        match self {
            Self::Whole(shard) => one(*shard, row),
            Self::Everywhere => Located { shard: None, row },
            Self::Rows(bounds) => {
                let (shard, start) = range_of(bounds, row);
                one(shard, row - start)
            }
            Self::Hash(scatter) => {
                let (place, shards) = (scatter.place_of(row), u64::from(shard_count));
                one((place % shards) as u32, place / shards)
            }
            Self::Placed(map) => {
                let (shard, row) = map.locate(row);
                one(shard, row)
            }
        }
    }
}

fn shape_of(table: &DividedTable, shard_count: u32) -> Option<RowMapShape> {
    let is_placed = matches!(table.divided, Division::Placed { .. });
    is_placed.then_some(RowMapShape { row_count: table.row_count, shard_count })
}

fn bounds_bytes(table: &DividedTable) -> usize {
    match &table.divided {
        Division::Rows { bounds } => size_of_val(&bounds[..]),
        _ => 0,
    }
}

/// Returns the shard whose range has `row`, and where the range begins.
fn range_of(bounds: &[u64], row: u64) -> (u32, u64) {
    let shard = bounds.partition_point(|&bound| bound <= row) as u32 - 1;
    (shard, bound(bounds, shard))
}

#[expect(clippy::indexing_slicing, reason = "there is a bound more than there are shards")]
fn bound(bounds: &[u64], shard: u32) -> u64 {
    bounds[shard as usize]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tierbed_core::env::SplitMix64;
    use tierbed_core::ErrorKind;
    use tierbed_io::MemoryFolder;

    use super::super::manifest::tests::manifest;
    use super::*;

    const WAYS: usize = 5;

    /// Writes a table of each way of dividing.
    fn written(seed: u64, row_count: u64, shard_count: u32) -> MemoryFolder {
        let mut random = SplitMix64::new(seed);
        let folder = MemoryFolder::new();
        let shards = (0..row_count).map(|_| random.below(u64::from(shard_count)) as u16).collect();
        let shape = RowMapShape { row_count, shard_count };
        let device = folder.open("map", OpenMode::Create).unwrap();
        let crc32c = RowMap::write(Arc::clone(&device), shape, shards).unwrap();
        let mut bounds: Vec<u64> = (1..shard_count).map(|_| random.below(row_count + 1)).collect();
        bounds.extend([0, row_count]);
        bounds.sort_unstable();
        let tables = [
            ("whole", row_count, Division::Whole { shard: shard_count - 1 }),
            ("everywhere", row_count, Division::Everywhere),
            ("rows", row_count, Division::Rows { bounds }),
            ("hash", row_count, Division::Hash),
            ("placed", row_count, Division::Placed { file: "map".to_owned(), crc32c }),
        ];
        let bytes = manifest(shard_count, &tables).encode().unwrap();
        folder.write_atomic(SHARDS_NAME, &bytes).unwrap();
        folder
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_id_has_one_place_and_every_place_one_id(
            seed: u64, row_count in 1u64..700, shard_count in 1u32..20,
        ) {
            let folder = written(seed, row_count, shard_count);
            let map = ShardMap::open_in(&folder, &Budget::unlimited()).unwrap();
            let ids: Vec<i64> = (0..row_count as i64).collect();
            for table in (0..WAYS as u32).map(TableId) {
                let mut found = Vec::new();
                map.locate(table, &ids, &mut found).unwrap();
                for (&id, located) in ids.iter().zip(&found) {
                    let shard = located.shard.unwrap_or(shard_count / 2);
                    let global = map.global_of(table, shard, located.row).unwrap();
                    prop_assert_eq!(global, Some(id as u64));
                }
                let copies = if table == TableId(1) { u64::from(shard_count) } else { 1 };
                let rows: u64 =
                    (0..shard_count).map(|shard| map.rows_of(table, shard).unwrap()).sum();
                // As many places as ids: with the above, each place has its id.
                prop_assert_eq!(rows, copies * row_count);
                found.sort_by_key(|located| (located.shard, located.row));
                found.dedup();
                prop_assert_eq!(found.len() as u64, row_count);
            }
        }
    }

    #[test]
    fn ranges_and_maps_keep_the_order_of_ids() {
        let folder = written(3, 500, 7);
        let map = ShardMap::open_in(&folder, &Budget::unlimited()).unwrap();
        for name in ["rows", "placed"] {
            let table = map.table_id(name).unwrap();
            for shard in 0..7 {
                let ids: Vec<_> = (0..map.rows_of(table, shard).unwrap())
                    .map(|row| map.global_of(table, shard, row).unwrap().unwrap())
                    .collect();
                assert!(ids.is_sorted(), "{name} of shard {shard}: {ids:?}");
            }
        }
        let hash = map.table_id("hash").unwrap();
        let sizes: Vec<_> = (0..7).map(|shard| map.rows_of(hash, shard).unwrap()).collect();
        assert_eq!(sizes, [72, 72, 72, 71, 71, 71, 71]);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let folder = written(4, 100, 3);
        let map = ShardMap::open_in(&folder, &Budget::unlimited()).unwrap();
        let mut found = vec![Located { shard: None, row: 0 }];
        for ids in [[0, 100], [-1, 0]] {
            let error = map.locate(TableId(2), &ids, &mut found).unwrap_err();
            assert!(error.to_string().contains("table: rows"), "{error}");
        }
        assert!(map.locate(TableId(5), &[0], &mut found).is_err());
        assert_eq!(found.len(), 1, "nothing was added");
        assert!(map.rows_of(TableId(0), 3).is_err());
        assert_eq!(map.global_of(TableId(0), 0, 0).unwrap(), None, "shard 2 has all");
        let error = ShardMap::open_in(&MemoryFolder::new(), &Budget::unlimited()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }

    #[test]
    fn maps_are_counted_before_they_are_read_and_damage_names_its_place() {
        let folder = written(5, 100_000, 8);
        let map = ShardMap::open_in(&folder, &Budget::unlimited()).unwrap();
        // 3 bits, 3.2 % counts: and bounds of 9 times 8 bytes.
        assert!((38_600..39_400).contains(&map.memory_bytes()), "{}", map.memory_bytes());
        let short = Budget::new(map.memory_bytes() - 1);
        assert!(ShardMap::open_in(&folder, &short).unwrap_err().to_string().contains("shard map"));
        let device = folder.open("map", OpenMode::ReadWrite).unwrap();
        let mut bytes = [0; 1];
        device.read_at(5000, &mut bytes).unwrap();
        device.write_at(5000, &[bytes[0] ^ 1]).unwrap();
        let error = ShardMap::open_in(&folder, &Budget::unlimited()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
        let told = error.to_string();
        assert!(told.contains("block: 1") && told.contains("table: placed"), "{told}");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the file is of this test alone")]
    fn a_folder_and_its_file_open_alike() {
        let path = tempfile::tempdir().unwrap();
        let bytes = manifest(2, &[("a", 4, Division::Hash)]).encode().unwrap();
        std::fs::write(path.path().join(SHARDS_NAME), bytes).unwrap();
        let whole = ShardMap::open(path.path()).unwrap();
        let file = ShardMap::open(path.path().join(SHARDS_NAME)).unwrap();
        assert_eq!(whole.manifest(), file.manifest());
        assert_eq!((whole.publish(), whole.replicas(), whole.shard_count()), (77, 2, 2));
        assert_eq!((whole.tables().len(), whole.shards().len()), (1, 2));
    }
}
