//! Names of the rows of a span: window and entry, joined with the plan.
//!
//! A span's rows lie in no order, and the plan is read window by window. So rows are gathered and
//! named piece by piece, each piece in the order of windows: the more memory, the less is read of
//! the plan.

#![expect(clippy::indexing_slicing, reason = "records are those that were gathered")]

use tierbed_core::{Error, Result, RowId, TableId};

use super::scan::row_of;
use crate::planned::plan::{EpochPlan, PlanWindow};
use crate::planned::store::spans::{ListPlace, Spans};
use crate::planned::store::window_rows::Place;

/// Most bytes that rows of spans are gathered in.
pub(super) const GATHER_BYTES_MAX: u64 = 16 << 20;

/// Takes named rows: table, row id, whole record.
pub(super) type NamedSink<'a> = dyn FnMut(TableId, RowId, &[f32]) -> Result<()> + 'a;

/// Rows of one list of a span on the way to a sink.
pub(super) struct Gather<'a> {
    plan: &'a EpochPlan,
    spans: &'a Spans,
    list: usize,
    record_words: usize,
    rows_max: usize,
    /// Entries, and where their records are.
    order: Vec<(u32, u32)>,
    records: Vec<f32>,
}

impl<'a> Gather<'a> {
    /// Starts with rows of a list, whose records have `record_words`, in about `memory_bytes`.
    pub(super) fn new(
        plan: &'a EpochPlan,
        spans: &'a Spans,
        list: usize,
        record_words: usize,
        memory_bytes: usize,
    ) -> Self {
        let is_of_span = (spans.window_count()..spans.list_count()).contains(&list);
        assert!(is_of_span, "list {list} is no span's");
        let row_bytes = size_of::<(u32, u32)>() + 4 * record_words;
        let rows_max = (memory_bytes / row_bytes).max(1);
        Self { plan, spans, list, record_words, rows_max, order: vec![], records: vec![] }
    }

    /// Adds rows, and hands on those that are too many; `window` is memory to read the plan in.
    ///
    /// # Errors
    /// `Corruption` for rows that the plan does not know, otherwise those of `sink`.
    pub(super) fn add<'r>(
        &mut self,
        rows: impl Iterator<Item = (u32, &'r [f32])>,
        window: &mut PlanWindow,
        sink: &mut NamedSink<'_>,
    ) -> Result<()> {
        for (entry, record) in rows {
            if self.order.is_empty() {
                self.order.reserve_exact(self.rows_max);
                self.records.reserve_exact(self.rows_max * self.record_words);
            }
            debug_assert_eq!(record.len(), self.record_words, "a record of another size class");
            self.order.push((entry, self.order.len() as u32));
            self.records.extend_from_slice(record);
            if self.order.len() == self.rows_max {
                self.hand_on(window, sink)?;
            }
        }
        Ok(())
    }

    /// Hands on what was gathered.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub(super) fn hand_on(
        &mut self,
        window: &mut PlanWindow,
        sink: &mut NamedSink<'_>,
    ) -> Result<()> {
        let words = self.order.len() * self.record_words;
        assert_eq!(self.records.len(), words, "every gathered row has a record");
        self.order.sort_unstable();
        let mut loaded = None;
        for &(entry, at) in &self.order {
            let place = self.spans.place_in(ListPlace { list: self.list as u32, entry });
            let Place { window: number, entry } = place
                .ok_or_else(|| Error::corruption("a row waits in a span that the plan has not"))?;
            if loaded != Some(number) {
                self.plan.load_entries(number as usize, window)?;
                loaded = Some(number);
            }
            let (table, row) = row_of(window, entry)?;
            let start = at as usize * self.record_words;
            sink(table, row, &self.records[start..start + self.record_words])?;
        }
        self.order.clear();
        self.records.clear();
        Ok(())
    }
}
