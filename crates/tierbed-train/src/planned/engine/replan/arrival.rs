//! Rows of another engine, which has no plan, come to their first use along one.
//!
//! The move is that of [`replan`](super), from another source of rows. The other engine stays
//! whole and in force until the checkpoint along the plan is.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result, Schema};
use tierbed_io::Folder;

use super::super::reservations::{Purpose, Reservations};
use super::super::stored::Stored;
use super::super::{OpenFolder, PlannedConfig, PlannedEngine, PlannedTables};
use super::{grown, Move, RowSource, Rows};
use crate::hypers::Hypers;
use crate::planned::plan::EpochPlan;
use crate::window::changes::Changes;

/// A run of another engine, at its last checkpoint.
pub(crate) struct Arrival<'a> {
    pub(crate) schema: Schema,
    /// Of each table; `step` is the number of steps done.
    pub(crate) hypers: Hypers,
    /// Brings rows in the order of tables and rows.
    pub(crate) source: &'a mut RowSource<'a>,
    /// Memory that the source takes.
    pub(crate) source_bytes: u64,
    /// Disk space that it takes outside of the folder.
    pub(crate) outside_bytes: u64,
    /// Number of the last checkpoint: the next one has a greater one.
    pub(crate) number: u64,
    /// Its name, and what the caller attached to it.
    pub(crate) name: &'a str,
    pub(crate) attachments: &'a [Attachment<'a>],
    /// Rows changed since publishes.
    pub(crate) changes: Changes,
}

/// Why rows did not come to a plan.
#[derive(Debug)]
pub(crate) enum NotArrived {
    /// They are where they were, and the engine there may go on.
    AsBefore(Error),
    /// Reopening tells where they are.
    InDoubt(Error),
}

impl NotArrived {
    pub(crate) fn into_error(self) -> Error {
        let (Self::AsBefore(error) | Self::InDoubt(error)) = self;
        error
    }
}

impl PlannedEngine {
    /// Moves the rows of `arrival` to a store in `folder` that follows `plan`, and makes the last
    /// checkpoint of that run again, along the plan. Tables grow to the rows that the plan was
    /// made for.
    ///
    /// # Errors
    /// `AsBefore` with `Invalid` for a plan of other or smaller tables or a budget too small, or
    /// `NoSpace` when the disk does not hold the rows twice.
    pub(crate) fn arrive(
        folder: &Arc<dyn Folder>,
        plan: EpochPlan,
        config: &PlannedConfig,
        arrival: Arrival<'_>,
    ) -> std::result::Result<Self, NotArrived> {
        let prepared = Self::prepare_arrival(folder, plan, config, &arrival);
        let (site, tables) = prepared.map_err(NotArrived::AsBefore)?;
        let Arrival { hypers, source, source_bytes, outside_bytes, .. } = arrival;
        let stored = Stored::arriving(hypers);
        let Arrival { name, attachments, changes, .. } = arrival;
        let moving = Move {
            rows: Rows { source, in_order: true },
            stored,
            source_bytes,
            outside_bytes,
            name,
            attachments,
            changes,
        };
        Self::move_rows(site, tables, config, moving)
    }

    fn prepare_arrival(
        folder: &Arc<dyn Folder>,
        plan: EpochPlan,
        config: &PlannedConfig,
        arrival: &Arrival<'_>,
    ) -> Result<(OpenFolder, PlannedTables)> {
        Self::check_arrival(&**folder, &plan, config, &arrival.schema, arrival.source_bytes)?;
        let schema = Arc::new(grown(&arrival.schema, &plan)?);
        let mut site = OpenFolder::changing(Arc::clone(folder))?;
        site.log.note_later(arrival.number);
        Ok((site, PlannedTables { schema, plan }))
    }

    /// Checks that rows of tables `schema` may come to `plan`: told before hours of moving, and
    /// before any of several shards moves its own. Leaves a file of extents.
    ///
    /// # Errors
    /// `Invalid` for a plan of other or smaller tables or a budget too small.
    pub(crate) fn check_arrival(
        folder: &dyn Folder,
        plan: &EpochPlan,
        config: &PlannedConfig,
        schema: &Schema,
        source_bytes: u64,
    ) -> Result<()> {
        let schema = Arc::new(grown(schema, plan)?);
        let row_count = schema.tables().iter().map(|table| table.row_count).sum();
        let moved = Stored::arriving(Hypers::fresh(schema.tables().len()));
        let tables = PlannedTables { schema, plan: plan.clone() };
        for (stored, purpose) in [
            (Stored::default(), Purpose::Training),
            (moved, Purpose::Moving { source_bytes, row_count }),
        ] {
            Reservations::reserve(folder, &tables, config, &stored, purpose)?;
        }
        Ok(())
    }
}
