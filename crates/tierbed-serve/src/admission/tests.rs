use std::collections::BTreeMap;

use tierbed_core::env::SplitMix64;

use super::*;

const RULE: Rule = Rule { queue_us_max: 50_000, requests_max: 100 };
const FREE: Found = Found { request_count: 0, wait_us: 0 };

fn arrival(left_us: u64, priority: Priority) -> Arrival {
    Arrival { left_us, priority }
}

#[test]
fn each_priority_fills_its_part_of_the_queue() {
    for (priority, count, wait_us) in
        [(Priority::High, 100, 50_000), (Priority::Normal, 90, 45_000), (Priority::Low, 50, 25_000)]
    {
        let arrival = arrival(1_000_000, priority);
        let full = Found { request_count: count, ..FREE };
        let last = Found { request_count: count - 1, wait_us };
        let slow = Found { wait_us: wait_us + 1, ..FREE };
        let verdicts = [FREE, last, full, slow].map(|found| admit(RULE, found, arrival));
        use Verdict::{Admitted, Full, Slow};
        assert_eq!(verdicts, [Admitted, Admitted, Full, Slow], "{priority:?}");
    }
}

#[test]
fn a_request_waits_a_part_of_its_own_time_at_most() {
    let found = Found { wait_us: 8_000, ..FREE };
    let verdict = |left_us| admit(RULE, found, arrival(left_us, Priority::High));
    assert_eq!([0, 9_000, 10_000].map(verdict), [Verdict::Late, Verdict::Slow, Verdict::Admitted]);
}

#[test]
fn a_single_place_is_for_everybody() {
    let rule = Rule { requests_max: 1, ..RULE };
    assert_eq!(admit(rule, FREE, arrival(1, Priority::Low)), Verdict::Admitted);
}

#[test]
fn a_free_thread_takes_what_waits_at_once() {
    let long = Some(Busy { since_us: 0, predicted_us: 1_000_000 });
    assert_eq!(wait_us(0, &[long, None], 100), 0);
    assert_eq!(wait_us(600, &[long, None], 100), 600);
    assert_eq!(wait_us(600, &[None, None], 100), 300);
    assert_eq!(wait_us(0, &[long], 400_000), 600_000);
    // 999,900 us of one thread are over before the other one is free.
    assert_eq!(wait_us(1_000_100, &[long, None], 100), 1_000_000);
}

#[test]
fn work_that_is_late_stays_late_for_as_long_again() {
    let busy = Some(Busy { since_us: 0, predicted_us: 1_000 });
    assert_eq!([1_000, 1_500, 9_000].map(|now_us| wait_us(0, &[busy], now_us)), [0, 500, 8_000]);
}

#[test]
fn a_pace_forgets_a_bad_moment() {
    let mut pace = Pace::default();
    assert_eq!(pace.predict_us(1_000), 0);
    pace.learn(5_000_000, 1_000);
    assert_eq!(pace.predict_us(1_000), 5_000_000);
    for _ in 0..200 {
        pace.learn(10, 1_000);
    }
    assert!(pace.predict_us(1_000) < 20, "{}", pace.predict_us(1_000));
}

/// A server of some threads on a simulated clock: work of one kind, batches of what waits.
struct Simulated {
    threads: Vec<Option<Working>>,
    /// By deadline, then number: when it came.
    waiting: BTreeMap<(u64, u64), u64>,
    pace: Pace,
    told: Told,
}

struct Working {
    busy: Busy,
    until_us: u64,
    /// Deadlines of the requests of its batch.
    deadlines: Vec<u64>,
}

#[derive(Debug, Default)]
struct Told {
    good: u64,
    late: u64,
    refused: u64,
    wait_us_max: u64,
}

/// Microseconds that a batch takes: a part for the batch, and one for each request.
const BATCH_US: u64 = 60;
const EACH_US: u64 = 100;
/// Most requests of a simulated batch.
const BATCH_MAX: usize = 64;
/// Cost of a simulated request.
const COST: u64 = 1_000;

impl Simulated {
    fn new(thread_count: usize) -> Self {
        let threads = (0..thread_count).map(|_| None).collect();
        let (pace, told) = (Pace::default(), Told::default());
        Self { threads, waiting: BTreeMap::new(), pace, told }
    }

    /// Ends the work whose time has come, and gives free threads the next.
    fn advance(&mut self, now_us: u64) {
        loop {
            let ending = self.threads.iter().flatten().map(|working| working.until_us).min();
            let Some(until_us) = ending.filter(|until_us| *until_us <= now_us) else { break };
            for at in 0..self.threads.len() {
                let ended = self.threads[at].take_if(|working| working.until_us == until_us);
                let Some(Working { busy, deadlines, .. }) = ended else { continue };
                self.pace.learn(until_us - busy.since_us, COST * deadlines.len() as u64);
                for deadline_us in deadlines {
                    match until_us <= deadline_us {
                        true => self.told.good += 1,
                        false => self.told.late += 1,
                    }
                }
            }
            self.start(until_us);
        }
    }

    fn start(&mut self, now_us: u64) {
        for at in 0..self.threads.len() {
            let idle = self.threads.iter().filter(|thread| thread.is_none()).count();
            let share = self.waiting.len().div_ceil(idle.max(1)).min(BATCH_MAX);
            if self.threads[at].is_some() || share == 0 {
                continue;
            }
            let deadlines = self.take(share, now_us);
            let count = deadlines.len() as u64;
            if count > 0 {
                let predicted_us = self.pace.predict_us(COST * count);
                let busy = Busy { since_us: now_us, predicted_us };
                let until_us = now_us + BATCH_US + EACH_US * count;
                self.threads[at] = Some(Working { busy, until_us, deadlines });
            }
        }
    }

    fn take(&mut self, share: usize, now_us: u64) -> Vec<u64> {
        let mut deadlines: Vec<u64> = Vec::new();
        while deadlines.len() < share {
            // The batch ends before its first deadline.
            let batch_us = self.pace.predict_us(COST * (deadlines.len() as u64 + 1));
            if deadlines.first().is_some_and(|first_us| now_us + batch_us > *first_us) {
                break;
            }
            let Some(((deadline_us, _), came_us)) = self.waiting.pop_first() else { break };
            if deadline_us <= now_us {
                self.told.late += 1;
                continue;
            }
            self.told.wait_us_max = self.told.wait_us_max.max(now_us - came_us);
            deadlines.push(deadline_us);
        }
        deadlines
    }

    fn arrive(&mut self, rule: Option<Rule>, number: u64, now_us: u64, time_us: u64) {
        self.advance(now_us);
        let busy: Vec<_> = self
            .threads
            .iter()
            .map(|working| working.as_ref().map(|working| working.busy))
            .collect();
        let queued_us = self.pace.predict_us(COST * self.waiting.len() as u64);
        let working: usize = self.threads.iter().flatten().map(|one| one.deadlines.len()).sum();
        let found = Found {
            request_count: (self.waiting.len() + working) as u64,
            wait_us: wait_us(queued_us, &busy, now_us),
        };
        let arrival = arrival(time_us, Priority::Normal);
        let verdict = rule.map_or(Verdict::Admitted, |rule| admit(rule, found, arrival));
        if verdict != Verdict::Admitted {
            self.told.refused += 1;
            return;
        }
        self.waiting.insert((now_us + time_us, number), now_us);
        self.start(now_us);
    }
}

/// Requests at random times, on average one each `gap_us`, for two simulated seconds.
fn run(rule: Option<Rule>, gap_us: f64, time_us: u64, seed: u64) -> Told {
    let mut numbers = SplitMix64::new(seed);
    let mut server = Simulated::new(2);
    let mut now = 0.0;
    for number in 0.. {
        now -= (1.0 - numbers.unit_f64()).ln() * gap_us;
        if now > 2e6 {
            break;
        }
        server.arrive(rule, number, now as u64, time_us);
    }
    server.advance(u64::MAX);
    server.told
}

const WIDE: Rule = Rule { queue_us_max: 50_000, requests_max: 10_000 };

/// Two threads take 50 us of time for a request, and less than 1 us for its batch.
const SATURATED_GAP_US: f64 = 51.0;

#[test]
fn admission_keeps_goodput_at_twice_capacity() {
    for seed in 0..8 {
        for time_us in [20_000, 60_000, 1_000_000] {
            let best = run(Some(WIDE), SATURATED_GAP_US, time_us, seed);
            let told = run(Some(WIDE), SATURATED_GAP_US / 2.0, time_us, seed);
            assert!(told.good * 10 >= best.good * 9, "{time_us}: {told:?} after {best:?}");
            assert!(told.late * 100 <= told.good, "{time_us}: {told:?}");
            assert!(told.refused * 3 >= told.good, "{time_us}: {told:?}");
            // A batch more than the rule allows: one that was taken when the request came.
            let longest_us =
                WIDE.queue_us_max.min(time_us) + 2 * (BATCH_US + BATCH_MAX as u64 * EACH_US);
            assert!(told.wait_us_max <= longest_us, "{time_us}: {told:?}");
        }
    }
}

#[test]
fn without_admission_all_are_late_at_twice_capacity() {
    let told = run(None, SATURATED_GAP_US / 2.0, 20_000, 1);
    let best = run(None, SATURATED_GAP_US * 2.0, 20_000, 1);
    assert!(told.late > told.good && best.late == 0, "{told:?} after {best:?}");
}

#[test]
fn nobody_is_refused_at_half_of_capacity() {
    for seed in 0..8 {
        let told = run(Some(WIDE), SATURATED_GAP_US * 2.0, 20_000, seed);
        assert_eq!((told.refused, told.late), (0, 0), "{told:?}");
    }
}
