//! One open file of a simulated folder.

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Device, OpenMode};

use crate::disk::{FileId, SharedDisk};

/// A device on a faulty disk; made by [`crate::SimFolder`].
#[derive(Debug)]
pub struct SimDevice {
    pub(crate) disk: SharedDisk,
    pub(crate) file: FileId,
    pub(crate) name: String,
    pub(crate) mode: OpenMode,
}

impl SimDevice {
    fn check_writable(&self) -> Result<()> {
        if self.mode == OpenMode::ReadOnly {
            // As the operating system does: EBADF, an I/O error.
            return Err(Error::new(ErrorKind::Io, "file was opened for reading"));
        }
        Ok(())
    }
}

impl Device for SimDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        self.disk.lock().len_bytes(self.file)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.check_writable()
            .and_then(|()| self.disk.lock().set_len(self.file, len_bytes))
            .map_err(|error| error.with("path", &self.name))
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.disk.lock().read(self.file, &self.name, offset_bytes, out)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.check_writable()
            .and_then(|()| self.disk.lock().write(self.file, offset_bytes, bytes))
            .map_err(|error| error.with("path", &self.name).with("offset_bytes", offset_bytes))
    }

    fn sync(&self) -> Result<()> {
        self.disk.lock().sync(self.file).map_err(|error| error.with("path", &self.name))
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.disk.lock().allocated_bytes(self.file)
    }
}
