//! Memory that a tree comes to need as rows are written.
//!
//! A bound, not a forecast: every row of every table stored, level 0 full, a merge and a flush at
//! once. It is named in errors and kept free where that costs little; nothing is reserved by it.

use tierbed_core::Schema;

use crate::options::LsmOptions;
use crate::sst::rows_per_block;
use crate::version::{SstMeta, LEVELS_MAX};

/// Copies of a row's filter bits and index entry: the last level, an eighth of it in the levels
/// above, and the SSTs that a merge is about to replace.
const COPIES: u64 = 3;
/// What is kept of an SST in memory and, for a moment, in the commit.
const SST_BYTES: u64 = 1024 + 4 * size_of::<SstMeta>() as u64;
/// Keys gathered for the filters of the SSTs that a merge and a flush write, in vectors that
/// double.
const WRITER_KEY_BYTES: u64 = 2 * 2 * 8;
/// A row of a memtable in the list that a scan makes of it.
const SCAN_ROW_BYTES: u64 = 40;
/// Options follow the budget; a budget large enough for the bound has larger memtables.
const MEMTABLE_GROWTH: u64 = 4;

/// Returns the most bytes the tree may need beside what it reserves when it is opened.
pub(crate) fn bytes_max(schema: &Schema, options: &LsmOptions, block_bytes: usize) -> u64 {
    let memtable_bytes = MEMTABLE_GROWTH * options.memory.memtable_bytes as u64;
    let sst_bytes = options.sst.sst_bytes.max(1);
    let filter_bytes = |rows: u64| rows * u64::from(options.sst.filter_bits_per_row) / 8;
    let (mut stored_bytes, mut memtable_rows) = (0, 0);
    for table in schema.tables() {
        let record_bytes = table.record_bytes();
        let in_block = rows_per_block(block_bytes, record_bytes).max(1) as u64;
        let (rows, blocks) = (table.row_count, table.row_count.div_ceil(in_block));
        let ssts = (blocks * block_bytes as u64).div_ceil(sst_bytes);
        stored_bytes += COPIES * (filter_bytes(rows) + 8 * blocks + ssts * SST_BYTES);
        memtable_rows = memtable_rows.max(rows.min(memtable_bytes / record_bytes.max(1) as u64));
    }
    let level0 = options.shape.l0_stop as u64;
    let writing = memtable_rows * (WRITER_KEY_BYTES + 2 * SCAN_ROW_BYTES);
    let cursors = 2 * (level0 + LEVELS_MAX as u64) * block_bytes as u64;
    stored_bytes + level0 * (filter_bytes(memtable_rows) + SST_BYTES) + writing + cursors
}
