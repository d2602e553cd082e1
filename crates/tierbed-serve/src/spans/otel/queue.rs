//! Requests that have ended, on their way to the thread that sends their spans.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;
use tokio::time::{timeout, Instant};

use super::record::Ended;
use super::settings::Sizes;

/// What became of spans.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    pub(super) sent: Counter,
    pub(super) dropped: Counter,
}

/// See the module documentation. Whoever puts a request in waits for nobody, and wakes the thread
/// only when a batch is full.
#[derive(Debug)]
pub(super) struct Queue {
    sizes: Sizes,
    pub(super) counts: Counts,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    ended: Vec<Ended>,
    span_count: usize,
    /// Once closed: until when what is left may be sent.
    closes: Option<Instant>,
}

/// What the thread takes.
pub(super) struct Taken {
    pub(super) ended: Vec<Ended>,
    pub(super) is_last: bool,
}

impl Queue {
    pub(super) fn new(sizes: Sizes, counts: Counts) -> Self {
        Self { sizes, counts, state: Mutex::default(), changed: Notify::new() }
    }

    /// Puts the spans of a request in; drops them where there is no room, and when it is closed.
    pub(super) fn push(&self, ended: Ended) {
        let span_count = ended.span_count();
        let mut state = self.lock();
        let before = state.span_count;
        let after = before + span_count;
        if state.closes.is_some() || after > self.sizes.queue_spans_max {
            drop(state);
            self.counts.dropped.inc_by(span_count as u64);
            return;
        }
        state.span_count = after;
        state.ended.push(ended);
        drop(state);
        // Waking it for each request would cost a system call.
        if (before..after).contains(&(self.sizes.batch_spans_max - 1)) {
            self.changed.notify_one();
        }
    }

    /// Wakes the thread: it sends what there is.
    pub(super) fn flush(&self) {
        self.changed.notify_one();
    }

    /// Takes no more; the rest may be sent for some time.
    pub(super) fn close(&self, time: Duration) {
        self.lock().closes.get_or_insert(Instant::now() + time);
        self.changed.notify_one();
    }

    /// Waits until a batch is full, or some time, or until it is told to; takes what there is.
    pub(super) async fn take(&self) -> Taken {
        // Either is a reason to send.
        let _ = timeout(self.sizes.delay, self.changed.notified()).await;
        let mut state = self.lock();
        state.span_count = 0;
        let ended = std::mem::take(&mut state.ended);
        Taken { ended, is_last: state.closes.is_some() }
    }

    /// Returns until when what is left may be sent, once it is closed.
    pub(super) fn closes(&self) -> Option<Instant> {
        self.lock().closes
    }

    // Requests and their number are whole after every statement but one, which cannot panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue, Method};

    use super::super::record::{Record, Steps};
    use super::*;
    use crate::origin::Origin;
    use crate::spans::{Call, Ending};

    /// A request that waited, and was looked up: three spans.
    fn ended() -> Ended {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let traced = [("traceparent".parse().unwrap(), HeaderValue::from_static(text))];
        let mut origin = Origin::new(&HeaderMap::from_iter(traced));
        let call = Call::Http { method: &Method::GET, path: "/", route: None };
        origin.steps = Steps::of(Record::new(call, &HeaderMap::new()));
        origin.steps.waits(2);
        origin.steps.looks_up(3, 1);
        let (status, refusal, is_encrypted) = (200, None, false);
        let ending = Ending { start_us: 1, end_us: 9, status, refusal, is_encrypted };
        Ended::new(&origin, ending, 1_000_000).unwrap()
    }

    fn queue(queue_spans_max: usize, batch_spans_max: usize) -> Queue {
        let delay = Duration::from_secs(600);
        let sizes = Sizes { queue_spans_max, batch_spans_max, delay };
        Queue::new(sizes, Counts::default())
    }

    fn taken(queue: &Queue) -> Taken {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(queue.take())
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_counted() {
        let queue = queue(8, 4);
        (0..5).for_each(|_| queue.push(ended()));
        assert_eq!(queue.counts.dropped.get(), 9, "two requests have six spans, three have none");
        let Taken { ended: found, is_last } = taken(&queue);
        assert_eq!((found.len(), is_last), (2, false), "a full batch is taken without delay");
        queue.push(ended());
        assert_eq!(queue.counts.dropped.get(), 9, "there is room again");
    }

    #[test]
    fn a_closed_queue_gives_what_it_has_and_takes_no_more() {
        let queue = queue(8, 8);
        queue.push(ended());
        queue.close(Duration::from_secs(1));
        queue.push(ended());
        let Taken { ended: found, is_last } = taken(&queue);
        assert_eq!((found.len(), is_last, queue.counts.dropped.get()), (1, true, 3));
        assert!(queue.closes().is_some());
    }
}
