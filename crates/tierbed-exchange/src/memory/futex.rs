//! Futex waits on a shared word, also across processes.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `found`, at most for `longest`; may wake earlier.
pub(crate) fn wait_while(word: &AtomicU32, found: u32, longest: Duration) {
    let time = libc::timespec {
        tv_sec: longest.as_secs().try_into().unwrap_or(1),
        tv_nsec: libc::c_long::from(longest.subsec_nanos().cast_signed()),
    };
    // SAFETY: the word is a live, aligned 4-byte atomic and `time` lives until the call returns.
    // The call only reads both. Errors (changed, interrupted, timed out) mean: look again.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, found, &raw const time);
    }
}

/// Wakes all that sleep on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: the word is a live, aligned 4-byte atomic; waking reads nothing but its address.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
