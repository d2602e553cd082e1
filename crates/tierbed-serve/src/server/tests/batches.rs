//! Requests that are looked up together.

use tierbed_core::env::SplitMix64;
use tokio::sync::oneshot;

use super::*;
use crate::answer::Refusal;
use crate::batch::run;
use crate::body::Held;
use crate::generation::Serving;
use crate::job::{Done, Job, Made, Stage, Waits, Work};
use crate::lookup::prepare;
use crate::spans::Steps;

type Answer = oneshot::Receiver<std::result::Result<Made, Refusal>>;

fn served(snapshot: Arc<Snapshot>) -> Service {
    super::service(&options(), snapshot, None, watch::channel(false).1).unwrap()
}

/// A lookup as the route makes it.
fn job(service: &Service, body: Vec<u8>) -> (Job, Answer) {
    let place = Arc::clone(&service.places).try_acquire_owned().unwrap();
    let (answer, made) = oneshot::channel();
    let (done, held) = (Done { place, answer }, service.buffers.hold_nothing());
    let body = body.into();
    let prepare = move |serving: &Serving<'_>, held: Held| {
        prepare(serving.source(), &serving.limits, &body, held, true)
    };
    let work = Work::Lookup(Waits::new(Stage::Received(held), prepare));
    let steps = Steps::default();
    let job = Job {
        route: "/v1/lookup",
        queued_us: 0,
        body_bytes: 0,
        deadline_us: u64::MAX,
        generation: None,
        work,
        steps,
        done,
    };
    (job, made)
}

/// Answers the bodies as one batch: bytes, or status and message.
fn answered(service: &Service, bodies: &[Vec<u8>]) -> Vec<std::result::Result<Vec<u8>, String>> {
    let (jobs, answers): (Vec<_>, Vec<_>) =
        bodies.iter().map(|body| job(service, body.clone())).unzip();
    run(service, jobs);
    let told = answers.into_iter().map(|mut answer| match answer.try_recv().unwrap() {
        Ok(made) => Ok(made.body.bytes.to_vec()),
        Err(refusal) => Err(format!("{}: {}", refusal.kind(), refusal.message())),
    });
    told.collect()
}

fn one_by_one(service: &Service, bodies: &[Vec<u8>]) -> Vec<std::result::Result<Vec<u8>, String>> {
    bodies.iter().flat_map(|body| answered(service, std::slice::from_ref(body))).collect()
}

/// A feature of a request: lengths of its bags, ids to draw from, and weights or none.
fn feature(
    name: &str,
    lengths: &[usize],
    ids: &[i64],
    is_weighted: bool,
) -> [(String, Dtype, Vec<u8>); 3] {
    let mut offsets = vec![0_i64];
    offsets.extend(lengths.iter().scan(0, |end, length| {
        *end += *length as i64;
        Some(*end)
    }));
    let count: usize = lengths.iter().sum();
    let values: Vec<i64> = ids.iter().cycle().take(count).copied().collect();
    let weights: Vec<f32> = values.iter().map(|id| *id as f32 / 7.0 - 20.0).collect();
    let name = |part: &str| format!("{name}.{part}");
    let last = match is_weighted {
        true => (name("weights"), Dtype::F32, f32s(&weights)),
        false => (name("offsets"), Dtype::I64, i64s(&offsets)),
    };
    [
        (name("values"), Dtype::I64, i64s(&values)),
        (name("offsets"), Dtype::I64, i64s(&offsets)),
        last,
    ]
}

fn body(parts: &[(String, Dtype, Vec<u8>)]) -> Vec<u8> {
    let mut named: Vec<_> =
        parts.iter().map(|(name, dtype, bytes)| (name.as_str(), *dtype, bytes.clone())).collect();
    named.dedup_by(|one, other| one.0 == other.0);
    tensors(&named)
}

/// Makes up requests.
struct Numbers(SplitMix64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn ids(&mut self, bound: u64) -> Vec<i64> {
        (0..=self.below(20)).map(|_| self.below(bound) as i64).collect()
    }

    /// A request for `user`, `item.v2`, or both; some ids of `user` are no rows.
    fn request(&mut self) -> Vec<u8> {
        let lengths: Vec<usize> = (0..self.below(4)).map(|_| self.below(5) as usize).collect();
        let user = feature("user", &lengths, &self.ids(504), self.below(2) == 0);
        let item = feature("item.v2", &lengths, &self.ids(1000), self.below(2) == 0);
        match self.below(3) {
            0 => body(&user),
            1 => body(&item),
            _ => body(&[user, item].concat()),
        }
    }
}

#[test]
fn a_batch_has_the_bits_of_single_requests() {
    for seed in 0..60 {
        let mut numbers = Numbers(SplitMix64::new(seed));
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let pooling = ["sum", "mean", "none"][seed as usize % 3];
        let serving = json!({"features": [
            {"name": "user", "table": "user", "pooling": pooling},
            {"name": "item.v2", "table": "item.v2", "pooling": "sum"}]});
        let service = served(snapshot_in(&folder, Some(&serving.to_string())));
        let bodies: Vec<_> = (0..=numbers.below(12)).map(|_| numbers.request()).collect();
        let together = answered(&service, &bodies);
        assert_eq!(together, one_by_one(&service, &bodies), "seed {seed}");
        assert_eq!(service.places.available_permits(), service.limits.requests_max);
    }
}

#[test]
fn a_bad_page_and_a_bad_request_fail_those_who_need_them() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    let service = served(snapshot);
    let item = |ids: &[i64]| body(&feature("item.v2", &[ids.len()], ids, false));
    // The first page to fill up is one of the wider table; id 1 has its initial value.
    let bodies = [item(&[897, 1]), item(&[0, 3]), item(&[1000]), item(&[1]), b"none".to_vec()];
    let told = answered(&service, &bodies);
    let kinds: Vec<_> = told
        .iter()
        .map(|told| told.as_ref().map_or_else(|told| told.split(':').next().unwrap(), |_| "right"))
        .collect();
    assert_eq!(kinds, ["right", "corruption", "invalid", "right", "invalid"]);
    assert_eq!(told, one_by_one(&service, &bodies));
}

#[test]
fn no_work_is_done_for_a_client_that_has_left() {
    let service = served(snapshot());
    let (mut job, answer) = job(&service, Vec::new());
    let stage = Stage::Received(service.buffers.hold_nothing());
    job.work = Work::Lookup(Waits::new(stage, |_, _| panic!("work for no client")));
    drop(answer);
    run(&service, vec![job]);
    assert_eq!(service.places.available_permits(), service.limits.requests_max);
    assert!(service.faults.recent(&service.snapshot()).is_empty());
}
