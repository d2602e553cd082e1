//! The device's translation table: extents of a table to device addresses.

use tierbed_core::{Error, Result};

/// Consecutive rows at one place of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Rows in it.
    pub row_count: u64,
    /// Where its first row begins.
    pub offset_bytes: u64,
}

/// The rows `0..` of a table: extents in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VectorTable {
    vector_bytes: u32,
    extents: Vec<Extent>,
    /// Row after the last of each extent.
    ends: Vec<u64>,
}

impl VectorTable {
    /// Builds a table of vectors of `vector_bytes` each.
    ///
    /// # Errors
    /// `Invalid` for vectors of no bytes, or extents that leave the numbers there are.
    pub fn new(vector_bytes: u32, extents: Vec<Extent>) -> Result<Self> {
        let mut ends = Vec::with_capacity(extents.len());
        let mut end = 0u64;
        for extent in &extents {
            let last = extent.row_count.checked_mul(u64::from(vector_bytes));
            let fits = last.and_then(|bytes| bytes.checked_add(extent.offset_bytes)).is_some();
            end = end.checked_add(extent.row_count).filter(|_| fits).ok_or_else(|| {
                Error::invalid("extent does not fit a device")
                    .with("row_count", extent.row_count)
                    .with("offset_bytes", extent.offset_bytes)
            })?;
            ends.push(end);
        }
        if vector_bytes == 0 {
            return Err(Error::invalid("a vector has no bytes"));
        }
        Ok(Self { vector_bytes, extents, ends })
    }

    /// Returns the bytes of a vector.
    #[must_use]
    pub fn vector_bytes(&self) -> u32 {
        self.vector_bytes
    }

    /// Returns where `row` begins, and how many extents were compared to find it, one after the
    /// other. Source: FlashEmbedding §3.2, steps 3 to 5.
    ///
    /// # Errors
    /// `Invalid` when there is no such row.
    pub fn locate(&self, row: u64) -> Result<(u64, u64)> {
        let compared = self.ends.iter().take_while(|&&end| end <= row).count();
        let extent = self.extents.get(compared).ok_or_else(|| {
            Error::invalid("row out of range")
                .with("row", row)
                .with("rows", self.ends.last().copied().unwrap_or(0))
        })?;
        let first = compared.checked_sub(1).and_then(|at| self.ends.get(at)).copied().unwrap_or(0);
        let offset_bytes = extent.offset_bytes + (row - first) * u64::from(self.vector_bytes);
        Ok((offset_bytes, compared as u64 + 1))
    }
}
