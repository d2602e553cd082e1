//! A value that many lease and one swaps: whoever swaps it waits for the leases of the old one.
//!
//! A swap has five steps. Between the first and the fourth the value says that something is about
//! to change, so that work on what changes meets nobody who does not know of it:
//!
//! ```text
//! value ─▶ 1 announced ─▶ 2 wait for leases of value ─▶ 3 work ─▶ 4 next ─▶ 5 wait once more
//! ```
//!
//! A lease is short: it ends before the caller waits for anything of whoever swaps.

use std::ops::Deref;
use std::sync::{Arc, PoisonError};

use super::sync::{Condvar, Mutex, MutexGuard};

/// Joins many readers and one writer. See the module documentation.
#[derive(Debug)]
pub struct Leases<T> {
    state: Mutex<State<T>>,
    returned: Condvar,
}

#[derive(Debug)]
struct State<T> {
    current: Held<T>,
    /// Values before it that are still leased.
    former: Vec<Held<T>>,
}

#[derive(Debug)]
struct Held<T> {
    number: u64,
    value: Arc<T>,
    lease_count: usize,
}

/// A value, until dropped.
#[derive(Debug)]
pub struct Lease<T> {
    leases: Arc<Leases<T>>,
    number: u64,
    /// Some until dropped.
    value: Option<Arc<T>>,
}

impl<T> Leases<T> {
    /// Lends `value` from now on.
    #[must_use]
    pub fn new(value: T) -> Self {
        let current = Held { number: 0, value: Arc::new(value), lease_count: 0 };
        Self { state: Mutex::new(State { current, former: Vec::new() }), returned: Condvar::new() }
    }

    /// Leases what is lent now.
    #[must_use]
    pub fn lease(self: &Arc<Self>) -> Lease<T> {
        let mut state = self.lock();
        let current = &mut state.current;
        current.lease_count += 1;
        let (number, value) = (current.number, Some(Arc::clone(&current.value)));
        Lease { leases: Arc::clone(self), number, value }
    }

    /// Swaps the value for `next` in five steps; `work` is done while `announced` is lent. Where it
    /// fails, what was lent before is lent again. One swap at a time, by no holder of a lease.
    ///
    /// # Errors
    /// That of `work`.
    pub fn swap<E>(
        &self,
        announced: T,
        work: impl FnOnce() -> Result<(), E>,
        next: T,
    ) -> Result<(), E> {
        let (number, before) = self.put(Arc::new(announced));
        self.wait(number);
        let worked = work();
        let next = if worked.is_ok() { Arc::new(next) } else { Arc::clone(&before) };
        let (number, announced) = self.put(next);
        self.wait(number);
        // Nobody else has them any more: what they hold is freed here.
        drop((before, announced));
        worked
    }

    /// Lends `value`; returns the value before and its number.
    fn put(&self, value: Arc<T>) -> (u64, Arc<T>) {
        let mut state = self.lock();
        let held = Held { number: state.current.number + 1, value, lease_count: 0 };
        let before = std::mem::replace(&mut state.current, held);
        let (number, value) = (before.number, Arc::clone(&before.value));
        if before.lease_count > 0 {
            state.former.push(before);
        }
        (number, value)
    }

    /// Waits until nobody leases a former value.
    fn wait(&self, number: u64) {
        let mut state = self.lock();
        while state.former.iter().any(|held| held.number == number) {
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Leases a value once more that somebody leases.
    fn again(&self, number: u64) {
        let mut state = self.lock();
        let State { current, former } = &mut *state;
        let mut held = [current].into_iter().chain(former);
        let Some(held) = held.find(|held| held.number == number) else {
            panic!("value {number} is leased and not held");
        };
        held.lease_count += 1;
    }

    fn end(&self, number: u64) {
        let mut state = self.lock();
        if state.current.number == number {
            state.current.lease_count -= 1;
            return;
        }
        let Some(at) = state.former.iter().position(|held| held.number == number) else {
            panic!("a lease of value {number} ends twice");
        };
        let Some(held) = state.former.get_mut(at) else { panic!("no former value {at}") };
        held.lease_count -= 1;
        if held.lease_count == 0 {
            // Whoever swaps still has it, so nothing is freed under the lock.
            state.former.swap_remove(at);
            drop(state);
            self.returned.notify_all();
        }
    }

    // The state is whole after every statement, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Lease<T> {
    /// Tells whether this is a lease of `leases`.
    #[must_use]
    pub fn is_of(&self, leases: &Arc<Leases<T>>) -> bool {
        Arc::ptr_eq(&self.leases, leases)
    }
}

impl<T> Clone for Lease<T> {
    fn clone(&self) -> Self {
        self.leases.again(self.number);
        let (leases, value) = (Arc::clone(&self.leases), self.value.clone());
        Self { leases, number: self.number, value }
    }
}

impl<T> Deref for Lease<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.value else { panic!("a lease is used after its end") };
        value
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        // Before it counts as ended: who waits for it may be the last to have the value.
        self.value = None;
        self.leases.end(self.number);
    }
}
