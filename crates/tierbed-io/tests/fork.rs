//! Locks, handles and mutexes in a forked child.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::{mpsc, Arc};

use tierbed_core::{ErrorKind, Result};
use tierbed_io::process::{ForkMutex, Owned, PerProcess};
use tierbed_io::{Folder, FsFolder, HeldFolder};

/// Forks; returns the exit code of the child, which is that of `work`. The child ends at once: it
/// has but one thread of the test's many.
fn in_child(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `work` and ends without returning into the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let code = work();
        // SAFETY: ends the process, nothing else.
        unsafe { libc::_exit(code) };
    }
    ended(pid)
}

fn ended(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for the child just made and writes to a local.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child ended by a signal: {status}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_lock_is_given_back_at_once_though_a_child_lives() {
    let place = tempfile::tempdir().unwrap();
    let folder = FsFolder::open(place.path()).unwrap();
    let lock = folder.lock().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the child waits for a pipe and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(writer);
        let mut byte = 0u8;
        // SAFETY: reads a byte to a local, then ends the process.
        unsafe {
            libc::read(reader.as_raw_fd(), (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    drop(lock);
    drop(folder.lock().expect("the child does not hold the folder"));
    drop((reader, writer));
    assert_eq!(ended(pid), 0);
}

#[test]
fn a_child_that_drops_a_lock_leaves_it_with_its_parent() {
    let place = tempfile::tempdir().unwrap();
    let folder = FsFolder::open(place.path()).unwrap();
    let lock = folder.lock().unwrap();
    let mut copy = Some(&lock);
    let code = in_child(|| {
        // A bitwise copy is what the child has.
        // SAFETY: the original is in memory of the child too, and is never dropped there.
        drop(copy.take().map(|lock| unsafe { std::ptr::read(lock) }));
        // And what it opens now has the number of the file that was closed.
        let other = std::fs::File::create(place.path().join("other")).unwrap();
        i32::from(other.sync_all().is_err())
    });
    assert_eq!(code, 0);
    let error = folder.lock().expect_err("the parent has it");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("in this process already"), "{error}");
    drop(lock);
    drop(folder.lock().unwrap());
}

#[test]
fn a_process_that_only_inherited_the_lock_is_told_from_its_dead_taker() {
    let place = tempfile::tempdir().unwrap();
    let folder = FsFolder::open(place.path()).unwrap();
    let held = std::fs::File::create(place.path().join("LOCK")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let dead = Command::new("true").spawn().unwrap();
    let dead_pid = dead.id();
    assert!(dead.wait_with_output().unwrap().status.success());
    (&held).write_all(dead_pid.to_string().as_bytes()).unwrap();
    let error = folder.lock().expect_err("somebody has it").to_string();
    assert!(error.contains(&format!("{dead_pid}, which is no process here")), "{error}");
}

#[test]
fn who_holds_a_folder_shares_its_lock_and_nobody_comes_in_between() {
    let place = tempfile::tempdir().unwrap();
    let folder = Arc::new(FsFolder::open(place.path()).unwrap());
    let held: Arc<dyn Folder> = Arc::new(HeldFolder::of(folder.clone()).unwrap());
    for _ in 0..2 {
        drop(held.lock().unwrap());
        assert_eq!(folder.lock().expect_err("still held").kind(), ErrorKind::Closed);
    }
    let last = held.lock().unwrap();
    drop(held);
    assert!(folder.lock().is_err());
    drop(last);
    drop(folder.lock().unwrap());
}

struct Loud;

impl Drop for Loud {
    fn drop(&mut self) {
        // SAFETY: ends the child that must not come here.
        unsafe { libc::_exit(9) };
    }
}

#[test]
fn what_is_owned_is_refused_and_leaked_in_a_child() {
    let mut owned = Some(Owned::new(Loud, "a store", "use it where it was opened"));
    let code = in_child(|| {
        let told = owned.as_ref().unwrap().get().map(drop).map_err(|error| {
            let text = error.to_string();
            let parent = std::os::unix::process::parent_id().to_string();
            error.kind() == ErrorKind::Closed && text.contains(&parent) && text.contains("a store")
        });
        drop(owned.take());
        i32::from(told != Err(true))
    });
    assert_eq!(code, 0);
    assert!(owned.as_ref().unwrap().get().is_ok());
    std::mem::forget(owned);
}

#[test]
fn every_process_has_its_own_and_a_grandchild_too() {
    let value = PerProcess::new(1);
    assert_eq!(*value.get_or_make(|| 5), 1);
    let code = in_child(|| {
        let mine = *value.get_or_make(|| 2);
        let again = *value.get_or_make(|| 3);
        10 * mine + again + in_child(|| *value.get_or_make(|| 100))
    });
    assert_eq!(code, 122);
    assert_eq!(*value.get_or_make(|| 5), 1);
}

#[test]
fn a_mutex_held_by_another_thread_at_the_fork_is_an_error_and_no_wait() {
    let mutex = Arc::new(ForkMutex::new(7));
    let read = |mutex: &ForkMutex<i32>| -> Result<i32> { mutex.lock().map(|value| *value) };
    assert_eq!(in_child(|| read(&mutex).unwrap_or(99)), 7);
    let (held, is_held) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let thread = std::thread::spawn({
        let mutex = Arc::clone(&mutex);
        move || {
            let mut value = mutex.lock().unwrap();
            *value = 8;
            held.send(()).unwrap();
            may_go_on.recv().unwrap();
        }
    });
    is_held.recv().unwrap();
    assert_eq!(in_child(|| read(&mutex).map_or(99, |_| 1)), 99);
    go_on.send(()).unwrap();
    thread.join().unwrap();
    assert_eq!(in_child(|| read(&mutex).unwrap_or(99)), 8);
}
