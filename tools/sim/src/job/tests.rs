//! Do the checks see what a careless store does? A notebook of one number, kept with care or not.

use tierbed_io::{Folder, OpenMode};

use super::*;
use crate::SimFolder;

/// What a notebook forgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sloth {
    Nothing,
    SyncOfTheFile,
    SyncOfTheFolder,
    Checksum,
    KindOfError,
}

struct Notebook(Sloth);

const FILE: &str = "notebook";

impl Notebook {
    fn read(&self, folder: &SimFolder) -> Result<u64> {
        let Some(bytes) = folder.read(FILE)? else { return Ok(0) };
        let damaged = || Error::corruption("notebook");
        let (number, check) = bytes.split_first_chunk().ok_or_else(damaged)?;
        let is_whole = number.iter().map(|byte| !byte).eq(check.iter().copied());
        match is_whole || self.0 == Sloth::Checksum {
            true => Ok(u64::from_le_bytes(*number)),
            false => Err(damaged()),
        }
    }

    fn write(&self, folder: &SimFolder, number: u64) -> Result<()> {
        let number = number.to_le_bytes();
        let bytes = [number, number.map(|byte| !byte)].concat();
        match self.0 {
            Sloth::SyncOfTheFile => {
                folder.open(FILE, OpenMode::Create)?.write_at(0, &bytes)?;
                folder.sync()
            }
            Sloth::SyncOfTheFolder => folder.write_durable(FILE, &bytes),
            _ => folder.write_atomic(FILE, &bytes),
        }
    }
}

impl SimJob for Notebook {
    type Store = (SimFolder, u64);

    fn open(&self, folder: &SimFolder) -> Result<Self::Store> {
        Ok((folder.clone(), self.read(folder)?))
    }

    fn position(&self, store: &mut Self::Store) -> Result<u64> {
        Ok(store.1)
    }

    fn step(&self, store: &mut Self::Store, _: u64) -> Result<()> {
        store.1 = self.read(&store.0)?;
        Ok(())
    }

    fn commit(&self, store: &mut Self::Store, _: u64) -> Result<()> {
        let written = self.write(&store.0, store.1 + 2);
        match self.0 {
            Sloth::KindOfError => written.map_err(|_| Error::corruption("something is wrong")),
            _ => written,
        }
    }

    fn verify(&self, store: &mut Self::Store) -> Result<()> {
        self.read(&store.0).map(|_| ())
    }

    fn is_right(&self, _: &mut Self::Store, position: u64) -> Result<bool> {
        Ok(position <= self.steps() && position.is_multiple_of(2))
    }

    fn steps(&self) -> u64 {
        8
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + 2
    }
}

/// Runs every check on every way to write the notebook; returns whether all found it in order.
fn is_found_in_order(sloth: Sloth) -> bool {
    let job = Notebook(sloth);
    let check = || {
        for seed in 0..20 {
            check_power_loss(&job, seed, 1);
            check_repeated_power_loss(&job, seed, 10, 12);
            check_failed_calls(
                &job,
                seed,
                FailedCalls { count: 6, write_stride: 1, read_stride: 1 },
            );
            check_full_disk(&job, seed, [0, 4096, 8192]);
            for kind in 0..4 {
                check_lie(&job, lie(kind, seed % 4, seed));
            }
        }
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
}

#[test]
fn the_checks_pass_the_careful_and_catch_every_careless_one() {
    assert!(is_found_in_order(Sloth::Nothing));
    for sloth in [Sloth::SyncOfTheFile, Sloth::SyncOfTheFolder, Sloth::Checksum, Sloth::KindOfError]
    {
        assert!(!is_found_in_order(sloth), "{sloth:?}");
    }
}

#[test]
fn lies_are_told_by_whoever_meets_them() {
    let job = Notebook(Sloth::Nothing);
    assert_eq!(check_lie(&job, lie(0, 3, 1)), Told::Reopening);
    assert_eq!(check_lie(&job, lie(0, 99, 1)), Told::Never);
}
