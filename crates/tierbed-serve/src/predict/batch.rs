//! Batches of predictions: one joint lookup, and one call of the model.
//!
//! Rows have the bits that each request would get alone. Scores may differ from those by what the
//! model's own arithmetic makes of a larger batch. Where a batch fails each of its requests is
//! asked again by itself: a bad page or a sample that the model refuses fails one.

use std::panic::{catch_unwind, AssertUnwindSafe};

use tierbed_core::Result;

use super::{Prepared, Samples, Scores};
use crate::answer::Refusal;
use crate::batch::guarded;
use crate::gateway::calling::counted;
use crate::generation::Serving;
use crate::job::{Done, Made, Phases};
use crate::joint::{look_up_rows, Rows, WORDS_MAX};
use crate::predictor::{Batch, Model};
use crate::spans::Steps;

/// A request between its preparation and its answer.
pub(crate) struct Begun {
    pub(crate) done: Done,
    pub(crate) phases: Phases,
    pub(crate) steps: Steps,
    pub(crate) prepared: Prepared,
}

impl Begun {
    fn samples(&self) -> &Samples {
        &self.prepared.samples
    }
}

/// Answers requests, as many together as there may be.
pub(crate) fn run(serving: &Serving<'_>, begun: Vec<Begun>) {
    if begun.is_empty() {
        return;
    }
    serving.metrics.batch_requests.observe(begun.len() as f64);
    let start_us = serving.clock.now_us();
    begun.iter().for_each(|one| one.steps.looks_up(start_us, begun.len()));
    let (scored, default_rows) = counted(|| score_all(serving, &begun));
    let end_us = serving.clock.now_us();
    let infer_us = end_us.saturating_sub(start_us);
    for (Begun { done, mut phases, steps, prepared }, scores) in begun.into_iter().zip(scored) {
        steps.close(end_us);
        let start_us = serving.clock.now_us();
        let Prepared { mut held, answer_bytes, encode, .. } = prepared;
        let body = scores.and_then(|scores| guarded(serving, || encode(scores)));
        phases.output_us = serving.clock.now_us().saturating_sub(start_us);
        phases.infer_us = infer_us;
        // One lookup was that of all.
        phases.default_rows = default_rows;
        // The rows are gone; less is always there.
        let made = held.resize(answer_bytes).and(body);
        done.send(made.map(|body| Made { body, held, phases }));
    }
}

/// Returns the scores of each request.
fn score_all(serving: &Serving<'_>, begun: &[Begun]) -> Vec<std::result::Result<Scores, Refusal>> {
    let model = match serving.model() {
        Ok(model) => model,
        Err(error) => {
            let refusal = Refusal::from(error);
            return begun.iter().map(|_| Err(refusal.clone())).collect();
        }
    };
    let mut scored = Vec::with_capacity(begun.len());
    for group in groups(begun) {
        let joint = || catch_unwind(AssertUnwindSafe(|| score(serving, model, group)));
        match if group.len() > 1 { joint().ok() } else { None } {
            Some(Ok(scores)) => scored.extend(scores.into_iter().map(Ok)),
            _ => scored.extend(group.iter().map(|one| {
                let alone = std::slice::from_ref(one);
                let mut scores = guarded(serving, || Ok(score(serving, model, alone)?))?;
                let Some(scores) = scores.pop() else { panic!("a request without scores") };
                Ok(scores)
            })),
        }
    }
    scored
}

/// Cuts requests into groups whose rows fit into a joint lookup.
fn groups(begun: &[Begun]) -> impl Iterator<Item = &[Begun]> {
    let mut words = 0;
    begun.chunk_by(move |before, next| {
        words += before.samples().row_words();
        let is_together = words + next.samples().row_words() <= WORDS_MAX;
        if !is_together {
            words = 0;
        }
        is_together
    })
}

/// Scores the samples of several requests as one batch, and gives each its own.
///
/// # Errors
/// Those of the lookup and of the model.
fn score(serving: &Serving<'_>, model: &Model, begun: &[Begun]) -> Result<Vec<Scores>> {
    let samples = || begun.iter().map(Begun::samples);
    let sample_count = samples().map(|samples| samples.count).sum();
    let outputs = model.predictor.outputs();
    let scores = if sample_count == 0 {
        vec![Vec::new(); outputs.len()]
    } else {
        let queries: Vec<_> = samples().map(|samples| &samples.query).collect();
        let Rows { elements: rows, stats } =
            look_up_rows(model.source(serving.source()), &queries)?;
        for Begun { steps, .. } in begun {
            steps.found(&stats);
            steps.scores(&*serving.clock);
        }
        let dense = samples().flat_map(|samples| &samples.dense).copied().collect();
        // A model that looks rows up by itself gets those of this generation.
        serving.view.hold(|| model.predict(Batch { sample_count, dense, rows }))?
    };
    let mut rest: Vec<_> = scores.iter().map(Vec::as_slice).collect();
    let cut = samples().map(|samples| {
        let own = rest.iter_mut().zip(outputs).map(|(rest, output)| {
            let (own, after) = rest.split_at(samples.count * output.len());
            *rest = after;
            own.to_vec()
        });
        own.collect()
    });
    Ok(cut.collect())
}

impl Samples {
    /// Returns the elements of the samples' rows.
    fn row_words(&self) -> usize {
        self.count * self.query.plan.layout.output_dim()
    }

    /// Returns the bytes of rows and numbers.
    pub(crate) fn bytes(&self) -> usize {
        (self.row_words() + self.dense.len()) * size_of::<f32>()
    }
}
