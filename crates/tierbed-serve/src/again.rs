//! Futures that wake themselves while they are polled: polled again at once.
//!
//! The machinery of HTTP does so for each body that it hands over. The runtime would take that for
//! work that others could do, and wake another thread for every request.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Nobody polls: whoever wakes, wakes the task.
const AT_REST: u8 = 0;
/// The future is polled.
const POLLED: u8 = 1;
/// The future was woken while it was polled.
const WOKEN: u8 = 2;
/// Polls in a row, before other tasks have their turn.
const POLLS_MAX: usize = 4;

/// Polls a future, as often as it wakes itself.
#[derive(Debug)]
pub(crate) struct Again {
    shared: Arc<Shared>,
    waker: Waker,
}

#[derive(Debug)]
struct Shared {
    state: AtomicU8,
    task: Mutex<Waker>,
}

impl Again {
    pub(crate) fn new() -> Self {
        let task = Mutex::new(Waker::noop().clone());
        let shared = Arc::new(Shared { state: AtomicU8::new(AT_REST), task });
        Self { waker: Waker::from(Arc::clone(&shared)), shared }
    }

    /// Polls `future` for the task of `cx`.
    pub(crate) fn poll<F: Future>(
        &self,
        mut future: Pin<&mut F>,
        cx: &Context<'_>,
    ) -> Poll<F::Output> {
        self.shared.set_task(cx.waker());
        let mut own = Context::from_waker(&self.waker);
        for _ in 0..POLLS_MAX {
            self.shared.state.store(POLLED, Ordering::SeqCst);
            let polled = future.as_mut().poll(&mut own);
            let was_woken = self.shared.state.swap(AT_REST, Ordering::SeqCst) == WOKEN;
            if polled.is_ready() || !was_woken {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Shared {
    fn set_task(&self, waker: &Waker) {
        // A waker is whole after every statement.
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        task.clone_from(waker);
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let (polled, order) = (POLLED, Ordering::SeqCst);
        match self.state.compare_exchange(polled, WOKEN, order, order) {
            // Whoever polls it will do so again.
            Ok(_) | Err(WOKEN) => {}
            Err(_) => {
                let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
                task.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Polls a future that wakes itself `times` often; returns its polls, and wakes of the task.
    fn polled(times: usize) -> (usize, usize) {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let (again, mut polls) = (Again::new(), 0);
        let future = pin!(poll_fn(|cx| {
            polls += 1;
            if polls <= times {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        }));
        assert!(again.poll(future, &Context::from_waker(&waker)).is_pending());
        (polls, woken.0.load(Ordering::SeqCst))
    }

    #[test]
    fn who_wakes_itself_is_polled_again_and_wakes_nobody() {
        assert_eq!(polled(0), (1, 0));
        assert_eq!(polled(1), (2, 0));
        assert_eq!(polled(3), (4, 0));
        assert_eq!(polled(100), (POLLS_MAX, 1), "others have their turn");
    }

    #[test]
    fn who_is_woken_later_wakes_its_task() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let (again, mut kept) = (Again::new(), None);
        let mut future = pin!(poll_fn(|cx| {
            kept = Some(cx.waker().clone());
            Poll::<()>::Pending
        }));
        let cx = Context::from_waker(&waker);
        assert!(again.poll(future.as_mut(), &cx).is_pending());
        kept.unwrap().wake();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn no_wake_of_another_thread_is_lost() {
        for _ in 0..200 {
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&woken));
            let (again, mut polls) = (Again::new(), 0);
            let mut waking = None;
            let future = pin!(poll_fn(|cx| {
                polls += 1;
                let own = cx.waker().clone();
                waking.get_or_insert_with(|| std::thread::spawn(move || own.wake()));
                Poll::<()>::Pending
            }));
            assert!(again.poll(future, &Context::from_waker(&waker)).is_pending());
            waking.unwrap().join().unwrap();
            let woken = woken.0.load(Ordering::SeqCst);
            assert_eq!(polls + woken, 2, "polled again, or its task woken");
        }
    }
}
