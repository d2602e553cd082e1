//! Parameters of the simulated SSD: its parts and their times.

use tierbed_core::{Error, Result};

/// Parts and times of a [`VectorSsd`](super::VectorSsd); times in nanoseconds.
///
/// The paper gives the channels, the three latencies of a flash read and the formulas; what it
/// leaves open is marked *assumed* and is of the size usual for such parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsdModel {
    /// Flash channels; vectors are striped over all (four DDR4 banks, §4).
    pub channels: u32,
    /// Dies of each channel, which read side by side (assumed: 8).
    pub dies_per_channel: u32,
    /// Bytes a channel moves at once: pieces are rounded up to it (assumed: 8).
    pub channel_width_bytes: u32,
    /// Bytes of a flash page, per channel (§2.2: "usually larger than 4KB"; assumed: 16,384).
    pub flash_page_bytes: u32,
    /// From the cells of a page to its buffer (§5.1: 4, 10 or 30 us).
    pub read_ns: u64,
    /// What a channel moves in a microsecond (assumed: 800, ONFI 4's slower rate).
    pub channel_bytes_per_us: u64,
    /// One register of the device written or read by the host (assumed: 500).
    pub register_ns: u64,
    /// Beginning of a DMA transfer (assumed: 1,000).
    pub dma_setup_ns: u64,
    /// What DMA moves in a microsecond (assumed: 3,200, four lanes of PCIe 3).
    pub dma_bytes_per_us: u64,
    /// One comparison with an extent in the translator (assumed: 5, a cycle at 200 MHz).
    pub compare_ns: u64,
    /// One vector put together by the merger (assumed: 10).
    pub merge_ns: u64,
    /// One block command in the controller, fetched and completed (assumed: 2,000).
    pub block_command_ns: u64,
}

impl SsdModel {
    /// The paper's device with flash that reads a page in `read_us`.
    #[must_use]
    pub fn with_read_us(read_us: u64) -> Self {
        Self {
            channels: 4,
            dies_per_channel: 8,
            channel_width_bytes: 8,
            flash_page_bytes: 16_384,
            read_ns: read_us * 1000,
            channel_bytes_per_us: 800,
            register_ns: 500,
            dma_setup_ns: 1000,
            dma_bytes_per_us: 3200,
            compare_ns: 5,
            merge_ns: 10,
            block_command_ns: 2000,
        }
    }

    /// Refuses a device without parts.
    pub(super) fn check(&self) -> Result<()> {
        let parts = [
            u64::from(self.channels),
            u64::from(self.dies_per_channel),
            u64::from(self.channel_width_bytes),
            u64::from(self.flash_page_bytes),
            self.channel_bytes_per_us,
            self.dma_bytes_per_us,
        ];
        if parts.contains(&0) {
            return Err(Error::invalid("an SSD model has no part of size 0")
                .with("model", format_args!("{self:?}")));
        }
        Ok(())
    }

    /// Returns the bytes that all channels hold at one page number.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.flash_page_bytes) * u64::from(self.channels)
    }

    /// Returns the bytes each channel moves for `len_bytes` that are striped over all.
    /// Source: FlashEmbedding §3.2 (`EV_flash_size`).
    #[must_use]
    pub fn piece_bytes(&self, len_bytes: u64) -> u64 {
        let width = u64::from(self.channel_width_bytes);
        len_bytes.div_ceil(u64::from(self.channels) * width) * width
    }

    pub(super) fn channel_ns(&self, bytes: u64) -> u64 {
        (bytes * 1000).div_ceil(self.channel_bytes_per_us)
    }

    pub(super) fn dma_ns(&self, bytes: u64) -> u64 {
        self.dma_setup_ns + (bytes * 1000).div_ceil(self.dma_bytes_per_us)
    }
}
