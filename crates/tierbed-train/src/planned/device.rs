//! Windows whose rows are trained in the memory of a device.
//!
//! The rows of a window lie side by side, and an id is the number of an entry. So a device may have
//! them as they are: they go there in one copy, are trained in place, and come back in one copy.
//! The engine knows who has the newest rows, and has them brought back before it reads any.
//!
//! ```text
//! SSD ─▶ lists ─▶ host window k + 1 ─▶ device window k + 1 ◀─ rows that both windows use
//! SSD ◀─ lists ◀─ host window k     ◀─ device window k     ─┘
//! ```

use std::fmt::Debug;

use tierbed_core::Result;

/// Where the records of one table lie in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowTable {
    /// Number of the table's first entry in the window.
    pub first_entry: u32,
    /// Entries of the table, a record each.
    pub entry_count: u32,
    /// Word of the first record.
    pub first_word: usize,
    /// Words of a record: weights, optimizer state, and how often the row was stepped.
    pub record_words: usize,
}

/// The rows of a window in the memory of the host, and where they lie, table after table.
#[derive(Debug, Clone, Copy)]
pub struct HostWindow<'a> {
    /// The records.
    pub words: &'a [f32],
    /// Their tables, in the order of the store.
    pub tables: &'a [WindowTable],
}

/// A row that a window shares with the one before: its entries in both, as two words.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Carried {
    /// Entry in the window that ends.
    pub from: u32,
    /// Entry in the one that begins.
    pub to: u32,
}

/// A change of window on a device.
#[derive(Debug)]
pub struct WindowChange<'a> {
    /// Takes the rows of the window that ends.
    pub ended: &'a mut [f32],
    /// The window that begins. Rows that the ending one has, too, are not in its words.
    pub begun: HostWindow<'a>,
    /// Those, table after table.
    pub carried: &'a [Carried],
}

/// Memory of a device for the rows of windows. All calls come from one engine, one at a time.
pub trait DeviceWindows: Debug + Send + Sync {
    /// Tells where the windows of the host are, until [`close`](Self::close).
    ///
    /// # Errors
    /// `Invalid` when windows of this size do not fit.
    fn open(&self, windows: [&[f32]; 2]) -> Result<()>;

    /// Copies the rows of a window to the device, in place of those it had.
    ///
    /// # Errors
    /// Those of the device.
    fn upload(&self, window: HostWindow<'_>) -> Result<()>;

    /// Copies the rows of the device's window to `words`. Returns how many rows were stepped since
    /// the last return of rows.
    ///
    /// # Errors
    /// Those of the device, and of steps made since.
    fn download(&self, words: &mut [f32]) -> Result<u64>;

    /// Goes on to the next window. Returns as [`download`](Self::download).
    ///
    /// # Errors
    /// As [`download`](Self::download).
    fn advance(&self, change: WindowChange<'_>) -> Result<u64>;

    /// Forgets the windows of the host: their memory is about to be freed.
    fn close(&self);
}
