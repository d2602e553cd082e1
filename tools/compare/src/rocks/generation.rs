//! How does a RocksDB database go back to the last commit? As folders of linked files.
//!
//! ```text
//! rocks-live/        the open database; without a log it forgets and remembers as it likes
//! rocks-000012/      RocksDB's checkpoint of commit 12: never opened, only linked from
//! ```
//!
//! Opening a store makes `rocks-live` anew from the checkpoint of the commit in force: SSTs are
//! immutable and linked, the few small files are copied. So a crash loses what was not committed,
//! all of it, although RocksDB had flushed some.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};

const LIVE: &str = "rocks-live";
const PREFIX: &str = "rocks-";

/// A file of a checkpoint and its length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedFile {
    pub(crate) name: String,
    pub(crate) len_bytes: u64,
}

/// Returns the folder of the open database.
pub(crate) fn live_path(folder: &Path) -> PathBuf {
    folder.join(LIVE)
}

/// Returns the folder of commit `number`'s checkpoint.
pub(crate) fn checkpoint_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number:06}"))
}

fn failed<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |cause| Error::os(what, cause).with("path", path.display())
}

/// Removes the live database and every checkpoint but that of commit `kept`.
///
/// # Errors
/// `Io` when the operating system refuses.
pub(crate) fn remove_others(folder: &Path, kept: Option<u64>, keeps_live: bool) -> Result<()> {
    let kept = kept.map(|number| checkpoint_path(folder, number));
    for entry in fs::read_dir(folder).map_err(failed("cannot list folder", folder))? {
        let path = entry.map_err(failed("cannot list folder", folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let is_kept = Some(&path) == kept.as_ref() || (keeps_live && name == LIVE);
        if name.starts_with(PREFIX) && path.is_dir() && !is_kept {
            fs::remove_dir_all(&path).map_err(failed("cannot remove folder", &path))?;
        }
    }
    Ok(())
}

/// Makes the live database anew from the checkpoint of commit `number`.
///
/// # Errors
/// `Corruption` when `files` are not what the checkpoint holds, `Io` and `NoSpace`.
pub(crate) fn restore(folder: &Path, number: u64, files: &[ListedFile]) -> Result<()> {
    let (from, live) = (checkpoint_path(folder, number), live_path(folder));
    fs::create_dir(&live).map_err(failed("cannot make folder", &live))?;
    for file in files {
        let (source, target) = (from.join(&file.name), live.join(&file.name));
        let found = fs::metadata(&source).ok().map(|stat| stat.len());
        if found != Some(file.len_bytes) {
            return Err(Error::corruption("file of the commit in force is missing or cut")
                .with("file", source.display())
                .with("expected_bytes", file.len_bytes)
                .with("remedy", "restore the store's folder from a copy"));
        }
        if is_immutable(&file.name) {
            fs::hard_link(&source, &target).map_err(failed("cannot link file", &target))?;
        } else {
            fs::copy(&source, &target).map_err(failed("cannot copy file", &target))?;
        }
    }
    Ok(())
}

fn is_immutable(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|ending| ending == "sst")
}

/// Makes a checkpoint survive power loss and lists its files.
///
/// # Errors
/// `Io` and `NoSpace`.
pub(crate) fn sync_and_list(checkpoint: &Path) -> Result<Vec<ListedFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(checkpoint).map_err(failed("cannot list folder", checkpoint))? {
        let path = entry.map_err(failed("cannot list folder", checkpoint))?.path();
        let file = File::open(&path).map_err(failed("cannot open file", &path))?;
        file.sync_all().map_err(failed("cannot sync file", &path))?;
        let len_bytes = file.metadata().map_err(failed("cannot read file length", &path))?.len();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("").to_owned();
        files.push(ListedFile { name, len_bytes });
    }
    let folder = File::open(checkpoint).map_err(failed("cannot open folder", checkpoint))?;
    folder.sync_all().map_err(failed("cannot sync folder", checkpoint))?;
    files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Returns the bytes that all databases in `folder` occupy; linked files count once.
pub(crate) fn disk_bytes(folder: &Path) -> u64 {
    let folders = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<(u64, u64)> = folders
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .flat_map(|entry| fs::read_dir(entry.path()).into_iter().flatten().flatten())
        .filter_map(|entry| entry.metadata().ok())
        .map(|stat| (stat.ino(), stat.len()))
        .collect();
    files.sort_unstable();
    files.dedup_by_key(|file| file.0);
    files.iter().map(|file| file.1).sum()
}

/// Writes the list of a checkpoint's files: `tierbed-rocks 1`, then `<bytes> <name>` per line.
pub(crate) fn encode(files: &[ListedFile]) -> String {
    let lines = files.iter().map(|file| format!("{} {}\n", file.len_bytes, file.name));
    std::iter::once("tierbed-rocks 1\n".to_owned()).chain(lines).collect()
}

/// Reads what [`encode`] wrote.
///
/// # Errors
/// `Corruption` for anything else.
pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<ListedFile>> {
    let damaged = || Error::corruption("list of RocksDB's files is damaged");
    let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
    let mut lines = text.lines();
    if lines.next() != Some("tierbed-rocks 1") {
        return Err(damaged());
    }
    let parse = |line: &str| {
        let (len, name) = line.split_once(' ').ok_or_else(damaged)?;
        let is_plain = !name.is_empty() && !name.contains(['/', '\0']) && name != "..";
        let len_bytes = len.parse().map_err(|_| damaged())?;
        if is_plain {
            Ok(ListedFile { name: name.to_owned(), len_bytes })
        } else {
            Err(damaged())
        }
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn a_list_is_read_as_written_and_names_stay_inside_the_folder() {
        let files = [("000012.sst", 4096), ("CURRENT", 16)]
            .map(|(name, len_bytes)| ListedFile { name: name.to_owned(), len_bytes });
        assert_eq!(decode(encode(&files).as_bytes()).unwrap(), files);
        for bad in ["", "tierbed-rocks 2\n", "tierbed-rocks 1\n5 ../x\n", "tierbed-rocks 1\nx y\n"]
        {
            assert!(decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
