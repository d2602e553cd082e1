//! Fork safety: handles that remember the process that made them.
//!
//! `fork` copies memory and one thread. Other threads are gone, with whatever they were about to
//! do and the mutexes they held; a ring belongs to the parent; and every open file is open twice,
//! so that a lock on it outlives its taker. Whoever forks (the workers of a `DataLoader`, above
//! all) knows nothing of it. So the three rules here:
//!
//! * [`Owned`]: what belongs to the process that made it. A child gets an error, and its dropping
//!   the copy does nothing: no join, no flush, no commit.
//! * [`PerProcess`]: what every process makes anew for itself.
//! * [`hold_open`]: files that a child must not have. They are closed in it before anything else
//!   runs there.
//!
//! A handler of `pthread_atfork` counts forks and closes those files. Processes made without
//! handlers (`vfork`, `posix_spawn`) run another program next, which closes them too.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};

use tierbed_core::{Error, ErrorKind, Result};

/// Forks between the first process of all and this one, as far as anybody watched.
static FORK_COUNT: AtomicU64 = AtomicU64::new(0);
/// Held while a fork is under way, so that nothing done under it is ever half done in a child.
static FILES: Mutex<Files> = Mutex::new(Files { next: 0, open: BTreeMap::new() });

#[derive(Debug)]
struct Files {
    next: u64,
    open: BTreeMap<u64, File>,
}

thread_local! {
    static FORKING: Cell<Option<MutexGuard<'static, Files>>> = const { Cell::new(None) };
}

fn files() -> MutexGuard<'static, Files> {
    // Every change of it is one call.
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let held = files();
    // A thread that is ending has no such place any more; then the fork is not waited for.
    let _ = FORKING.try_with(|forking| forking.set(Some(held)));
}

extern "C" fn after_fork_in_parent() {
    let _ = FORKING.try_with(Cell::take);
}

extern "C" fn after_fork_in_child() {
    FORK_COUNT.fetch_add(1, Ordering::Relaxed);
    let held = FORKING.try_with(Cell::take).ok().flatten();
    if let Some(mut held) = held {
        // Closed, not unlocked: a lock is the parent's for as long as the parent has it.
        held.open.clear();
    }
}

/// Watches forks from now on.
fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handlers are functions of this library, which stays loaded, and touch
        // statics and a place of the forking thread only.
        let code = unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_fork_in_parent),
                Some(after_fork_in_child),
            )
        };
        assert_eq!(code, 0, "no memory for the handlers of fork");
    });
}

/// Which process made a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    fork_count: u64,
    pid: u32,
}

impl Origin {
    /// Returns this process, which watches forks from then on.
    #[must_use]
    pub fn here() -> Self {
        watch();
        Self { fork_count: FORK_COUNT.load(Ordering::Relaxed), pid: std::process::id() }
    }

    /// Returns whether this is still that process. One load from memory.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.fork_count == FORK_COUNT.load(Ordering::Relaxed)
    }
}

/// A value of the process that made it; a forked child gets an error.
#[derive(Debug)]
pub struct Owned<T> {
    // Taken when dropped in a child alone.
    value: Option<T>,
    origin: Origin,
    what: &'static str,
    remedy: &'static str,
}

impl<T> Owned<T> {
    /// Keeps `value` for this process; errors in a child call it `what` and advise `remedy`.
    #[must_use]
    pub fn new(value: T, what: &'static str, remedy: &'static str) -> Self {
        Self { value: Some(value), origin: Origin::here(), what, remedy }
    }

    /// Returns whether this process made the value.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// Returns the value.
    ///
    /// # Errors
    /// `Closed` in a process that was forked from the one that made the value.
    pub fn get(&self) -> Result<&T> {
        self.if_here().ok_or_else(|| forked(self.what, self.origin, self.remedy))
    }

    fn if_here(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_here())
    }
}

impl<T> Owned<Mutex<T>> {
    /// Waits for the value, after asking whose it is: a thread that is not here may hold it.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn lock(&self) -> Result<MutexGuard<'_, T>> {
        // What a panic leaves behind is for the value to know.
        Ok(self.get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            // Its threads are not here, its mutexes may be held for ever, its files are the
            // parent's business.
            std::mem::forget(self.value.take());
        }
    }
}

fn forked(what: &str, origin: Origin, remedy: &str) -> Error {
    Error::new(ErrorKind::Closed, format!("{what} belongs to the process this one was forked from"))
        .with("owner_pid", origin.pid)
        .with("pid", std::process::id())
        .with("remedy", remedy)
}

/// A value that every process has of its own: the first asker of a forked child makes it anew.
///
/// The child never touches what the parent had, which is leaked in it.
#[derive(Debug)]
pub struct PerProcess<T> {
    value: Owned<T>,
    in_child: OnceLock<Box<Self>>,
}

impl<T> PerProcess<T> {
    /// Keeps `value` for this process.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { value: Owned::new(value, "this value", "make it anew"), in_child: OnceLock::new() }
    }

    /// Returns this process's value, made by `make` when there is none yet. `make` must be quick
    /// and must not fork or ask for another such value: no fork happens meanwhile.
    pub fn get_or_make(&self, make: impl Fn() -> T) -> &T {
        let mut at = self;
        loop {
            if let Some(value) = at.value.if_here() {
                return value;
            }
            at = match at.in_child.get() {
                Some(next) => next,
                None => at.add(&make),
            };
        }
    }

    fn add(&self, make: impl Fn() -> T) -> &Self {
        // A fork in the middle of this would leave the child a place that is never filled.
        let _no_fork = files();
        self.in_child.get_or_init(|| Box::new(Self::new(make())))
    }
}

/// A mutex whose value a forked child has a copy of, unless a thread of the parent held it at that
/// very instant.
#[derive(Debug)]
pub struct ForkMutex<T> {
    /// Who is next, among the threads of this process.
    turn: PerProcess<Mutex<()>>,
    value: Mutex<T>,
}

/// Access to the value of a [`ForkMutex`].
#[derive(Debug)]
pub struct ForkGuard<'a, T> {
    // Given back before the turn is.
    value: MutexGuard<'a, T>,
    _turn: MutexGuard<'a, ()>,
}

impl<T> ForkMutex<T> {
    /// Keeps `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { turn: PerProcess::new(Mutex::new(())), value: Mutex::new(value) }
    }

    /// Waits for the value.
    ///
    /// # Errors
    /// `Closed` in a child whose parent was changing the value when it forked.
    pub fn lock(&self) -> Result<ForkGuard<'_, T>> {
        let turn = self.turn.get_or_make(Mutex::default);
        let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Threads of this process have it in turns. Held now, it is held by one that did not come
        // along.
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(
                    ErrorKind::Closed,
                    "another thread was using it when this process was forked",
                )
                .with("remedy", "fork when nobody uses it, or make it in the worker"));
            }
        };
        Ok(ForkGuard { value, _turn: turn })
    }
}

impl<T> std::ops::Deref for ForkGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> std::ops::DerefMut for ForkGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// A file that this process keeps open and no forked child has. Dropping it closes the file.
#[derive(Debug)]
pub struct HeldFile {
    number: u64,
    before_close: fn(&File),
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        // Numbers are given once, so that in a child, where all were closed, there is none.
        let file = files().open.remove(&self.number);
        if let Some(file) = file {
            (self.before_close)(&file);
        }
    }
}

/// Opens a file by `open` that no forked child shall have; `before_close` is called when it is
/// given back, in the process that opened it alone.
///
/// # Errors
/// Those of `open`, which runs while no fork can happen.
pub fn hold_open(before_close: fn(&File), open: impl FnOnce() -> Result<File>) -> Result<HeldFile> {
    watch();
    let mut held = files();
    let file = open()?;
    let number = held.next;
    held.next += 1;
    held.open.insert(number, file);
    Ok(HeldFile { number, before_close })
}
