//! Work on the requests that Triton hands over at once.

use std::panic::{catch_unwind, AssertUnwindSafe};

use tierbed_serve::{HostedAnswer, HostedRequest};

use crate::failure::{Failure, Result};
use crate::ffi::{log_error, now_ns, Instance, Request, Response, Times};
use crate::model::Model;

/// Answers of requests, in order, and when their lookup began and ended.
pub(crate) struct Answered {
    answers: Vec<Result<HostedAnswer>>,
    times: Times,
}

/// Looks all requests up as one. Nothing is sent yet: they are still Triton's.
pub(crate) fn answer(model: &Model, requests: &[Request]) -> Answered {
    let begun_ns = now_ns();
    let mut good = Vec::with_capacity(requests.len());
    let mut take = |request| {
        good.push(read(model, request)?);
        Ok(())
    };
    let read: Vec<Result<()>> = requests.iter().map(&mut take).collect();
    let looks_ns = now_ns();
    let mut answers = model.hosted.answer(good).into_iter();
    let answers = read.into_iter().map(|read| {
        read?;
        let Some(answer) = answers.next() else { panic!("a request has no answer") };
        Ok(answer?)
    });
    let answers = answers.collect();
    Answered { answers, times: Times { begun_ns, looks_ns, found_ns: now_ns() } }
}

fn read(model: &Model, request: &Request) -> Result<HostedRequest> {
    let outputs = request.outputs()?;
    // Who names none gets all from Triton.
    let takes_all = outputs.len() >= model.outputs.len();
    Ok(HostedRequest {
        inputs: request.inputs()?,
        outputs: if takes_all { Vec::new() } else { outputs },
        takes_all,
        pooling: request.word("pooling")?,
        output_dtype: request.word("output_dtype")?,
    })
}

/// Sends the answers, tells Triton's statistics of them, and gives the requests back. Never fails:
/// what cannot be sent is written to Triton's log.
pub(crate) fn settle(
    instance: Instance,
    model: &Model,
    requests: Vec<Request>,
    answered: Answered,
) {
    let Answered { answers, times } = answered;
    let mut batch_size = 0;
    for (request, answer) in requests.into_iter().zip(answers) {
        let sample_count = answer.as_ref().map_or(0, HostedAnswer::sample_count);
        let is_answered = match respond(model, &request, answer) {
            Ok(is_answered) => is_answered,
            Err(failure) => {
                log_error(&failure.message);
                false
            }
        };
        if is_answered {
            batch_size += if model.is_batched { sample_count } else { 1 };
        }
        let told = instance.report(&request, is_answered, times);
        for failure in [told, request.release()].into_iter().filter_map(Result::err) {
            log_error(&failure.message);
        }
    }
    if batch_size > 0 {
        if let Err(failure) = instance.report_batch(batch_size, times) {
            log_error(&failure.message);
        }
    }
}

/// Sends rows, or why there are none; returns whether it were rows.
fn respond(model: &Model, request: &Request, answer: Result<HostedAnswer>) -> Result<bool> {
    let response = Response::new(request)?;
    let filling = || answer.and_then(|answer| fill(model, &response, &answer));
    let filled = catch_unwind(AssertUnwindSafe(filling))
        .unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
    let is_answered = filled.is_ok();
    response.send(filled.err().as_ref())?;
    Ok(is_answered)
}

fn fill(model: &Model, response: &Response, answer: &HostedAnswer) -> Result<()> {
    response.tell("generation", answer.generation())?;
    // Features that are not pooled have an output more where a request pools them.
    let is_known = |name| model.outputs.iter().any(|known| known.name == name);
    for output in answer.outputs().filter(|output| is_known(output.name())) {
        let mut room = response.output(&output, answer.datatype())?;
        output.for_each_piece(|piece| room.append(piece));
    }
    Ok(())
}
