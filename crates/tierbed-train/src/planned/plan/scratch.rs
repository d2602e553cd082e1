//! Scratch files of the pre-pass, written front to back.

use tierbed_core::Result;
use tierbed_io::{Appender, Device, Folder, OpenMode};

/// Bytes gathered before they are written.
const APPEND_BYTES: usize = 256 << 10;

/// Scratch files of a plan; earlier versions noted there how far they go.
const SCRATCH: [&str; 9] =
    ["note", "rows", "next", "bodies", "batches", "uses", "new", "given", "found"];

/// Removes the scratch files of a plan, if there are any.
pub(super) fn remove_scratch(folder: &dyn Folder, name: &str) -> Result<()> {
    SCRATCH.iter().try_for_each(|file| folder.remove(&format!("{name}.{file}")))
}

/// Starts file `name` anew.
///
/// # Errors
/// `Io` or `NoSpace`.
pub(crate) fn create(folder: &dyn Folder, name: &str) -> Result<Appender> {
    let device = folder.open(name, OpenMode::Create)?;
    device.set_len(0)?;
    Ok(Appender::new(device, 0, APPEND_BYTES))
}

/// Reads `count` little-endian 64-bit words at `offset_bytes` into `words`.
pub(crate) fn read_words(
    device: &dyn Device,
    offset_bytes: u64,
    count: usize,
    words: &mut Vec<u64>,
) -> Result<()> {
    words.resize(count, 0);
    device.read_at(offset_bytes, bytemuck::cast_slice_mut(words))
}
