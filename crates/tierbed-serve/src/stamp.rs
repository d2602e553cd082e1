//! Small files that are followed: their state, and their bytes.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use tierbed_core::{Error, Result};

/// Largest file that is read whole.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// When a file changed, how long it is, and which file of that name it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    modified: SystemTime,
    bytes: u64,
    inode: u64,
}

impl Stamp {
    /// Looks at a file; `None` where there is none.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let about = fs::metadata(path).ok()?;
        Some(Self { modified: about.modified().ok()?, bytes: about.len(), inode: about.ino() })
    }
}

/// Reads a file of a person's making; errors name it by `what`.
///
/// # Errors
/// `Invalid` for a file that cannot be read or is too large.
pub(crate) fn read_small(path: &Path, what: &str) -> Result<Vec<u8>> {
    let failed = |cause: std::io::Error| {
        let error = Error::invalid(format!("cannot read the file of the {what}"));
        error
            .with("path", path.display())
            .with("cause", cause)
            .with("remedy", "name a file that the server may read")
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Error::invalid(format!("the file of the {what} is too large"))
            .with("path", path.display())
            .with("bytes_max", FILE_BYTES_MAX));
    }
    Ok(bytes)
}
