//! What tells one state of a file from another, without reading it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

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
