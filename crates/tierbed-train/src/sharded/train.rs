//! Batches in, steps done, by all shards at the same time.
//!
//! Rows belong to one shard, and so does every sum over rows: no number is added across shards,
//! and the bits are those of one shard. A step changes rows only after every shard has found the
//! batch to be the one it expects.

use std::sync::Arc;

use crate::window::update::Grads;
use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::FeaturePlan;

use super::crew::together;
use super::many::Many;
use super::part::{idle_shard, Part, Parts};
use crate::auto::engine::AutoEngine;
use crate::auto::options::Order;
use crate::auto::part_bags::PartBags;
use crate::auto::{Answer, PlanRequest};

/// A batch with fewer indices is not worth threads.
const SMALL_BATCH: usize = 4096;

impl Many {
    /// Does `work` for every shard that `parts` names, with its part and its job.
    fn each<J: Send, T: Send>(
        &mut self,
        parts: &Parts,
        is_small: bool,
        jobs: Vec<J>,
        work: impl Fn(&mut AutoEngine, &Part, J) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let is_named = |shard: usize| parts.of_shards.iter().any(|(of, _)| *of == shard);
        let engines = self.engines.iter_mut().enumerate();
        let mut engines: Vec<_> =
            engines.filter(|(shard, _)| is_named(*shard)).map(|(_, engine)| engine).collect();
        let jobs = parts.of_shards.iter().map(|(_, part)| part).zip(jobs).collect();
        together(&mut engines, is_small, jobs, |engine, (part, job)| work(engine, part, job))
    }

    /// See [`AutoEngine::lookup`].
    pub(super) fn lookup(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<()> {
        self.decide()?;
        plan.check(&self.split.schema, bags, out.len())?;
        let parts = self.parts(plan)?;
        let places = parts.carve(bags, out);
        let pooled = self.each(&parts, is_small(bags), places, |engine, part, mut places| {
            let own = PartBags::of_features(bags, &part.features);
            engine.lookup_to(&part.plan, &own.bags()?, &mut places, is_training)
        });
        self.poison.on_doubt(pooled).map(drop)
    }

    /// See [`AutoEngine::update`]. Any error behind the checks poisons the store.
    pub(super) fn update(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        grads: Grads<'_>,
    ) -> Result<()> {
        self.decide()?;
        plan.check(&self.split.schema, bags, grads.output.len())?;
        grads.check(bags)?;
        let parts = self.parts(plan)?;
        let own = self.expected(&parts, bags)?;
        let (output, wants_weights) = (grads.output, grads.weights.is_some());
        let stepped = self.each(&parts, is_small(bags), own, |engine, part, own| {
            let own = own.bags()?;
            let output = part.grad(plan, bags, output);
            let mut weights = wants_weights.then(|| vec![0.0; own.indices.len()]);
            let grads = Grads { output: &output, weights: weights.as_deref_mut() };
            engine.update(&part.plan, &own, grads)?;
            Ok(weights.unwrap_or_default())
        });
        let weights = self.poison.on_any(stepped)?;
        if let Some(into) = grads.weights {
            for ((_, part), own) in parts.of_shards.iter().zip(&weights) {
                part.put_back(plan, bags, own, into);
            }
        }
        Ok(())
    }

    /// See [`AutoEngine::pass`].
    pub(super) fn pass(&mut self, plan: &FeaturePlan, bags: &Bags<'_>) -> Result<()> {
        self.decide()?;
        plan.check(&self.split.schema, bags, plan.output_len(bags))?;
        let parts = self.parts(plan)?;
        let own = self.expected(&parts, bags)?;
        let passed = self.each(&parts, is_small(bags), own, |engine, part, own| {
            engine.pass(&part.plan, &own.bags()?)
        });
        self.poison.on_any(passed).map(drop)
    }

    /// See [`AutoEngine::pass_to`].
    pub(super) fn pass_to(&mut self, batch: u64) -> Result<()> {
        self.decide()?;
        let jobs = vec![(); self.engines.len()];
        let passed = together(&mut self.engines, false, jobs, |engine, ()| engine.pass_to(batch));
        self.poison.on_any(passed).map(drop)
    }

    // Copies each shard's bags out of the batch, if every shard expects them.
    fn expected(&mut self, parts: &Parts, bags: &Bags<'_>) -> Result<Vec<PartBags>> {
        let jobs = vec![(); parts.of_shards.len()];
        self.each(parts, is_small(bags), jobs, |engine, part, ()| {
            let own = PartBags::of_features(bags, &part.features);
            engine.expect(&part.plan, &own.bags()?)?;
            Ok(own)
        })
    }

    /// See [`AutoEngine::prefetch`]: the batches that fit all shards.
    pub(super) fn prefetch(&mut self, plan: &FeaturePlan, batches: &[Bags<'_>]) -> Result<usize> {
        self.decide()?;
        let parts = self.parts(plan)?;
        let is_planned = self.position().is_some();
        let jobs: Vec<usize> = parts
            .of_shards
            .iter()
            .map(|(shard, _)| self.ahead.get(*shard).copied().unwrap_or(0))
            .collect();
        let announced = self.each(&parts, false, jobs.clone(), |engine, part, known| {
            let rest = batches.get(known..).unwrap_or(&[]);
            let own = rest.iter().map(|bags| PartBags::of_features(bags, &part.features));
            let own: Vec<PartBags> = own.collect();
            let own = own.iter().map(PartBags::bags).collect::<Result<Vec<_>>>()?;
            engine.prefetch(&part.plan, &own)
        });
        let announced = match self.poison.on_doubt(announced) {
            Ok(announced) => announced,
            Err(error) => {
                self.end_lookahead();
                return Err(error);
            }
        };
        let reached: Vec<usize> =
            jobs.iter().zip(&announced).map(|(known, more)| known + more).collect();
        let fitted = reached.iter().copied().min().unwrap_or(0).min(batches.len());
        for ((shard, _), reached) in parts.of_shards.iter().zip(reached) {
            if let Some(ahead) = self.ahead.get_mut(*shard) {
                // Along a plan nothing is kept from call to call.
                *ahead = if is_planned { 0 } else { reached - fitted };
            }
        }
        Ok(fitted)
    }

    /// See [`AutoEngine::end_lookahead`].
    pub(super) fn end_lookahead(&mut self) {
        self.engines.iter_mut().for_each(AutoEngine::end_lookahead);
        self.ahead.fill(0);
    }

    // ---------------------------------------------------------------- a plan for each shard

    /// See [`AutoEngine::follow`]: all shards follow their part of the plan, or none.
    pub(super) fn follow(&mut self, plan: &FeaturePlan, request: &PlanRequest) -> Result<Answer> {
        self.decide()?;
        let parts = self.parts(plan)?;
        if let Err(error) = idle_shard(&parts, self.shard_count()) {
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
        let jobs = self.seats().into_iter().zip(self.sizes()).collect();
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

    /// See [`AutoEngine::start_plan`].
    pub(super) fn start_plan(&mut self, plan: &FeaturePlan, request: &PlanRequest) -> Result<()> {
        self.decide()?;
        let parts = self.parts(plan)?;
        idle_shard(&parts, self.shard_count())?;
        let jobs = vec![(); parts.of_shards.len()];
        self.each(&parts, true, jobs, |engine, part, ()| engine.start_plan(&part.plan, request))?;
        self.planning = Some(parts);
        Ok(())
    }

    /// See [`AutoEngine::push_planned`].
    pub(super) fn push_planned(&mut self, bags: &Bags<'_>) -> Result<()> {
        let parts = self.planned_parts()?;
        let whole = &parts.whole;
        whole.check(&self.split.schema, bags, whole.output_len(bags))?;
        let jobs = vec![(); parts.of_shards.len()];
        let pushed = self.each(&parts, is_small(bags), jobs, |engine, part, ()| {
            engine.push_planned(&PartBags::of_features(bags, &part.features).bags()?)
        });
        if pushed.is_err() {
            // Some shards have the batch and some have not.
            self.planning = None;
        }
        pushed.map(drop)
    }

    /// See [`AutoEngine::finish_plan`].
    pub(super) fn finish_plan(&mut self) -> Result<()> {
        let parts = self.planned_parts()?;
        self.planning = None;
        let jobs = vec![(); parts.of_shards.len()];
        self.each(&parts, false, jobs, |engine, _, ()| engine.finish_plan()).map(drop)
    }

    fn planned_parts(&self) -> Result<Arc<Parts>> {
        self.planning.clone().ok_or_else(|| Error::invalid("no plan is being made"))
    }

    /// See [`AutoEngine::note_reason`].
    pub(super) fn note_reason(&mut self, reason: &str) {
        // What is wrong with the tables is told when they are used.
        if self.decide().is_ok() {
            self.engines.iter_mut().for_each(|engine| engine.note_reason(reason));
        }
    }

    /// See [`AutoEngine::position`].
    pub(super) fn position(&self) -> Option<(u64, u64)> {
        self.engines.first().and_then(AutoEngine::position)
    }
}

fn is_small(bags: &Bags<'_>) -> bool {
    bags.indices.len() < SMALL_BATCH
}
