//! The automatic choice as a training engine: each call goes to the engine that has the rows.

use std::path::Path;

use serde_json::{json, Value};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Budget, Result, Schema, TableId, TableSchema};
use tierbed_kernels::{FeatureLayout, Grads, Hyper};
use tierbed_snapshot::{PageLayout, Report};
use tierbed_store::kept::{kept_names, verify_checkpoint};

use crate::auto::engine::{lost, AutoEngine, State};
use crate::auto::moving;
use crate::auto::noting::NotingEngine;
use crate::auto::options::OnMismatch;
use crate::auto::stats::budget_json;
use crate::auto::windowed::callers_names;
use crate::auto::with_ids::WithIds;
use crate::batch_token::BatchToken;
use crate::engine::{Access, OwnRows, TrainEngine};
use crate::folders::check_folder;
use crate::planned::AnySink;
use crate::window::changes::{DeltaCount, Since};
use crate::window::changes_file::Rows;
use crate::window::publish::PublishProgress;
use crate::window::vocabularies::{name_of_open_table, VocabularyStats};
use crate::window::DeltaBase;

impl TrainEngine for AutoEngine {
    fn schema(&self) -> &Schema {
        match &self.state {
            State::Undecided(tables) => &tables.schema,
            State::Windowed(windowed) => windowed.schema(),
            State::Planned(planned) => planned.schema(),
            State::Planless(planless) => &planless.tables.schema,
            State::Lost(_) => &moving::NO_TABLES,
        }
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        let known = self.schema().id_of(&table.name);
        if table.is_own() || known.is_some_and(|id| self.open.contains_key(&id)) {
            return Err(name_of_open_table(&table.name));
        }
        match &mut self.state {
            State::Undecided(tables) => tables.add(table),
            State::Planless(planless) => planless.find_table(&table),
            _ => self.engine()?.add_table(table),
        }
    }

    fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        match &mut self.state {
            State::Undecided(tables) => tables.set_hyper(table, Hyper { step: 0, ..hyper }),
            State::Planless(planless) => planless.tables.set_hyper(table, hyper),
            _ => self.engine()?.set_hyper(table, hyper),
        }
    }

    fn steps_done(&mut self, table: TableId) -> Result<u64> {
        match &self.state {
            State::Undecided(tables) => Ok(tables.hyper(table)?.step),
            State::Planless(planless) => Ok(planless.tables.hyper(table)?.step),
            _ => self.engine()?.steps_done(table),
        }
    }

    fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<Option<BatchToken>> {
        if let Some(done) = self.lookup_joined(plan, bags, out) {
            return done.map(|()| None);
        }
        if !is_training {
            return self.whole_engine()?.lookup(plan, bags, out, false);
        }
        self.end_stepped()?;
        self.planned_or_moved(plan, bags, |engine| engine.lookup(plan, bags, out, true))
    }

    fn expect(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<Option<BatchToken>> {
        self.engine()?.expect(plan, bags)
    }

    fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
        found: Option<BatchToken>,
    ) -> Result<()> {
        let mut grads = grads;
        if let Some(done) = self.update_joined(plan, bags, &mut grads) {
            return done;
        }
        self.end_stepped()?;
        self.check_may_step()?;
        let Grads { output, mut weights } = grads;
        self.planned_or_moved(plan, bags, |engine| {
            let grads = Grads { output, weights: weights.as_deref_mut() };
            engine.update(plan, bags, grads, found)
        })
    }

    fn skip(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<()> {
        self.end_joined()?;
        if self.ids.is_some() {
            return self.skip_ids(plan, bags);
        }
        match self.planned_mut() {
            Some(_) => self.planned_or_moved(plan, bags, |engine| engine.skip(plan, bags)),
            None => Ok(()),
        }
    }

    fn skip_to(&mut self, batch: u64) -> Result<()> {
        self.end_joined()?;
        self.planned_mut().map_or(Ok(()), |planned| planned.skip_to(batch))
    }

    fn position(&self) -> Option<(u64, u64)> {
        match &self.state {
            State::Planned(planned) => planned.position(),
            _ => None,
        }
    }

    fn prefetch(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        self.whole_engine()?.prefetch(plan, batches)
    }

    fn end_lookahead(&mut self) {
        match &mut self.state {
            State::Windowed(windowed) => windowed.end_lookahead(),
            State::Planned(planned) => planned.end_lookahead(),
            State::Undecided(_) | State::Planless(_) | State::Lost(_) => {}
        }
    }

    fn rows_of(&mut self, table: TableId, access: Access) -> Result<OwnRows<'_>> {
        self.end_stepped()?;
        let may_move = self.config.on_mismatch() != OnMismatch::Error;
        if access == Access::Write && may_move && self.planned_mut().is_some() {
            self.move_to_window("rows were written by number")?;
        }
        self.engine()?.rows_of(table, access)
    }

    fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.whole_engine()?.scan_all(sink)
    }

    fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.whole_engine()?.checkpoint(name, attachments)
    }

    fn last_checkpoint(&self) -> Option<&CommitInfo> {
        match &self.state {
            State::Windowed(windowed) => windowed.last_checkpoint(),
            State::Planned(planned) => planned.last_checkpoint(),
            State::Planless(planless) => planless.log.info(),
            State::Undecided(_) | State::Lost(_) => None,
        }
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.state {
            State::Undecided(_) => Ok(None),
            State::Planless(planless) => planless.log.attachment(name),
            _ => self.engine()?.attachment(name),
        }
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        match &self.state {
            State::Undecided(_) => Ok(Vec::new()),
            State::Windowed(windowed) => windowed.attachment_names(),
            State::Planned(planned) => planned.attachment_names(),
            State::Planless(planless) => Ok(callers_names(&planless.log)),
            State::Lost(cause) => Err(lost(cause)),
        }
    }

    fn verify(&mut self) -> Result<u64> {
        let mut count = self.whole_engine()?.verify()?;
        if let Some(ids) = &mut self.ids {
            count += ids.verify()?;
        }
        let Some(folder) = self.folder.clone() else { return Ok(count) };
        if matches!(self.state, State::Windowed(_)) && !moving::has_moved(&*folder)? {
            // What this folder keeps was verified by the engine in it.
            return Ok(count);
        }
        for name in kept_names(folder.as_ref())? {
            count += verify_checkpoint(&folder, &name, &check_folder)?;
        }
        Ok(count)
    }

    fn publish_placed(
        &mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.end_stepped()?;
        if let (State::Planned(planned), Some(ids)) = (&mut self.state, &mut self.ids) {
            return WithIds { planned, ids }.publish(path, layout, attachments, progress);
        }
        self.engine()?.publish_placed(path, layout, attachments, progress)
    }

    fn publish_delta(
        &mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.end_stepped()?;
        if let (State::Planned(planned), Some(ids)) = (&mut self.state, &mut self.ids) {
            return WithIds { planned, ids }.publish_delta(path, base, attachments, progress);
        }
        self.engine()?.publish_delta(path, base, attachments, progress)
    }

    fn stats(&mut self) -> Result<Value> {
        let notes = json!({
            "reason": self.notes.reason,
            "fallback_count": self.notes.fallback_count,
            "rows_moved": self.notes.rows_moved,
            "replan_count": self.notes.replan_count,
            "plan_damage": self.plan_damage(),
        });
        let mut stats = match &self.state {
            State::Planless(_) => {
                json!({"order": {"kind": "forward"}, "budget": budget_json(&[])})
            }
            _ => self.engine()?.stats()?,
        };
        if let (State::Planned(planned), Some(ids), Some(stats)) =
            (&self.state, &self.ids, stats.as_object_mut())
        {
            let reports = planned.budgets().map(Budget::report);
            let reports = [reports.as_slice(), &[ids.budget().report()]].concat();
            let disk_bytes = json!(planned.engine.disk_bytes()? + ids.disk_bytes());
            let ids = json!(ids.states());
            let whole = [("budget", budget_json(&reports)), ("disk_bytes", disk_bytes)];
            let all = whole.into_iter().chain([("vocabularies", ids)]);
            stats.extend(all.map(|(name, value)| (name.to_owned(), value)));
        }
        let order = stats.get_mut("order").and_then(Value::as_object_mut);
        if let (Some(order), Value::Object(notes)) = (order, notes) {
            order.extend(notes);
        }
        Ok(stats)
    }

    fn vocabularies(&self) -> VocabularyStats {
        self.open_vocabularies()
    }
}

impl NotingEngine for AutoEngine {
    fn noted_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        self.engine()?.noted_since(identities)
    }

    fn scan_noted(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        self.whole_engine()?.scan_noted(rows, sink)
    }

    fn note_published(&mut self, identity: &str) -> Result<()> {
        self.engine()?.note_published(identity)
    }

    fn count_delta(&mut self, delta: DeltaCount) -> Result<()> {
        self.engine()?.count_delta(delta)
    }
}
