//! Training along the plan of one day, over a store that reads rows by number.
//!
//! The forward order inside the day, whatever store keeps the rows between the days. The rows
//! that the day's plan uses are lent by the store, in row order: one sweep for a store that
//! sweeps (`cold`). They are trained along the plan, and given back in sorted batches.
//! Nothing of the store changes before they are; whoever commits it then commits the whole day.
//!
//! ```text
//! store ──rows of the plan, in row order──▶ import ─▶ forward order, batch by batch
//! store ◀──────── sorted batches ────────── scan ◀─────────┘        then: commit
//! ```
//!
//! Source: training.md 3.6 (day-wise training); RecDB trains a day's data after collecting it.

use std::sync::Arc;

use tierbed_core::{Error, Result, RowId, RowKey, RowWrite, TableId, TrainStore};
use tierbed_io::Folder;
use tierbed_kernels::Hyper;

use crate::planned::engine::{Import, PlannedConfig, PlannedEngine, RecordSink};
use crate::planned::plan::{Plan, WindowPlan};

/// Share of the budget for records on their way between store and engine.
const REQUEST_SHARE: u64 = 16;
/// Memory per row on its way, beside its record.
const ROW_BYTES: usize = size_of::<RowKey>() + size_of::<RowWrite<'_>>() + 8;

/// The rows a plan uses: one bit per row of each table.
struct DayRows {
    bits: Vec<Vec<u64>>,
}

impl DayRows {
    fn memory_bytes(row_counts: impl Iterator<Item = u64>) -> u64 {
        row_counts.map(|rows| 8 * rows.div_ceil(64)).sum()
    }

    fn of(plan: &Plan) -> Result<Self> {
        let words = |rows: &u64| vec![0; rows.div_ceil(64) as usize];
        let mut bits: Vec<Vec<u64>> = plan.shape().row_counts.iter().map(words).collect();
        let mut window = WindowPlan::default();
        for number in 0..plan.window_count() {
            plan.load_entries(number, &mut window)?;
            let mut entry = 0;
            while let Some((table, row)) = window.row_of(entry) {
                let word = bits.get_mut(table).and_then(|bits| bits.get_mut(row as usize / 64));
                if let Some(word) = word {
                    *word |= 1 << (row % 64);
                }
                entry += 1;
            }
        }
        Ok(Self { bits })
    }

    fn keys(&self, table: usize) -> impl Iterator<Item = RowKey> + '_ {
        let words = self.bits.get(table).into_iter().flatten().enumerate();
        words.flat_map(move |(at, word)| {
            let rows = (0..64).filter(move |bit| word >> bit & 1 == 1);
            rows.map(move |bit| RowKey::new(TableId(table as u32), RowId(at as u64 * 64 + bit)))
        })
    }
}

impl PlannedEngine {
    /// Starts a day: a store in the empty `folder` with those rows of `from` that `plan` uses,
    /// to be trained along it. `hypers` as in [`Import`]. Of the budget of `config` a bit per
    /// row, and a sixteenth for records on their way, are kept aside.
    ///
    /// # Errors
    /// As [`import_in`](Self::import_in), and those of reading `from`, which is not changed.
    pub fn begin_day(
        folder: Arc<dyn Folder>,
        from: &mut dyn TrainStore,
        plan: Plan,
        config: &PlannedConfig,
        hypers: &[Hyper],
    ) -> Result<Self> {
        let schema = from.schema().clone();
        let request_bytes = config.dram_budget_bytes / REQUEST_SHARE;
        let bits_bytes = DayRows::memory_bytes(schema.tables().iter().map(|table| table.row_count));
        let aside = request_bytes + bits_bytes;
        let left = config.dram_budget_bytes.checked_sub(aside).ok_or_else(|| {
            Error::invalid("dram budget too small for a bit per row")
                .with("dram_budget_bytes", config.dram_budget_bytes)
                .with("minimum_bytes", 2 * bits_bytes)
        })?;
        let rows = DayRows::of(&plan)?;
        let source = &mut |sink: &mut RecordSink<'_>| {
            for (at, table) in schema.tables().iter().enumerate() {
                let at_once = rows_at_once(request_bytes, table.record_bytes());
                let mut keys = rows.keys(at).peekable();
                while keys.peek().is_some() {
                    let piece: Vec<RowKey> = keys.by_ref().take(at_once).collect();
                    lend(from, &piece, table.record_bytes(), sink)?;
                }
            }
            Ok(())
        };
        let import = Import { rows: source, hypers, name: "day", attachments: &[] };
        let config = PlannedConfig { dram_budget_bytes: left, ..config.clone() };
        Self::import_in(folder, schema.clone(), plan, &config, import)
    }

    /// Ends a day: writes every row of it to `to`, in sorted batches of at most `request_bytes`,
    /// and returns their number. The day's folder may be removed once `to` is committed; if
    /// power fails before, the day can be opened again at its last checkpoint.
    ///
    /// # Errors
    /// As [`scan_all`](Self::scan_all) and [`TrainStore::write`].
    pub fn end_day(mut self, to: &mut dyn TrainStore, request_bytes: u64) -> Result<u64> {
        let mut batch = GivenBack::default();
        let mut row_count = 0;
        self.scan_all(&mut |table, row, record| {
            let bytes: &[u8] = bytemuck::cast_slice(record);
            if !batch.keys.is_empty() && batch.bytes() + bytes.len() as u64 > request_bytes {
                batch.write(to)?;
            }
            batch.keys.push((RowKey::new(table, row), batch.records.len()));
            batch.records.extend_from_slice(bytes);
            row_count += 1;
            Ok(())
        })?;
        batch.write(to)?;
        Ok(row_count)
    }
}

fn rows_at_once(request_bytes: u64, record_bytes: usize) -> usize {
    (request_bytes as usize / (record_bytes + ROW_BYTES)).max(1)
}

// A store may answer in any order; an import wants the same order twice.
fn lend(
    from: &mut dyn TrainStore,
    keys: &[RowKey],
    record_bytes: usize,
    sink: &mut RecordSink<'_>,
) -> Result<()> {
    let mut records = vec![0; keys.len() * record_bytes];
    let mut is_present = vec![false; keys.len()];
    from.read(keys, &mut |at, record| {
        let place = records.get_mut(at * record_bytes..(at + 1) * record_bytes);
        if let (Some(place), Some(record)) = (place, record) {
            place.copy_from_slice(record);
        }
        if let Some(place) = is_present.get_mut(at) {
            *place = record.is_some();
        }
        Ok(())
    })?;
    let rows = keys.iter().zip(records.chunks_exact(record_bytes)).zip(&is_present);
    for ((key, record), _) in rows.filter(|(_, is_present)| **is_present) {
        sink(key.table, key.row, record)?;
    }
    Ok(())
}

/// Rows to give back together.
#[derive(Default)]
struct GivenBack {
    keys: Vec<(RowKey, usize)>,
    records: Vec<u8>,
}

impl GivenBack {
    fn bytes(&self) -> u64 {
        (self.records.len() + self.keys.len() * ROW_BYTES) as u64
    }

    fn write(&mut self, to: &mut dyn TrainStore) -> Result<()> {
        self.keys.sort_unstable();
        let mut rows = Vec::with_capacity(self.keys.len());
        for (key, at) in &self.keys {
            let record_bytes = to.schema().table(key.table)?.record_bytes();
            let record = self.records.get(*at..at + record_bytes).unwrap_or(&[]);
            rows.push(RowWrite { key: *key, record });
        }
        to.write(&rows)?;
        self.keys.clear();
        self.records.clear();
        Ok(())
    }
}
