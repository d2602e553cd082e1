//! Rows along a plan and the index of their ids, as one store to publish from.

use std::path::Path;

use tierbed_core::store::Attachment;
use tierbed_core::{Result, Schema};
use tierbed_snapshot::{PageLayout, Report};

use crate::auto::ids::PlannedIds;
use crate::auto::noting::NotingEngine;
use crate::auto::planned::Planned;
use crate::auto::publish_delta::{publish_all, publish_changes, ChangedRows, PublishTarget};
use crate::engine::TrainEngine;
use crate::planned::AnySink;
use crate::window::changes::{DeltaCount, Since};
use crate::window::changes_file::Rows;
use crate::window::publish::PublishProgress;
use crate::window::DeltaBase;

/// See the module documentation.
pub(crate) struct WithIds<'a> {
    pub(crate) planned: &'a mut Planned,
    pub(crate) ids: &'a mut PlannedIds,
}

impl WithIds<'_> {
    /// Publishes as [`TrainEngine::publish_placed`] does.
    pub(crate) fn publish(
        mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.planned.unplanned.clear();
        let memory = self.planned.aside.clone();
        publish_all(&mut self, PublishTarget { path, memory }, layout, attachments, progress)
    }

    /// Publishes as [`TrainEngine::publish_delta`] does.
    pub(crate) fn publish_delta(
        mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.planned.unplanned.clear();
        let memory = self.planned.aside.clone();
        publish_changes(&mut self, PublishTarget { path, memory }, base, attachments, progress)
    }
}

impl ChangedRows for WithIds<'_> {
    fn rows_schema(&self) -> Result<Schema> {
        self.ids.published_schema(self.planned.schema())
    }

    fn own_attachments(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        self.ids.attachments()
    }

    fn changed_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        let schema = self.rows_schema()?;
        let mut rows = match self.planned.noted_since(identities)? {
            Since::Known(rows) => rows,
            Since::Unknown(why) => return Ok(Since::Unknown(why)),
        };
        Ok(match self.ids.noted_since(&schema, identities)? {
            Since::Unknown(why) => Since::Unknown(why),
            Since::Known(pages) => {
                rows.extend(pages);
                Since::Known(rows)
            }
        })
    }

    fn scan_changed(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        let schema = self.rows_schema()?;
        self.planned.scan_noted(rows, sink)?;
        self.ids.scan_noted(&schema, rows, sink)
    }

    fn scan_rows(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        let schema = self.rows_schema()?;
        self.planned.scan_all(sink)?;
        self.ids.scan_pages(&schema, sink)
    }

    fn note(&mut self, identity: &str) -> Result<()> {
        self.planned.note_published(identity)?;
        self.ids.note_published(identity)
    }

    fn count(&mut self, delta: DeltaCount) -> Result<()> {
        self.planned.count_delta(delta)
    }
}
