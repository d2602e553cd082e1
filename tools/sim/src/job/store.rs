//! What does a training store do under a [`SimJob`]? Every step reads a window of rows and writes
//! the step's number into them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, Result, RowKey, TableId, TrainStore};
use tierbed_io::Folder;

use super::SimJob;
use crate::rows::{row, table, version_of, versions, write_version, Versions};
use crate::{Chance, FaultPlan, SimFolder};

/// A seeded job over a training store with two tables, of dim 8 and 40.
pub struct StoreJob<S> {
    /// Seed of options and windows.
    pub seed: u64,
    /// Steps of a run.
    pub steps: u64,
    /// Steps between commits.
    pub stride: u64,
    /// Rows of the two tables.
    pub row_counts: [u64; 2],
    /// Opens the store of a seed, without tables.
    pub open: fn(Arc<dyn Folder>, u64) -> Result<S>,
    /// The rows of a step by seed, step and `row_counts`; in any order, duplicates allowed.
    pub window: fn(u64, u64, [u64; 2]) -> Vec<RowKey>,
    /// What the store is told of a window before it is read.
    pub announce: fn(&mut S, &[RowKey]) -> Result<()>,
    /// Reads the versions of unique rows, ascending.
    pub read: fn(&mut S, &[RowKey]) -> Result<Versions>,
    /// See [`SimJob::is_repeatable`].
    pub is_repeatable: bool,
}

impl<S: TrainStore> StoreJob<S> {
    /// Describes a run of 12 steps with a commit every third, over
    /// [drifting windows](drifting_window), announced to nobody.
    #[must_use]
    pub fn new(
        seed: u64,
        row_counts: [u64; 2],
        open: fn(Arc<dyn Folder>, u64) -> Result<S>,
    ) -> Self {
        Self {
            seed,
            steps: 12,
            stride: 3,
            row_counts,
            open,
            window: drifting_window,
            announce: |_, _| Ok(()),
            read: |store, rows| versions(store, rows),
            is_repeatable: true,
        }
    }

    /// Returns the version of every row after `step` steps.
    #[must_use]
    pub fn oracle(&self, step: u64) -> BTreeMap<RowKey, u32> {
        let window = |step| (self.window)(self.seed, step, self.row_counts);
        let rows = |step| window(step).into_iter().map(move |row| (row, step as u32 + 1));
        (0..step).flat_map(rows).collect()
    }

    /// Scans the version of every row that was ever written.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Panics
    /// When a read finds others.
    pub fn all_versions(&self, store: &mut S) -> Result<BTreeMap<RowKey, u32>> {
        let mut found = BTreeMap::new();
        for id in [TableId(0), TableId(1)] {
            store.scan(id, &mut |row, record| {
                found.insert(RowKey::new(id, row), version_of(record)?);
                Ok(())
            })?;
        }
        let rows: Vec<_> = found.keys().copied().collect();
        let read = (self.read)(store, &rows)?;
        let scanned = found.values().map(|version| Some(*version));
        assert!(read.into_iter().eq(scanned), "a read finds other rows than a scan");
        Ok(found)
    }
}

impl<S: TrainStore> SimJob for StoreJob<S> {
    type Store = S;

    fn open(&self, folder: &SimFolder) -> Result<S> {
        let mut store = (self.open)(Arc::new(folder.clone()), self.seed)?;
        let [first, second] = self.row_counts;
        store.add_table(table("a", 8, first))?;
        store.add_table(table("b", 40, second))?;
        Ok(store)
    }

    fn position(&self, store: &mut S) -> Result<u64> {
        let text = store.attachment(POSITION)?;
        text.map_or(Ok(0), |text| parse_position(&text))
    }

    fn step(&self, store: &mut S, step: u64) -> Result<()> {
        let mut rows = (self.window)(self.seed, step, self.row_counts);
        (self.announce)(store, &rows)?;
        rows.sort_unstable();
        rows.dedup();
        (self.read)(store, &rows)?;
        write_version(store, &rows, step as u32 + 1)
    }

    fn commit(&self, store: &mut S, position: u64) -> Result<()> {
        let text = position.to_string();
        store.commit("s", &[Attachment { name: POSITION, bytes: text.as_bytes() }])
    }

    fn verify(&self, store: &mut S) -> Result<()> {
        store.verify().map(|_| ())
    }

    fn is_right(&self, store: &mut S, position: u64) -> Result<bool> {
        Ok(self.all_versions(store)? == self.oracle(position))
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + self.stride
    }

    fn is_repeatable(&self) -> bool {
        self.is_repeatable
    }
}

/// Attachment with the steps done.
const POSITION: &str = "position";

fn parse_position(text: &[u8]) -> Result<u64> {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| Error::corruption("attachment position is no number"))
}

/// Returns sixty rows of two tables; of the first, half are popular ones that change with time.
#[must_use]
pub fn drifting_window(seed: u64, step: u64, row_counts: [u64; 2]) -> Vec<RowKey> {
    let mut rng = SplitMix64::new(seed ^ (step << 20));
    let mut rows = Vec::new();
    for _ in 0..30 {
        // Every other step another part of the table is popular.
        let near = step / 6 * 40 + rng.below(20);
        let far = rng.below(row_counts[0]);
        rows.push(row(0, if rng.below(2) == 0 { near } else { far }));
        rows.push(row(1, rng.below(row_counts[1])));
    }
    rows
}

/// Checks that a commit whose sync fails is `Io`, and that the store refuses from then on.
///
/// # Panics
/// When it does not.
pub fn check_failed_sync<S: TrainStore>(job: &StoreJob<S>) {
    let run = || -> Result<()> {
        let folder = SimFolder::default();
        let mut store = job.open(&folder)?;
        write_version(&mut store, &[row(0, 1)], 1)?;
        let sync_error = Chance::Nth(0);
        folder.set_plan(FaultPlan { seed: job.seed, sync_error, ..FaultPlan::default() });
        let failed = store.commit("s", &[]).err();
        assert_eq!(failed.map(|error| error.kind()), Some(ErrorKind::Io));
        let refused = write_version(&mut store, &[row(0, 1)], 2).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::Poisoned));
        Ok(())
    };
    run().unwrap_or_else(|error| panic!("{error}"));
}

/// Checks that a store whose disk filled up says so and goes on once there is room. The disk is
/// filled by writing the first `pressure_rows` rows of the first table again and again.
///
/// # Panics
/// When it does not.
pub fn check_use_after_full_disk<S: TrainStore>(job: &StoreJob<S>, pressure_rows: u64) {
    let run = || -> Result<()> {
        let folder = SimFolder::default();
        let mut store = job.open(&folder)?;
        let rows: Vec<_> = (0..300).map(|at| row(0, at)).collect();
        let more: Vec<_> = (0..pressure_rows).map(|at| row(0, at)).collect();
        write_version(&mut store, &rows, 1)?;
        store.commit("one", &[])?;
        let enospc_after_bytes = Some(1);
        folder.set_plan(FaultPlan { seed: job.seed, enospc_after_bytes, ..FaultPlan::default() });
        let refused = (2..60).find_map(|version| write_version(&mut store, &more, version).err());
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::NoSpace));
        let refused = store.commit("two", &[]).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::NoSpace));
        folder.set_plan(FaultPlan::default());
        write_version(&mut store, &rows, 100)?;
        store.commit("three", &[])?;
        store.verify()?;
        drop(store);
        let mut store = job.open(&folder)?;
        assert_eq!((job.read)(&mut store, &rows)?, vec![Some(100); rows.len()]);
        Ok(())
    };
    run().unwrap_or_else(|error| panic!("{error}"));
}
