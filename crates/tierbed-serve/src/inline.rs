//! Small requests that no other thread need see: answered by the thread that received them.
//!
//! ```text
//! body ─▶ small? ─▶ decoded, checked ─▶ rows found ─▶ all in memory? ─▶ scored, encoded ─▶ answer
//!           │ no                            │             │ no               ▲
//!           ▼                               ▼ a wait      └─▶ pages read ────┘
//!         queue ◀───────────────────────────┘ as it is prepared     others are answered meanwhile
//! ```
//!
//! Handing such a request to another thread would cost more than answering it. Nobody is waited
//! for but the disk and shards, and the thread answers others meanwhile ([`crate::pending`]). Who
//! would have to wait for a lock or a reader goes into the queue, and no policy has heard of the
//! rest. A request has the limits, refusals and counts that it has in the queue. Predictions are
//! answered so where the model says that it is quick.

use std::sync::Arc;

use tierbed_snapshot::{Begun, LookupStats};

use crate::admission::Verdict;
use crate::answer::Refusal;
use crate::batch::guarded;
use crate::body::Held;
use crate::coding::Pack;
use crate::executor::Offer;
use crate::gateway::calling::Time;
use crate::generation::Serving;
use crate::job::{packing, Answered, AtOnce, Checked, InGeneration, Made, Phases, Prepared, Stage};
use crate::options::Limits;
use crate::pending::{Awaited, PendingRequest};
use crate::predict;
use crate::predictor::Batch;
use crate::query::{Matrix, Query};
use crate::routes::work::{refused, Ask};
use crate::routes::Service;
use crate::spans::Steps;

/// Bytes of a body for each index that is looked up at once, so that no large body is decoded by a
/// thread that moves bytes: twenty digits in JSON, and their share of names.
const BODY_BYTES_EACH: u64 = 32;
/// Elements of an answer for each such index: encoding them takes no longer than looking up.
const ELEMENTS_EACH: usize = 64;

/// Requests under way of a gateway up to which each asks shards by itself. What a few milliseconds
/// bring: a shard that moves to another server delays these, and refuses none.
const ALONE_MAX: usize = 512;

/// What became of a request.
pub(crate) enum Tried<'a, P> {
    Answered(Result<Made, Refusal>),
    /// Its rows are on their way.
    Pending(Box<PendingRequest<'a, P>>),
    /// It must wait for a thread.
    Left(Stage<P>),
}

/// When a request was taken up, and when it had been decoded and checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    start_us: u64,
    prepared_us: u64,
}

impl Times {
    /// Returns the answer with what its steps took.
    pub(crate) fn made(self, serving: &Serving<'_>, steps: &Steps, answered: Answered) -> Made {
        let Self { start_us, prepared_us } = self;
        let Answered { body, held, sample_count, found_us } = answered;
        steps.looks_up(prepared_us, 1);
        steps.close(found_us);
        let phases = Phases {
            queue_us: 0,
            input_us: prepared_us.saturating_sub(start_us),
            infer_us: found_us.saturating_sub(prepared_us),
            output_us: serving.clock.now_us().saturating_sub(found_us),
            sample_count,
            default_rows: 0,
        };
        Made { body, held, phases }
    }
}

/// Tells whether a request may be answered where it was received, by its body.
pub(crate) fn may_try(limits: &Limits, ask: &Ask<'_>) -> bool {
    let bytes_max = (limits.inline_indices_max as u64).saturating_mul(BODY_BYTES_EACH);
    // Compressing an answer takes longer than making it.
    ask.body_bytes <= bytes_max && ask.pack.is_none()
}

/// Answers a request, or begins to read its pages, if it is small and waits for nothing else.
pub(crate) fn answer<'a, P: Checked>(
    service: &'a Service,
    ask: &Ask<'_>,
    request_count: usize,
    held: Held,
    prepare: &impl Fn(&Serving<'_>, Held) -> Result<P, Refusal>,
) -> Tried<'a, P> {
    let Ask { deadline_us, priority, generation, steps, .. } = *ask;
    let Some(serving) = service.serving_known(generation) else {
        return Tried::Left(Stage::Received(held));
    };
    // Index pages of open vocabularies are rows too: not all of them are in memory.
    if !serving.parts.ids.is_empty() || !P::may_be_quick(&serving) {
        return Tried::Left(Stage::Received(held));
    }
    match service.executor.admits_at_once(Offer { deadline_us, priority, request_count }) {
        Verdict::Admitted => {}
        verdict => return Tried::Answered(Err(refused(verdict))),
    }
    // Many lookups take less time together: they wait for a thread, and are asked for as one.
    if service.gateway.is_some() && request_count > ALONE_MAX {
        return Tried::Left(Stage::Received(held));
    }
    let _time = Time::until(Some(deadline_us));
    let start_us = serving.clock.now_us();
    let mut times = Times { start_us, prepared_us: start_us };
    let tried = guarded(service, || {
        let prepared = prepare(&serving, held)?;
        times.prepared_us = serving.clock.now_us();
        prepared.at_once(&serving, steps)
    });
    match tried {
        Err(refusal) => Tried::Answered(Err(refusal)),
        Ok(AtOnce::Answered(answered)) => {
            Tried::Answered(Ok(times.made(&serving, steps, answered)))
        }
        Ok(AtOnce::Pending { prepared, awaited }) => {
            Tried::Pending(Box::new(PendingRequest { serving, times, prepared, awaited }))
        }
        Ok(AtOnce::Left(prepared)) => {
            let parts = Arc::clone(&serving.parts);
            Tried::Left(Stage::Prepared(Box::new(InGeneration { parts, prepared })))
        }
    }
}

/// Tells whether pages may be read while the thread answers others: while requests wait in the
/// queue, one that overtakes them would get past what limits their number.
fn may_read_async(serving: &Serving<'_>) -> bool {
    serving.executor.is_empty()
}

/// Begins to ask shards for the rows of a query, where they have them. Nobody waits for a thread,
/// so a shard that answers late keeps no other request waiting.
fn of_shards(serving: &Serving<'_>, query: &mut Query) -> Result<Option<Awaited>, Refusal> {
    let gateway = serving.gateway.as_ref();
    let Some(rows) = gateway.and_then(|gateway| gateway.rows(serving.view.identity())) else {
        return Ok(None);
    };
    let asking = query.begin_elsewhere(&rows)?;
    Ok(Some(Awaited::Shards { rows, asking }))
}

impl Checked for Prepared {
    fn may_be_quick(_: &Serving<'_>) -> bool {
        true
    }

    fn at_once(mut self, serving: &Serving<'_>, steps: &Steps) -> Result<AtOnce<Self>, Refusal> {
        let indices_max = serving.limits.inline_indices_max;
        if self.encode_cost > indices_max.saturating_mul(ELEMENTS_EACH) {
            return Ok(AtOnce::Left(self));
        }
        // The rows of a second query may be elsewhere when those of the first have been used.
        let begun = match self.queries.as_mut_slice() {
            [query] if query.bags().indices.len() <= indices_max => {
                if let Some(awaited) = of_shards(serving, query)? {
                    return Ok(AtOnce::Pending { prepared: self, awaited });
                }
                query.begin(serving.source(), may_read_async(serving))?
            }
            _ => Begun::Left,
        };
        self.begun(begun, serving, steps)
    }

    fn query(&mut self) -> &mut Query {
        let [query] = self.queries.as_mut_slice() else { panic!("one query is looked up") };
        query
    }

    fn found(
        self,
        stats: &LookupStats,
        serving: &Serving<'_>,
        steps: &Steps,
    ) -> Result<Answered, Refusal> {
        steps.found(stats);
        let Self { queries, held, sample_count, encode, .. } = self;
        let found_us = serving.clock.now_us();
        Ok(Answered { body: encode(queries)?, held, sample_count, found_us })
    }

    fn into_held(self) -> Held {
        self.held
    }

    fn packing(self, pack: Pack) -> Self {
        Self { encode: packing(self.encode, pack), ..self }
    }
}

impl Checked for predict::Prepared {
    fn may_be_quick(serving: &Serving<'_>) -> bool {
        serving.model().is_ok_and(|model| model.predictor.samples_at_once() > 0)
    }

    fn at_once(mut self, serving: &Serving<'_>, steps: &Steps) -> Result<AtOnce<Self>, Refusal> {
        let (model, samples) = (serving.model()?, &mut self.samples);
        let is_small = (1..=model.predictor.samples_at_once()).contains(&samples.count)
            && samples.query.bags().indices.len() <= serving.limits.inline_indices_max;
        if !is_small {
            return Ok(AtOnce::Left(self));
        }
        samples.query.make_room(&[]);
        if let Some(awaited) = of_shards(serving, &mut samples.query)? {
            return Ok(AtOnce::Pending { prepared: self, awaited });
        }
        let begun = samples.query.begin(model.source(serving.source()), may_read_async(serving))?;
        if matches!(begun, Begun::Left) {
            samples.query.matrix = Matrix::default();
        }
        self.begun(begun, serving, steps)
    }

    fn query(&mut self) -> &mut Query {
        &mut self.samples.query
    }

    fn found(
        self,
        stats: &LookupStats,
        serving: &Serving<'_>,
        steps: &Steps,
    ) -> Result<Answered, Refusal> {
        steps.found(stats);
        steps.scores(&*serving.clock);
        let Self { mut samples, mut held, answer_bytes, encode } = self;
        let matrix = std::mem::take(&mut samples.query.matrix);
        let sample_count = samples.count;
        let batch = Batch { sample_count, dense: samples.dense, rows: matrix.into_elements() };
        let model = serving.model()?;
        let scores = serving.view.hold(|| model.predict(batch))?;
        held.resize(answer_bytes)?;
        let found_us = serving.clock.now_us();
        let sample_count = sample_count as u64;
        Ok(Answered { body: encode(scores)?, held, sample_count, found_us })
    }

    fn into_held(self) -> Held {
        self.held
    }

    fn packing(self, pack: Pack) -> Self {
        Self { encode: packing(self.encode, pack), ..self }
    }
}
