//! Futures that one task waits for.
//!
//! Differs from a set of tasks: nothing is handed to another thread, which would have to be woken.

use std::future::{poll_fn, Future};
use std::pin::Pin;
use std::task::Poll;

/// See the module documentation. Few: each is polled when any of them is woken.
#[derive(Debug)]
pub(super) struct Together<F>(Vec<Pin<Box<F>>>);

impl<F> Default for Together<F> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<F: Future> Together<F> {
    pub(super) fn push(&mut self, future: F) {
        self.0.push(Box::pin(future));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits for the next one that is done; `None`: all are.
    pub(super) async fn next(&mut self) -> Option<F::Output> {
        poll_fn(|cx| {
            let polled = self.0.iter_mut().enumerate().find_map(|(at, future)| {
                match future.as_mut().poll(cx) {
                    Poll::Ready(done) => Some((at, done)),
                    Poll::Pending => None,
                }
            });
            match polled {
                Some((at, done)) => {
                    drop(self.0.swap_remove(at));
                    Poll::Ready(Some(done))
                }
                None if self.0.is_empty() => Poll::Ready(None),
                None => Poll::Pending,
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn the_next_one_is_that_which_is_done_first() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut together = Together::default();
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| oneshot::channel()).unzip();
        receivers.into_iter().for_each(|receiver| together.push(receiver));
        let mut found = Vec::new();
        for (sender, told) in senders.into_iter().rev().zip(7..) {
            sender.send(told).unwrap();
            found.push(runtime.block_on(together.next()).unwrap().unwrap());
        }
        assert_eq!(found, [7, 8, 9]);
        assert!(together.is_empty() && runtime.block_on(together.next()).is_none());
    }
}
