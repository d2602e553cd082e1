//! First use of any rows along a plan, in bounded memory.
//!
//! The plan says it without an array over rows: a last use points round to the first one. One
//! pass over the plan finds the first use of every row it uses. When an array over all rows fits
//! the memory, it answers at once. Otherwise rows are cut into parts: the rows' source is visited
//! once to ask (4 bytes per row), each part's array answers (8 bytes per row), and the second
//! visit takes the answers in the order of the questions. Records are never sorted. A source that
//! brings rows in their order needs no questions: part after part answers as it comes to it.

#![expect(clippy::indexing_slicing, reason = "rows are counted over the tables of the schema")]

use std::sync::Arc;

use tierbed_core::store::out_of_range;
use tierbed_core::{Error, Result, RowId, Schema, TableId};
use tierbed_io::Folder;

use super::Rows;
use crate::parts::Parts;
use crate::planned::plan::{EpochPlan, PlanWindow};
use crate::planned::store::window_rows::Place;

/// The plan does not use the row. Not `u64::MAX`, which ends a scratch block.
const NONE: u64 = u64::MAX - 1;
/// The row has asked already.
const ASKED: u64 = u64::MAX - 2;
/// A block of a part is a multiple of this, the least one of 4, 8 and 12.
const BLOCK_UNIT: u64 = 24;
const BLOCK_BYTES_MAX: u64 = 64 << 10;

/// How much memory the answers take, and in how many parts they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Rows of a part.
    part_rows: u64,
    part_count: u64,
    block_bytes: u64,
    pub(super) memory_bytes: u64,
}

impl Cut {
    /// Cuts `row_count` rows for about `memory_bytes`: half for one part's array, half for a
    /// block of each part.
    pub(super) fn new(row_count: u64, memory_bytes: u64) -> Self {
        if row_count.saturating_mul(8) <= memory_bytes {
            let memory_bytes = 8 * row_count;
            return Self { part_rows: row_count, part_count: 1, block_bytes: 0, memory_bytes };
        }
        // The array of one part and the smallest blocks of all are equal at this many bytes.
        let least_bytes = (8 * BLOCK_UNIT * row_count).isqrt() + 8;
        let half_bytes = (memory_bytes / 2).max(least_bytes);
        let part_rows = (half_bytes / 8).min(u64::from(u32::MAX) - 1);
        let part_count = row_count.div_ceil(part_rows);
        let block_bytes = (half_bytes / part_count).min(BLOCK_BYTES_MAX) / BLOCK_UNIT * BLOCK_UNIT;
        let block_bytes = block_bytes.max(BLOCK_UNIT);
        assert!(part_rows * part_count >= row_count, "a row of {row_count} is in no part");
        let memory_bytes = 8 * part_rows + part_count * block_bytes;
        Self { part_rows, part_count, block_bytes, memory_bytes }
    }
}

/// Answers for every row of a source, in the source's order.
pub(super) struct FirstUses {
    schema: Arc<Schema>,
    /// Rows of all tables before each table.
    bases: Vec<u64>,
    cut: Cut,
    answers: Answers,
}

enum Answers {
    Array(Vec<u64>),
    /// In the order in which rows have asked.
    Asked(Parts),
    /// For rows in their order: the array of one part at a time.
    InOrder(OnePart),
}

/// The part that rows in their order have come to.
struct OnePart {
    uses: Parts,
    /// Its number; none before the first row.
    part: Option<usize>,
    first_uses: Vec<u64>,
}

impl OnePart {
    fn new(uses: Parts, cut: Cut) -> Self {
        Self { uses, part: None, first_uses: vec![NONE; cut.part_rows as usize] }
    }

    /// Takes the first use of row `at` of all; those of parts before are gone.
    fn take(&mut self, at: u64) -> Result<u64> {
        let part_rows = self.first_uses.len() as u64;
        let part = (at / part_rows) as usize;
        match self.part {
            Some(current) if current == part => {}
            Some(current) if current > part => {
                return Err(Error::invalid("the source of rows is not in their order"));
            }
            before => {
                (before.map_or(0, |current| current + 1)..part)
                    .for_each(|passed| self.uses.forget(passed));
                load_part(&mut self.uses, part, &mut self.first_uses)?;
                self.part = Some(part);
            }
        }
        Ok(std::mem::replace(&mut self.first_uses[(at % part_rows) as usize], ASKED))
    }
}

impl FirstUses {
    /// Finds the first use along `plan` of each row that `rows` will bring again, or for the first
    /// time where they come in their order.
    ///
    /// # Errors
    /// `Invalid` for rows out of range or brought twice, `Corruption` for a damaged plan,
    /// otherwise those of the scratch files and the source.
    pub(super) fn find(
        folder: &Arc<dyn Folder>,
        schema: &Arc<Schema>,
        plan: &EpochPlan,
        cut: Cut,
        rows: &mut Rows<'_>,
    ) -> Result<Self> {
        let mut before = 0;
        let bases = schema.tables().iter().map(|table| {
            let base = before;
            before += table.row_count;
            base
        });
        let mut found = Self {
            schema: schema.clone(),
            bases: bases.collect(),
            cut,
            answers: Answers::Array(Vec::new()),
        };
        assert!(before <= cut.part_rows * cut.part_count, "{before} rows are more than the parts'");
        if cut.part_count == 1 {
            let mut uses = vec![NONE; cut.part_rows as usize];
            found.each_first_use(plan, &mut |at, first| {
                uses[at as usize] = first;
                Ok(())
            })?;
            found.answers = Answers::Array(uses);
            return Ok(found);
        }
        let (part_count, block_bytes) = (cut.part_count as usize, cut.block_bytes as usize);
        let mut uses = Parts::create(folder, "replan-uses.rows", part_count, block_bytes)?;
        found.each_first_use(plan, &mut |at, first| {
            let (part, [a, b, c, d]) = (at / cut.part_rows, in_part(cut, at));
            let [e, f, g, h, i, j, k, l] = first.to_le_bytes();
            uses.add(part as usize, [a, b, c, d, e, f, g, h, i, j, k, l])
        })?;
        uses.seal()?;
        // Its blocks come back one by one.
        (0..part_count).for_each(|part| uses.rest(part));
        if rows.in_order {
            found.answers = Answers::InOrder(OnePart::new(uses, cut));
            return Ok(found);
        }
        // The blocks of one file are in memory at a time.
        let mut asked = Parts::create(folder, "replan-asked.rows", part_count, block_bytes)?;
        (rows.source)(&mut |table, row, _| {
            let at = found.number_of(table, row)?;
            asked.add((at / cut.part_rows) as usize, in_part(cut, at))
        })?;
        asked.seal()?;
        (0..part_count).for_each(|part| asked.rest(part));
        let answers = answer(folder, cut, &mut uses, &mut asked)?;
        found.answers = Answers::Asked(answers);
        Ok(found)
    }

    // Calls `sink` with the number of each row the plan uses, and its first use.
    fn each_first_use(
        &self,
        plan: &EpochPlan,
        sink: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut window = PlanWindow::default();
        let damaged = || Error::corruption("plan window ends too early");
        for number in 0..plan.window_count() {
            plan.load_entries(number, &mut window)?;
            for (at, entries) in (0u32..).zip(window.tables()) {
                let next = window.next_uses(entries);
                for (entry, row) in window.rows(entries).enumerate() {
                    let (to, first) = next.get(entry).ok_or_else(damaged)?;
                    if to > number {
                        continue;
                    }
                    let row = RowId(row);
                    let row = self.number_of(TableId(at), row).map_err(|error| {
                        Error::corruption("plan names an unknown row").with("cause", error)
                    })?;
                    sink(row, (to as u64) << 32 | u64::from(first))?;
                }
            }
        }
        Ok(())
    }

    // Numbers the rows of all tables one after the other.
    fn number_of(&self, table: TableId, row: RowId) -> Result<u64> {
        let shape = self.schema.table(table)?;
        if row.0 >= shape.row_count {
            return Err(out_of_range(shape, row.0));
        }
        let number = self.bases[table.0 as usize] + row.0;
        debug_assert!(number < self.cut.part_rows * self.cut.part_count, "a row is in no part");
        Ok(number)
    }

    /// Returns the first use of a row, `None` when there is none. To be asked for each row of
    /// the source once, in its order.
    ///
    /// # Errors
    /// `Invalid` for a row out of range or asked for twice, otherwise those of the scratch file.
    pub(super) fn take(&mut self, table: TableId, row: RowId) -> Result<Option<Place>> {
        let at = self.number_of(table, row)?;
        let first = match &mut self.answers {
            Answers::Array(uses) => std::mem::replace(&mut uses[at as usize], ASKED),
            Answers::InOrder(part) => part.take(at)?,
            Answers::Asked(parts) => {
                let answer = parts.take::<8>((at / self.cut.part_rows) as usize)?;
                u64::from_le_bytes(answer.ok_or_else(|| {
                    Error::invalid("the source of rows brought others the second time")
                })?)
            }
        };
        match first {
            NONE => Ok(None),
            ASKED => Err(Error::invalid("the source of rows brought a row twice")
                .with("table_id", table.0)
                .with("row", row.0)),
            first => Ok(Some(Place { window: (first >> 32) as u32, entry: first as u32 })),
        }
    }
}

fn in_part(cut: Cut, at: u64) -> [u8; 4] {
    ((at % cut.part_rows) as u32).to_le_bytes()
}

// Makes the array of a part's first uses.
fn load_part(uses: &mut Parts, part: usize, first_uses: &mut [u64]) -> Result<()> {
    first_uses.fill(NONE);
    while let Some([a, b, c, d, first @ ..]) = uses.take::<12>(part)? {
        let at = u32::from_le_bytes([a, b, c, d]) as usize;
        first_uses[at] = u64::from_le_bytes(first);
    }
    uses.forget(part);
    Ok(())
}

// Part by part: an array of its first uses, then an answer per question.
fn answer(
    folder: &Arc<dyn Folder>,
    cut: Cut,
    uses: &mut Parts,
    asked: &mut Parts,
) -> Result<Parts> {
    let (part_count, block_bytes) = (cut.part_count as usize, cut.block_bytes as usize);
    let mut answers = Parts::create(folder, "replan-found.rows", part_count, block_bytes)?;
    let mut first_uses = vec![NONE; cut.part_rows as usize];
    for part in 0..part_count {
        load_part(uses, part, &mut first_uses)?;
        while let Some(at) = asked.take::<4>(part)? {
            let place = &mut first_uses[u32::from_le_bytes(at) as usize];
            answers.add(part, place.to_le_bytes())?;
            *place = ASKED;
        }
        asked.forget(part);
    }
    answers.seal()?;
    Ok(answers)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use tierbed_core::env::SplitMix64;
    use tierbed_core::{Bags, OptimizerKind};
    use tierbed_io::MemoryFolder;
    use tierbed_sim::batch::trained_table;

    use super::*;
    use crate::planned::plan::{PlanBuilder, PlanOptions, PlanShape};

    const ROWS: u64 = 4000;

    fn schema() -> Arc<Schema> {
        let table = |at| trained_table(at, (2, ROWS / 2), OptimizerKind::Sgd, 1);
        Arc::new(Schema::new(vec![table(0), table(1)]).unwrap())
    }

    fn plan(folder: &Arc<dyn Folder>, schema: &Schema, rng: &mut SplitMix64) -> EpochPlan {
        let shape = PlanShape::new(schema, &[TableId(0), TableId(1)]).unwrap();
        let options = PlanOptions { window_batches_max: 2, ..PlanOptions::default() };
        let mut builder =
            PlanBuilder::new(Arc::clone(folder), "p.plan", shape, "s", options).unwrap();
        for _ in 0..9 {
            let ids: Vec<i64> = (0..200).map(|_| rng.below(ROWS / 2) as i64).collect();
            let offsets: Vec<i64> = (0..=200).collect();
            builder.push(&Bags::new(&ids, &offsets, None, 2).unwrap()).unwrap();
        }
        builder.finish().unwrap();
        EpochPlan::open(&**folder, "p.plan").unwrap()
    }

    #[test]
    fn rows_in_their_order_get_the_answers_of_those_that_ask() {
        let (folder, schema) = (Arc::new(MemoryFolder::new()) as Arc<dyn Folder>, schema());
        let mut rng = SplitMix64::new(3);
        let plan = plan(&folder, &schema, &mut rng);
        // Some rows were never written; whole parts among them.
        let written: Vec<(TableId, RowId)> = (0..ROWS)
            .filter(|at| !(700..1500).contains(at) && rng.below(3) > 0)
            .map(|at| (TableId((at / (ROWS / 2)) as u32), RowId(at % (ROWS / 2))))
            .collect();
        let answers = |cut: Cut, in_order: bool| {
            let mut visit_count = 0;
            let source = &mut |sink: &mut super::super::RecordSink<'_>| {
                visit_count += 1;
                written.iter().try_for_each(|&(table, row)| sink(table, row, &[]))
            };
            let mut rows = Rows { source, in_order };
            let mut found = FirstUses::find(&folder, &schema, &plan, cut, &mut rows).unwrap();
            let taken: Vec<_> = written
                .iter()
                .map(|&(table, row)| found.take(table, row).unwrap().map(|p| (p.window, p.entry)))
                .collect();
            let (table, row) = written[0];
            assert!(found.take(table, row).is_err(), "a row comes once");
            (taken, visit_count)
        };
        let (one, many) = (Cut::new(ROWS, 1 << 20), Cut::new(ROWS, 0));
        assert!(one.part_count == 1 && many.part_count > 3, "{many:?}");
        let (expected, visit_count) = answers(one, false);
        assert!(visit_count == 0 && expected.iter().any(Option::is_some));
        assert_eq!(answers(many, false), (expected.clone(), 1));
        assert_eq!(answers(many, true), (expected, 0));
    }

    #[test]
    fn memory_is_kept_as_far_as_it_can_be() {
        assert_eq!(Cut::new(1000, 8000).part_count, 1);
        for rows in [1u64, 1001, 1 << 20, 1 << 30, 1 << 40] {
            for memory in [0u64, 100, 8 << 10, 1 << 20, 1 << 24, 1 << 28] {
                let cut = Cut::new(rows, memory);
                assert!(cut.part_count * cut.part_rows >= rows);
                assert!(cut.block_bytes.is_multiple_of(BLOCK_UNIT));
                let least_bytes = 2 * ((8 * BLOCK_UNIT * rows).isqrt() + 8);
                assert!(
                    cut.memory_bytes <= memory.max(least_bytes) + 64,
                    "{rows} {memory} {cut:?}"
                );
                assert!(cut.part_rows < u64::from(u32::MAX));
            }
        }
    }
}
