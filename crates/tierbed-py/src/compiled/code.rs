//! The machine code of a compiled model: unpacked into a private folder, loaded once.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind as Failure, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tierbed_core::{Error, Result};

use super::calls::{load, ModelCalls};

/// Code that is loaded until the process ends.
pub(super) struct Code {
    bytes: Vec<u8>,
    pub(super) calls: ModelCalls,
}

/// All code of this process: versions mostly differ by their weights alone.
static LOADED: Mutex<Vec<&'static Code>> = Mutex::new(Vec::new());

impl Code {
    /// Loads `bytes`, or finds them where they are loaded.
    ///
    /// # Errors
    /// `Io` when they cannot be written, `Invalid` for what the loader refuses.
    pub(super) fn of(bytes: Vec<u8>) -> Result<&'static Self> {
        // Entries are whole after every statement.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = loaded.iter().find(|code| code.bytes == bytes) {
            return Ok(*code);
        }
        let folder = Private::new(loaded.len())?;
        let path = folder.write(&bytes)?;
        let calls = load(&path).map_err(|cause| {
            super::refused("the compiled model cannot be loaded")
                .with("cause", cause)
                .with("path", path.display())
        })?;
        let code: &'static Self = Box::leak(Box::new(Self { bytes, calls }));
        loaded.push(code);
        Ok(code)
    }
}

/// A folder that nobody else may enter, until it is dropped.
struct Private(PathBuf);

impl Private {
    /// Makes one for the library behind `loaded` others. No two libraries may have one path: the
    /// loader takes a path that it knows for the library that it has.
    fn new(loaded: usize) -> Result<Self> {
        let mut at = 0;
        loop {
            let name = format!("tierbed-{}-{loaded}-{at}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                // Left behind by a process of this number.
                Err(cause) if cause.kind() == Failure::AlreadyExists => at += 1,
                Err(cause) => return Err(not_written(&path, cause)),
            }
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<PathBuf> {
        let path = self.0.join("model.so");
        let file = OpenOptions::new().write(true).create_new(true).mode(0o700).open(&path);
        let written = file.and_then(|mut file| file.write_all(bytes));
        written.map_err(|cause| not_written(&path, cause))?;
        Ok(path)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // What is mapped stays; a folder that is left behind is only a few bytes of disk.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn not_written(path: &Path, cause: std::io::Error) -> Error {
    Error::os("the compiled model cannot be unpacked", cause)
        .with("path", path.display())
        .with("remedy", "let the environment variable TMPDIR name a folder with room")
}
