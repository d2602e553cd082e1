//! The budget is a promise about real memory: training runs inside a cgroup of budget + 64 MiB,
//! page cache included.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const BUDGET_BYTES: u64 = 16 << 20;
const SLACK_BYTES: u64 = 64 << 20;

/// A memory cgroup of its own; removed on drop.
struct Cgroup {
    folder: PathBuf,
}

impl Cgroup {
    /// Makes a cgroup limited to `limit_bytes`, in version 1 or 2; the reason when it cannot.
    fn new(limit_bytes: u64) -> Result<Self, String> {
        let name = format!("tierbed-test-{}", std::process::id());
        let roots = [
            (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            (Path::new("/sys/fs/cgroup"), "memory.max"),
        ];
        let mut reasons = Vec::new();
        for (root, limit_file) in roots {
            let folder = root.join(&name);
            if let Err(cause) = fs::create_dir(&folder) {
                reasons.push(format!("{}: {cause}", folder.display()));
                continue;
            }
            let cgroup = Self { folder };
            match fs::OpenOptions::new().write(true).open(cgroup.folder.join(limit_file)).and_then(
                |mut file| std::io::Write::write_all(&mut file, limit_bytes.to_string().as_bytes()),
            ) {
                Ok(()) => return Ok(cgroup),
                Err(cause) => reasons.push(format!("{limit_file}: {cause}")),
            }
        }
        Err(reasons.join("; "))
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let procs = self.folder.join("cgroup.procs");
        Command::new("sh")
            .arg("-c")
            .arg("echo $$ > \"$0\" && exec \"$@\"")
            .arg(procs)
            .arg(env!("CARGO_BIN_EXE_train-pattern"))
            .args(arguments)
            .output()
            .unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

#[test]
fn training_fits_in_its_budget_and_64_mib() {
    let cgroup = match Cgroup::new(BUDGET_BYTES + SLACK_BYTES) {
        Ok(cgroup) => cgroup,
        Err(reason) => {
            println!("skipped: memory cgroups are not writable here ({reason})");
            return;
        }
    };
    for (io_engine, window) in [("auto", "0"), ("pread", "0"), ("auto", "16")] {
        let scratch = tempfile::tempdir().unwrap();
        let store = scratch.path().join("store");
        let budget = BUDGET_BYTES.to_string();
        let output = cgroup.run(&[
            "--store",
            store.to_str().unwrap(),
            "--budget-bytes",
            &budget,
            "--io-engine",
            io_engine,
            "--window",
            window,
            "--rows",
            "1000000",
            "--steps",
            "24",
        ]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", output.status);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["table_bytes"].as_u64().unwrap() > 25 * BUDGET_BYTES, "{report:#}");
        assert!(report["dram_peak_bytes"].as_u64().unwrap() <= BUDGET_BYTES, "{report:#}");
        assert!(report["buffer"]["evicted_count"].as_u64().unwrap() > 10_000, "{report:#}");
    }
}

#[test]
fn a_budget_too_small_is_refused_with_the_minimum() {
    let scratch = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_train-pattern"))
        .args(["--store", scratch.path().to_str().unwrap(), "--budget-bytes", "100000"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("raise dram_budget to at least"), "{error}");
}
