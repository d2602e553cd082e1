//! Translation of raw ids to rows of a snapshot, for tables with open vocabularies.
//!
//! Index pages are rows of the snapshot, so they are read, checked and cached as all rows are.
//! Ids that training gave no row get the shared row, which training taught on such ids.

use tierbed_core::{Bags, Budget, Error, Result, TableId};
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_vocab::attachments::{States, DIRECTORY, STATES};
use tierbed_vocab::Published;

use crate::View;

/// The open tables of a snapshot.
#[derive(Debug)]
pub struct PublishedIds {
    tables: Vec<(Published, FeatureLayout)>,
    /// Open tables whose ids are translated elsewhere.
    elsewhere: Vec<TableId>,
}

impl PublishedIds {
    /// Reads the directories of the open tables of a generation; there may be none.
    ///
    /// They take about a tenth of a byte per id beside the snapshot's budget.
    ///
    /// # Errors
    /// `Corruption` when they do not belong to the snapshot's tables.
    pub fn open(snapshot: &View<'_>) -> Result<Self> {
        let Some(json) = snapshot.attachment(STATES)? else {
            return Ok(Self::elsewhere(Vec::new()));
        };
        let damaged = || Error::corruption("the snapshot's vocabularies are damaged");
        let states: States =
            serde_json::from_slice(&json).map_err(|cause| damaged().with("cause", cause))?;
        let mut tables = Vec::new();
        for (at, state) in states.vocabularies.into_iter().enumerate() {
            let name = format!("{DIRECTORY}{at}");
            let bytes = snapshot.attachment(&name)?.ok_or_else(damaged)?;
            let schema = snapshot.schema();
            let index = Published::open(schema, state, &bytes, &Budget::unlimited())?;
            let plan = FeatureLayout::new(schema, &[(index.bucket_table(), Pooling::None)])?;
            tables.push((index, plan));
        }
        Ok(Self { tables, elsewhere: Vec::new() })
    }

    /// Returns open tables whose ids stay as they are: who has the rows translates them.
    #[must_use]
    pub fn elsewhere(tables: Vec<TableId>) -> Self {
        Self { tables: Vec::new(), elsewhere: tables }
    }

    /// Returns whether no table is open: ids are rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.elsewhere.is_empty()
    }

    /// Returns whether `table` is open: its ids are not rows.
    #[must_use]
    pub fn has(&self, table: TableId) -> bool {
        self.tables.iter().any(|(index, _)| index.table() == table)
            || self.elsewhere.contains(&table)
    }

    /// Writes to `rows`, `[E]`, the row of every id of `bags`; ids of tables that are not open
    /// are rows already. The generation is that whose directories these are.
    ///
    /// # Errors
    /// `Invalid` for shapes, otherwise those of reading the snapshot.
    #[expect(clippy::indexing_slicing, reason = "ranges of the plan lie within the checked bags")]
    pub fn translate(
        &self,
        snapshot: &View<'_>,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        rows: &mut [i64],
    ) -> Result<()> {
        if rows.len() != bags.indices.len() || bags.feature_count != plan.features().len() {
            return Err(Error::invalid(
                "translation needs one row per index, and the plan's features",
            )
            .with("indices", bags.indices.len())
            .with("rows", rows.len()));
        }
        rows.copy_from_slice(bags.indices);
        for (at, feature) in plan.features().iter().enumerate() {
            let open = self.tables.iter().find(|(index, _)| index.table() == feature.table);
            let Some((index, pages)) = open else { continue };
            let range = plan.range(bags, at);
            assert!(range.end <= rows.len(), "ids {range:?} of {}", rows.len());
            index.translate(&mut rows[range], &mut |numbers, words| {
                let offsets: Vec<i64> = (0..=numbers.len() as i64).collect();
                let bags = Bags::new(numbers, &offsets, None, 1)?;
                snapshot.lookup(pages, &bags, words).map(drop)
            })?;
        }
        Ok(())
    }
}
