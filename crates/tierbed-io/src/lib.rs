//! Storage I/O: devices, engines that move pages, folders.
//!
//! Three nouns, each a trait, so that every store runs on a real disk, in memory, or on a disk
//! that lies (`tierbed-sim`):
//!
//! ```text
//! Folder   names, small atomic files, the lock     store.open ─▶ folder.open("rows") ─▶ Device
//! Device   where bytes live                        one file: read_at, write_at, sync
//! IoEngine how many bytes move at once             submit(Request) … wait() ─▶ Completion
//! ```
//!
//! [`sorter`] brings any number of fixed-size records into key order in bounded memory. With the
//! feature `lines`, `lines::LineReader` reads text files that may be packed.
//!
//! Slow paths (recovery, checkpoints) call the [`Device`] directly; hot paths hand batches of
//! [`Request`]s to an [`IoEngine`], which owns the buffers until they are complete.

pub mod buffer;
pub mod checked_text;
pub mod device;
pub mod engine;
pub mod folder;
#[cfg(feature = "lines")]
pub mod lines;
pub mod process;
pub mod sorter;
pub mod stream;

pub use buffer::{AlignedBuf, WordBuf, PAGE_BYTES, SECTOR_BYTES};
pub use checked_text::CheckedText;
pub use device::{CachedDevice, Device, FileDevice, MemoryDevice, MmapDevice};
pub use engine::{
    depth::Depth, open_engine, BufId, Completion, DeviceId, EngineChoice, EngineOptions, IoEngine,
    Op, Request,
};
pub use folder::{
    listed_bytes, Folder, FolderLock, FsFolder, HeldFolder, MemoryFolder, OpenMode, PartFolder,
    ViewFolder,
};
pub use stream::{Appender, RecordReader};

#[cfg(not(target_os = "linux"))]
compile_error!("tierbed-io uses O_DIRECT, flock and io_uring, and runs on Linux only");
