//! A bucket that was opened before a fork serves parent and child, each by its own connections.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use kit::{bucket_place, server};
use tierbed_remote::{Objects, When};

/// Runs `work` in a forked child, and returns what it says.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `work` and ends without returning into the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let is_fine = work();
        // SAFETY: ends the process, nothing else.
        unsafe { libc::_exit(i32::from(!is_fine)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made and writes to a local.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

fn holds(objects: &dyn Objects, name: &str, bytes: &[u8]) -> bool {
    objects.get(name, 99).is_ok_and(|found| found.is_some_and(|found| found.bytes == bytes))
}

#[test]
fn parent_and_child_ask_a_bucket_side_by_side() {
    if server().is_none() {
        return;
    }
    let objects = bucket_place().objects;
    objects.put("a", b"before", &When::Always).unwrap();
    for round in 0..3 {
        // The parent has connections by now, which the child must not speak on.
        assert!(holds(&*objects, "a", b"before"));
        let name = format!("of-child-{round}");
        let is_fine = in_child(|| {
            let put = objects.put(&name, b"child", &When::Absent);
            put.is_ok() && holds(&*objects, "a", b"before") && holds(&*objects, &name, b"child")
        });
        assert!(is_fine, "round {round}");
        assert!(holds(&*objects, "a", b"before") && holds(&*objects, &name, b"child"));
    }
}
