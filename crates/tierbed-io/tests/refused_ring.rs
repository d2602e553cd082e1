//! The fallback where the kernel refuses io_uring, as in most containers.
//!
//! A filter on one thread answers `EPERM` to `io_uring_setup`, which is what Docker's default
//! profile does.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::sync::Arc;

use tierbed_core::ErrorKind;
use tierbed_io::{open_engine, EngineChoice, EngineOptions, MemoryDevice};
use tierbed_sim::conformance::check_device;

/// Makes `io_uring_setup` fail with `EPERM` on this thread, for good.
fn refuse_io_uring() -> std::io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut filter = [
        // Load the call's number; on equality fall through to the refusal, else skip it.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: u32::try_from(libc::SYS_io_uring_setup).expect("call number"),
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain values; the filter outlives the call, which copies it.
    let rc = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[test]
fn a_refused_ring_falls_back_and_says_why() {
    // The filter stays with the thread that sets it, so it gets one of its own.
    let story = std::thread::spawn(|| {
        if let Err(error) = refuse_io_uring() {
            println!("skipped: no system call filter here: {error}");
            return;
        }
        let mut options = EngineOptions { choice: EngineChoice::Auto, ..EngineOptions::default() };
        let mut engine = open_engine(&options).expect("auto always opens");
        let stats = engine.stats();
        assert_eq!(stats.engine, "pread_pool");
        assert_eq!(stats.fallback_reason, "io_uring_setup: Operation not permitted (EPERM)");
        check_device(engine.as_mut(), Arc::new(MemoryDevice::new("memory")), 1, 200);

        options.choice = EngineChoice::Uring;
        let error = open_engine(&options).err().expect("io_uring by name is refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("EPERM") && text.contains("`auto` or `pread`"), "{text}");
    });
    story.join().expect("the story holds");
}
