//! A plan for each shard: all of them follow their part of an epoch's plan, or none.

use std::sync::Arc;

use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_kernels::FeatureLayout;

use super::part::{idle_shard, Parts};
use super::shard_set::ShardSet;
use super::train::is_small;
use crate::auto::engine::AutoEngine;
use crate::auto::options::Order;
use crate::auto::part_bags::PartBags;
use crate::auto::{Answer, PlanRequest};
use crate::engine::PlanFollower;

impl PlanFollower for ShardSet {
    fn follow(&mut self, plan: &FeatureLayout, request: &PlanRequest) -> Result<Answer> {
        self.decide()?;
        let parts = self.parts(plan)?;
        if let Err(error) = self.check_may_follow(&parts) {
            return match self.config.order {
                Order::Forward => Err(error),
                _ => Ok(Answer::Refused { reason: error.to_string() }),
            };
        }
        let jobs = || vec![(); parts.of_shards.len()];
        let has_plan = self
            .each(&parts, true, jobs(), |engine, part, ()| engine.has_plan(&part.plan, request))?;
        if has_plan.contains(&false) {
            return Ok(Answer::PlanNeeded);
        }
        if let Err(error) = self.check_moves(&parts, request) {
            return match (error.kind(), self.config.order) {
                (ErrorKind::Invalid, Order::Auto) => {
                    Ok(Answer::Refused { reason: error.to_string() })
                }
                _ => Err(error),
            };
        }
        let jobs = self.participants().into_iter().zip(self.sizes()).collect();
        let answers = self.each(&parts, false, jobs, |engine, part, (_seat, size)| {
            engine.follow(&part.plan, request).map_err(|error| size.name_least(error))
        });
        let answers = self.poison.on_doubt(answers);
        let is_refused = |answer: &&Answer| matches!(answer, Answer::Refused { .. });
        let refused = answers.as_ref().map(|answers| answers.iter().find(is_refused).cloned());
        if !matches!(refused, Ok(None)) {
            // Those that began to follow go back; who has trained stays where it is.
            self.engines.iter_mut().try_for_each(AutoEngine::undecide)?;
        }
        if let Some(refused) = refused.unwrap_or(None) {
            return Ok(refused);
        }
        let mut answers = answers?.into_iter();
        let first = answers.next().unwrap_or(Answer::PlanNeeded);
        match answers.all(|answer| answer == first) {
            true => Ok(first),
            false => Err(Error::corruption("shards stand at different batches")),
        }
    }

    fn start_plan(&mut self, plan: &FeatureLayout, request: &PlanRequest) -> Result<()> {
        self.decide()?;
        let parts = self.parts(plan)?;
        idle_shard(&parts, self.shard_count())?;
        let jobs = vec![(); parts.of_shards.len()];
        self.each(&parts, true, jobs, |engine, part, ()| engine.start_plan(&part.plan, request))?;
        self.planning = Some(parts);
        Ok(())
    }

    fn push_planned(&mut self, bags: &Bags<'_>, is_stepped: bool) -> Result<()> {
        let parts = self.planned_parts()?;
        let whole = &parts.whole;
        whole.check(&self.split.schema, bags, whole.output_len(bags))?;
        let jobs = vec![(); parts.of_shards.len()];
        let pushed = self.each(&parts, is_small(bags), jobs, |engine, part, ()| {
            let own = PartBags::of_features(bags, &part.features);
            engine.push_planned(&own.bags()?, is_stepped)
        });
        if pushed.is_err() {
            // Some shards have the batch and some have not.
            self.planning = None;
        }
        pushed.map(drop)
    }

    fn finish_plan(&mut self) -> Result<()> {
        let parts = self.planned_parts()?;
        self.planning = None;
        let jobs = vec![(); parts.of_shards.len()];
        self.each(&parts, false, jobs, |engine, _, ()| engine.finish_plan()).map(drop)
    }

    fn note_reason(&mut self, reason: &str) {
        // What is wrong with the tables is told when they are used.
        if self.decide().is_ok() {
            self.engines.iter_mut().for_each(|engine| engine.note_reason(reason));
        }
    }
}

impl ShardSet {
    fn check_may_follow(&self, parts: &Parts) -> Result<()> {
        idle_shard(parts, self.shard_count())?;
        for engine in &self.engines {
            if let Some(reason) = engine.why_by_window()? {
                return Err(Error::invalid(reason));
            }
        }
        Ok(())
    }

    // A shard that finds too little memory when others have moved would stop them half-way.
    fn check_moves(&mut self, parts: &Arc<Parts>, request: &PlanRequest) -> Result<()> {
        if !self.engines.iter().any(AutoEngine::has_rows_without_plan) {
            return Ok(());
        }
        let sizes = self.sizes();
        let checked = self.each(parts, false, sizes, |engine, part, size| {
            engine.check_move_to_plan(&part.plan, request).map_err(|error| size.name_least(error))
        });
        checked.map(drop)
    }

    fn planned_parts(&self) -> Result<Arc<Parts>> {
        self.planning.clone().ok_or_else(|| Error::invalid("no plan is being made"))
    }
}
