//! Batches: the lookups of several requests as one, and their predictions.
//!
//! Every request gets the bits it would get alone. Where a joint lookup fails, each of its queries
//! is asked again by itself: a bad page fails those who need it.

use std::cell::Cell;
use std::panic::{catch_unwind, AssertUnwindSafe};

use tierbed_snapshot::LookupStats;

use crate::answer::Refusal;
use crate::gateway::calling::Time;
use crate::generation::Serving;
use crate::job::{Done, Encode, Job, Made, Phases, Prepared, Work};
use crate::joint::{groups, look_up_elsewhere, Member};
use crate::predict;
use crate::query::Query;
use crate::routes::Service;
use crate::spans::Steps;

/// Queries of a request, answered or refused.
pub(crate) type Looked = Result<Vec<Query>, Refusal>;

/// A request between its preparation and its answer.
struct Begun {
    done: Done,
    held: crate::body::Held,
    encode: Encode,
    phases: Phases,
    result: Looked,
}

/// Works on jobs and answers them: those that want one generation together.
pub(crate) fn run(service: &Service, jobs: Vec<Job>) {
    let mut rest = jobs;
    while let Some(first) = rest.first() {
        let wanted = first.generation.clone();
        let (own, others) = rest.into_iter().partition(|job: &Job| job.generation == wanted);
        rest = others;
        run_in(service, wanted.as_deref(), own);
    }
}

/// Works on jobs and answers them, all from one generation.
fn run_in(service: &Service, wanted: Option<&str>, jobs: Vec<Job>) {
    let latest_us = jobs.iter().map(|job| job.deadline_us).max();
    let _time = Time::until(latest_us);
    let serving = match guarded(service, || service.serving(wanted)) {
        Ok(serving) => serving,
        Err(refusal) => {
            return jobs.into_iter().for_each(|job| job.done.send(Err(refusal.clone())));
        }
    };
    let (mut begun, mut noted, mut predictions) = (Vec::new(), Vec::<Steps>::new(), Vec::new());
    for job in jobs {
        let Job { route, queued_us, work, steps, done, .. } = job;
        let start_us = service.clock.now_us();
        let queue_us = start_us.saturating_sub(queued_us);
        service.metrics.waited(route, queue_us);
        steps.close(start_us);
        if done.is_closed() {
            continue;
        }
        match work {
            Work::Prediction(waits) => match guarded(service, || waits.prepared(&serving)) {
                Err(refusal) => done.send(Err(refusal)),
                Ok(prepared) => {
                    let input_us = service.clock.now_us().saturating_sub(start_us);
                    let sample_count = prepared.samples.count as u64;
                    let phases = Phases { queue_us, input_us, sample_count, ..Phases::default() };
                    predictions.push(predict::batch::Begun { done, phases, steps, prepared });
                }
            },
            Work::Lookup(lookup) => match guarded(service, || lookup.prepared(&serving)) {
                Err(refusal) => done.send(Err(refusal)),
                Ok(Prepared { queries, held, sample_count, encode, .. }) => {
                    let input_us = service.clock.now_us().saturating_sub(start_us);
                    let phases = Phases { queue_us, input_us, sample_count, ..Phases::default() };
                    begun.push(Begun { done, held, encode, phases, result: Ok(queries) });
                    noted.push(steps);
                }
            },
        }
    }
    predict::batch::run(&serving, predictions);
    if begun.is_empty() {
        return;
    }
    service.metrics.batch_requests.observe(begun.len() as f64);
    let start_us = service.clock.now_us();
    noted.iter().for_each(|steps| steps.looks_up(start_us, begun.len()));
    let default_rows: Vec<Cell<u64>> = begun.iter().map(|_| Cell::default()).collect();
    let mut all: Vec<_> = begun.iter_mut().map(|begun| &mut begun.result).collect();
    look_up_all(&serving, &mut all, |request, stats| {
        noted.get(request).into_iter().for_each(|steps| steps.found(stats));
        if serving.view.rows_elsewhere().is_some() {
            let rows = default_rows.get(request);
            rows.into_iter().for_each(|rows| rows.set(rows.get() + stats.rows_default));
        }
    });
    let end_us = service.clock.now_us();
    noted.iter().for_each(|steps| steps.close(end_us));
    let infer_us = end_us.saturating_sub(start_us);
    let rows = default_rows.iter().map(Cell::get);
    for (Begun { done, held, encode, mut phases, result }, rows) in begun.into_iter().zip(rows) {
        let start_us = service.clock.now_us();
        let body = result.and_then(|queries| guarded(service, || encode(queries)));
        phases.output_us = service.clock.now_us().saturating_sub(start_us);
        phases.infer_us = infer_us;
        phases.default_rows = rows;
        done.send(body.map(|body| Made { body, held, phases }));
    }
}

/// Runs one request's work: its panic is its own answer.
pub(crate) fn guarded<T>(
    service: &Service,
    work: impl FnOnce() -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(panic) => Err(service.panicked(&*panic)),
    }
}

/// Looks up the queries of all requests, as many together as there may be. `found` is told of each
/// request's lookups, which may be those of others, too.
pub(crate) fn look_up_all(
    serving: &Serving<'_>,
    all: &mut [&mut Looked],
    found: impl Fn(usize, &LookupStats),
) {
    let source = serving.source();
    let members = all.iter_mut().enumerate().flat_map(|(request, looked)| {
        let queries = Result::as_mut(looked).ok().into_iter().flatten();
        queries.map(move |query| Member { request, query })
    });
    let mut groups = groups(source, members);
    // Who has the rows elsewhere is asked once, for all groups.
    let is_elsewhere = source.snapshot.rows_elsewhere().is_some() && groups.len() > 1;
    if is_elsewhere {
        let look_up = AssertUnwindSafe(|| look_up_elsewhere(source, &mut groups));
        if let Some(stats) = catch_unwind(look_up).ok().and_then(Result::ok) {
            let members = groups.iter().flat_map(|group| &group.members);
            return members.for_each(|member| found(member.request, &stats));
        }
    }
    let mut failed = Vec::new();
    for mut group in groups {
        let has_company = group.members.len() > 1;
        let mut look_up = || catch_unwind(AssertUnwindSafe(|| group.look_up(source)));
        let joint = if has_company { look_up().ok().and_then(Result::ok) } else { None };
        if let Some(stats) = joint {
            group.members.iter().for_each(|member| found(member.request, &stats));
            continue;
        }
        // A lookup repeated has the same bits.
        for Member { request, query } in group.members {
            match guarded(serving, || Ok(query.look_up(source)?)) {
                Ok(stats) => found(request, &stats),
                Err(refusal) => failed.push((request, refusal)),
            }
        }
    }
    for (request, refusal) in failed {
        let Some(one) = all.get_mut(request) else { panic!("request {request} of no batch") };
        if one.is_ok() {
            **one = Err(refusal);
        }
    }
}
