//! Batches: the lookups of several requests as one.
//!
//! Rows are added per bag in index order, whatever else is in a lookup, so every request gets the
//! bits it would get alone. Where a lookup of several fails, each is asked again by itself: a bad
//! page fails those who need it.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use tierbed_core::Bags;

use crate::answer::Refusal;
use crate::job::{Done, Encode, Job, Made, Phases, Prepared, Work};
use crate::query::{look_up, Query, Source};
use crate::routes::Service;

/// Most elements of the answer to a joint lookup: what is beyond is looked up in several.
const WORDS_MAX: usize = 1 << 20;

/// A request between its preparation and its answer.
struct Begun {
    done: Done,
    held: crate::body::Held,
    encode: Encode,
    phases: Phases,
    result: Result<Vec<Query>, Refusal>,
}

/// Works on jobs and answers them.
pub(crate) fn run(service: &Service, jobs: Vec<Job>) {
    let mut begun = Vec::new();
    for job in jobs {
        let Job { route, queued_us, work, done, .. } = job;
        let start_us = service.clock.now_us();
        let queue_us = start_us.saturating_sub(queued_us);
        service.metrics.waited(route, queue_us);
        if done.is_closed() {
            continue;
        }
        match work {
            Work::Alone(work) => {
                done.send(guarded(service, || work(service)).map(|made| made.after(queue_us)));
            }
            Work::Lookup(prepare) => match guarded(service, || prepare(service)) {
                Err(refusal) => done.send(Err(refusal)),
                Ok(Prepared { queries, held, sample_count, encode }) => {
                    let input_us = service.clock.now_us().saturating_sub(start_us);
                    let phases = Phases { queue_us, input_us, sample_count, ..Phases::default() };
                    begun.push(Begun { done, held, encode, phases, result: Ok(queries) });
                }
            },
        }
    }
    if begun.is_empty() {
        return;
    }
    service.metrics.batch_requests.observe(begun.len() as f64);
    let start_us = service.clock.now_us();
    look_up_all(service, &mut begun);
    let infer_us = service.clock.now_us().saturating_sub(start_us);
    for Begun { done, held, encode, mut phases, result } in begun {
        let start_us = service.clock.now_us();
        let body = result.and_then(|queries| guarded(service, || encode(queries)));
        phases.output_us = service.clock.now_us().saturating_sub(start_us);
        phases.infer_us = infer_us;
        done.send(body.map(|body| Made { body, held, phases }));
    }
}

/// Runs one request's work: its panic is its own answer.
fn guarded<T>(service: &Service, work: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(panic) => Err(service.panicked(&*panic)),
    }
}

/// Looks up the queries of all requests, those of one plan together.
fn look_up_all(service: &Service, begun: &mut [Begun]) {
    let source = service.source();
    let mut groups: Vec<Vec<&mut Query>> = Vec::new();
    let queries = begun.iter_mut().filter_map(|begun| begun.result.as_mut().ok()).flatten();
    for query in queries {
        let is_mate = |group: &&mut Vec<&mut Query>| {
            let words: usize = group.iter().map(|query| query.matrix.get().len()).sum();
            let has_room = words + query.matrix.get().len() <= WORDS_MAX;
            has_room && group.first().is_some_and(|first| Arc::ptr_eq(&first.plan, &query.plan))
        };
        match groups.iter_mut().find(is_mate) {
            Some(group) => group.push(query),
            None => groups.push(vec![query]),
        }
    }
    let mut failed = false;
    for group in &mut groups {
        let looked_up = catch_unwind(AssertUnwindSafe(|| look_up_together(source, group)));
        failed |= !matches!(looked_up, Ok(Ok(())));
    }
    drop(groups);
    if failed {
        // A lookup repeated has the same bits.
        for one in begun {
            one.result = guarded(service, || {
                let mut queries = std::mem::replace(&mut one.result, Ok(Vec::new()))?;
                for query in &mut queries {
                    query.look_up(source)?;
                }
                Ok(queries)
            });
        }
    }
}

/// Looks up queries of one plan as one.
///
/// # Errors
/// Those of [`Query::look_up`], of any of them.
pub(crate) fn look_up_together(
    source: Source<'_>,
    queries: &mut [&mut Query],
) -> tierbed_core::Result<()> {
    let plan = match queries {
        [] => return Ok(()),
        [one] => return one.look_up(source),
        [first, ..] => Arc::clone(&first.plan),
    };
    let index_count = queries.iter().map(|query| query.bags().indices.len()).sum();
    let is_weighted = queries.iter().any(|query| query.bags().weights.is_some());
    let mut indices: Vec<i64> = Vec::with_capacity(index_count);
    let mut weights: Vec<f32> = Vec::with_capacity(if is_weighted { index_count } else { 0 });
    let mut offsets = vec![0];
    for at in 0..plan.asked.len() {
        for query in queries.iter() {
            let bags = query.bags();
            let range = plan.layout.range(&bags, at);
            let shift = indices.len() as i64 - range.start as i64;
            let own = bags.feature_offsets(at).iter().skip(1);
            offsets.extend(own.map(|offset| offset + shift));
            let (Some(ids), own_weights) = (
                bags.indices.get(range.clone()),
                bags.weights.map(|weights| weights.get(range.clone())),
            ) else {
                panic!("bags of feature {at} lie beyond their ids");
            };
            indices.extend_from_slice(ids);
            match own_weights {
                Some(Some(own)) => weights.extend_from_slice(own),
                Some(None) => panic!("bags of feature {at} lie beyond their weights"),
                // Weight 1 leaves every bit of a row as it is.
                None if is_weighted => weights.resize(indices.len(), 1.0),
                None => {}
            }
        }
    }
    let weights = is_weighted.then_some(&weights[..]);
    let bags = Bags::new(&indices, &offsets, weights, plan.asked.len())?;
    let mut out = vec![0.0; plan.layout.output_len(&bags)];
    look_up(source, &plan, &bags, &mut out)?;
    let mut rest = &out[..];
    for query in queries.iter_mut() {
        let matrix = query.matrix.get_mut();
        let (own, after) = rest.split_at(matrix.len());
        matrix.copy_from_slice(own);
        rest = after;
    }
    assert!(rest.is_empty(), "{} elements of a joint answer have no request", rest.len());
    Ok(())
}
