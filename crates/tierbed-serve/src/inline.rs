//! Small lookups whose rows are all in memory: answered by the thread that received them.
//!
//! ```text
//! body ─▶ small? ─▶ decoded, checked ─▶ all rows in memory? ─▶ encoded ─▶ answer
//!           └ no ─▶ queue ◀──────────────────────┘ no: as it is prepared
//! ```
//!
//! Handing such a lookup to another thread would cost more than looking up. Nobody is waited for:
//! who asks for a row that must be read goes into the queue, and no policy has heard of the rest.
//! A request has the limits, refusals and counts that it has in the queue; it only never waits.

use crate::admission::Verdict;
use crate::answer::Refusal;
use crate::batch::guarded;
use crate::body::Held;
use crate::executor::Offer;
use crate::generation::Serving;
use crate::job::{Body, InGeneration, Made, Phases, Prepared, Stage};
use crate::options::Limits;
use crate::routes::work::{refused, Ask};
use crate::routes::Service;

/// Bytes of a body for each index that is looked up at once, so that no large body is decoded by a
/// thread that moves bytes: twenty digits in JSON, and their share of names.
const BODY_BYTES_EACH: u64 = 32;
/// Elements of an answer for each such index: encoding them takes no longer than looking up.
const ELEMENTS_EACH: usize = 64;

/// What became of a lookup.
pub(crate) enum Tried {
    Answered(Result<Made, Refusal>),
    /// It must wait for a thread.
    Left(Stage),
}

/// Tells whether a lookup may be answered where it was received, by its body.
pub(crate) fn may_try(limits: &Limits, ask: &Ask) -> bool {
    let bytes_max = (limits.inline_indices_max as u64).saturating_mul(BODY_BYTES_EACH);
    // Compressing an answer takes longer than making it.
    ask.body_bytes <= bytes_max && ask.pack.is_none()
}

/// Answers a lookup, if it is small and its rows are in memory.
pub(crate) fn answer(
    service: &Service,
    ask: &Ask,
    request_count: usize,
    held: Held,
    prepare: &impl Fn(&Serving<'_>, Held) -> Result<Prepared, Refusal>,
) -> Tried {
    let Ask { deadline_us, priority, .. } = *ask;
    match service.executor.admits_at_once(Offer { deadline_us, priority, request_count }) {
        Verdict::Admitted => {}
        verdict => return Tried::Answered(Err(refused(verdict))),
    }
    let Some(serving) = service.serving_known() else { return Tried::Left(Stage::Received(held)) };
    // Index pages of open vocabularies are rows too: not all of them are in memory.
    if !serving.parts.ids.is_empty() {
        return Tried::Left(Stage::Received(held));
    }
    let tried = guarded(service, || look_up(&serving, held, prepare));
    tried.unwrap_or_else(|refusal| Tried::Answered(Err(refusal)))
}

fn look_up(
    serving: &Serving<'_>,
    held: Held,
    prepare: &impl Fn(&Serving<'_>, Held) -> Result<Prepared, Refusal>,
) -> Result<Tried, Refusal> {
    let clock = &serving.clock;
    let start_us = clock.now_us();
    let mut prepared = prepare(serving, held)?;
    let prepared_us = clock.now_us();
    if !is_small(&serving.limits, &prepared) || !look_up_all(serving, &mut prepared)? {
        let parts = std::sync::Arc::clone(&serving.parts);
        return Ok(Tried::Left(Stage::Prepared(Box::new(InGeneration { parts, prepared }))));
    }
    let Prepared { queries, held, sample_count, encode, .. } = prepared;
    let found_us = clock.now_us();
    let body: Body = encode(queries)?;
    let phases = Phases {
        queue_us: 0,
        input_us: prepared_us.saturating_sub(start_us),
        infer_us: found_us.saturating_sub(prepared_us),
        output_us: clock.now_us().saturating_sub(found_us),
        sample_count,
    };
    Ok(Tried::Answered(Ok(Made { body, held, phases })))
}

fn is_small(limits: &Limits, prepared: &Prepared) -> bool {
    let indices_max = limits.inline_indices_max;
    // The rows of a second query may be elsewhere when those of the first have been used.
    let [query] = prepared.queries.as_slice() else { return false };
    query.bags().indices.len() <= indices_max
        && prepared.encode_cost <= indices_max.saturating_mul(ELEMENTS_EACH)
}

/// Looks the queries up, if that needs no page and no wait.
fn look_up_all(serving: &Serving<'_>, prepared: &mut Prepared) -> Result<bool, Refusal> {
    for query in &mut prepared.queries {
        if !query.look_up_resident(serving.source())? {
            return Ok(false);
        }
    }
    Ok(true)
}
