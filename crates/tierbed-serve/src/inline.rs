//! Small requests that need no wait: answered by the thread that received them.
//!
//! ```text
//! body ─▶ small? ─▶ decoded, checked ─▶ all rows in memory? ─▶ scored ─▶ encoded ─▶ answer
//!           └ no ─▶ queue ◀──────────────────────┘ no: as it is prepared
//! ```
//!
//! Handing such a request to another thread would cost more than answering it. Nobody is waited
//! for: who asks for a row that must be read goes into the queue, and no policy has heard of the
//! rest. A request has the limits, refusals and counts that it has in the queue; it only never
//! waits. Predictions are answered so where the model says that it is quick.

use std::sync::Arc;

use crate::admission::Verdict;
use crate::answer::Refusal;
use crate::batch::guarded;
use crate::body::Held;
use crate::coding::Pack;
use crate::executor::Offer;
use crate::generation::Serving;
use crate::job::{packing, AtOnce, Checked, InGeneration, Made, Phases, Prepared, Stage};
use crate::options::Limits;
use crate::predict;
use crate::predictor::Batch;
use crate::query::Query;
use crate::routes::work::{refused, Ask};
use crate::routes::Service;
use crate::spans::Steps;

/// Bytes of a body for each index that is looked up at once, so that no large body is decoded by a
/// thread that moves bytes: twenty digits in JSON, and their share of names.
const BODY_BYTES_EACH: u64 = 32;
/// Elements of an answer for each such index: encoding them takes no longer than looking up.
const ELEMENTS_EACH: usize = 64;

/// What became of a request.
pub(crate) enum Tried<P> {
    Answered(Result<Made, Refusal>),
    /// It must wait for a thread.
    Left(Stage<P>),
}

/// Tells whether a request may be answered where it was received, by its body.
pub(crate) fn may_try(limits: &Limits, ask: &Ask<'_>) -> bool {
    let bytes_max = (limits.inline_indices_max as u64).saturating_mul(BODY_BYTES_EACH);
    // Compressing an answer takes longer than making it.
    ask.body_bytes <= bytes_max && ask.pack.is_none()
}

/// Answers a request, if it is small and its rows are in memory.
pub(crate) fn answer<P: Checked>(
    service: &Service,
    ask: &Ask<'_>,
    request_count: usize,
    held: Held,
    prepare: &impl Fn(&Serving<'_>, Held) -> Result<P, Refusal>,
) -> Tried<P> {
    let Ask { deadline_us, priority, steps, .. } = *ask;
    let Some(serving) = service.serving_known() else { return Tried::Left(Stage::Received(held)) };
    // Index pages of open vocabularies are rows too: not all of them are in memory.
    if !serving.parts.ids.is_empty() || !P::may_be_quick(&serving) {
        return Tried::Left(Stage::Received(held));
    }
    match service.executor.admits_at_once(Offer { deadline_us, priority, request_count }) {
        Verdict::Admitted => {}
        verdict => return Tried::Answered(Err(refused(verdict))),
    }
    let tried = guarded(service, || made(&serving, steps, held, prepare));
    tried.unwrap_or_else(|refusal| Tried::Answered(Err(refusal)))
}

fn made<P: Checked>(
    serving: &Serving<'_>,
    steps: &Steps,
    held: Held,
    prepare: &impl Fn(&Serving<'_>, Held) -> Result<P, Refusal>,
) -> Result<Tried<P>, Refusal> {
    let clock = &serving.clock;
    let start_us = clock.now_us();
    let prepared = prepare(serving, held)?;
    let prepared_us = clock.now_us();
    Ok(match prepared.at_once(serving, steps)? {
        AtOnce::Left(prepared) => {
            let parts = Arc::clone(&serving.parts);
            Tried::Left(Stage::Prepared(Box::new(InGeneration { parts, prepared })))
        }
        AtOnce::Done { body, held, sample_count, found_us } => {
            steps.looks_up(prepared_us, 1);
            steps.close(found_us);
            let phases = Phases {
                queue_us: 0,
                input_us: prepared_us.saturating_sub(start_us),
                infer_us: found_us.saturating_sub(prepared_us),
                output_us: clock.now_us().saturating_sub(found_us),
                sample_count,
            };
            Tried::Answered(Ok(Made { body, held, phases }))
        }
    })
}

impl Checked for Prepared {
    fn may_be_quick(_: &Serving<'_>) -> bool {
        true
    }

    fn at_once(mut self, serving: &Serving<'_>, steps: &Steps) -> Result<AtOnce<Self>, Refusal> {
        if !is_small(&serving.limits, &self) || !look_up_all(serving, steps, &mut self.queries)? {
            return Ok(AtOnce::Left(self));
        }
        let Self { queries, held, sample_count, encode, .. } = self;
        let found_us = serving.clock.now_us();
        Ok(AtOnce::Done { body: encode(queries)?, held, sample_count, found_us })
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
        let sample_count = samples.count;
        let is_small = (1..=model.predictor.samples_at_once()).contains(&sample_count)
            && samples.query.bags().indices.len() <= serving.limits.inline_indices_max;
        if !is_small {
            return Ok(AtOnce::Left(self));
        }
        samples.query.make_room(&[]);
        let found = samples.query.look_up_resident(model.source(serving.source()))?;
        let matrix = std::mem::take(&mut samples.query.matrix);
        let Some(found) = found else { return Ok(AtOnce::Left(self)) };
        steps.found(&found);
        steps.scores(&*serving.clock);
        let predict::Prepared { samples, mut held, answer_bytes, encode } = self;
        let batch = Batch { sample_count, dense: samples.dense, rows: matrix.into_elements() };
        let scores = serving.view.hold(|| model.predict(batch))?;
        held.resize(answer_bytes)?;
        let found_us = serving.clock.now_us();
        let sample_count = sample_count as u64;
        Ok(AtOnce::Done { body: encode(scores)?, held, sample_count, found_us })
    }

    fn into_held(self) -> Held {
        self.held
    }

    fn packing(self, pack: Pack) -> Self {
        Self { encode: packing(self.encode, pack), ..self }
    }
}

fn is_small(limits: &Limits, prepared: &Prepared) -> bool {
    let indices_max = limits.inline_indices_max;
    // The rows of a second query may be elsewhere when those of the first have been used.
    let [query] = prepared.queries.as_slice() else { return false };
    query.bags().indices.len() <= indices_max
        && prepared.encode_cost <= indices_max.saturating_mul(ELEMENTS_EACH)
}

/// Looks the queries up, if that needs no page and no wait.
fn look_up_all(
    serving: &Serving<'_>,
    steps: &Steps,
    queries: &mut [Query],
) -> Result<bool, Refusal> {
    for query in queries {
        let Some(found) = query.look_up_resident(serving.source())? else { return Ok(false) };
        steps.found(&found);
    }
    Ok(true)
}
