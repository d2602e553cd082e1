//! A small snapshot, the program over it, and a client of plain bytes.
#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};
use tierbed_core::{Budget, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_snapshot::SnapshotWriter;

/// The program; `TIERBED_SERVER` in the environment names another build of it.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("TIERBED_SERVER")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_tierbed-server")), PathBuf::from)
}

/// Element `at` of a row, as [`write_snapshot`] writes it.
pub(crate) fn element(row: u64, at: u32) -> f32 {
    (row % 9973) as f32 + at as f32 / 64.0
}

/// Writes a snapshot of one table `item` into `folder`.
pub(crate) fn write_snapshot(folder: &Path, row_count: u64, dim: u32) {
    write_table(folder, "item", row_count, dim);
}

/// Writes a snapshot of one table of any name.
pub(crate) fn write_table(folder: &Path, name: &str, row_count: u64, dim: u32) {
    let schema = Schema::new(vec![TableSchema::plain(name, row_count, dim)]).unwrap();
    let budget = Budget::new(64 << 20);
    let out = Arc::new(FsFolder::create(folder).unwrap());
    let mut writer = SnapshotWriter::create(out, &schema, &budget).unwrap();
    let mut values = vec![0.0; dim as usize];
    for row in 0..row_count {
        for (at, value) in (0..).zip(&mut values) {
            *value = element(row, at);
        }
        writer.push(TableId(0), RowId(row), &values).unwrap();
    }
    // As publishers say when the training step committed.
    writer.attach("committed.json", br#"{"committed_at_ms": 1700000000000}"#).unwrap();
    writer.finish().unwrap();
}

/// The program with words, and no variables of this process's environment that it would read.
pub(crate) fn command(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TIERBED_") {
            command.env_remove(name);
        }
    }
    command.args(words).env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC");
    command
}

/// Runs the program to its end; returns its exit code and standard output and error.
pub(crate) fn run(words: &[&str]) -> (i32, String, String) {
    ended(&mut command(words))
}

pub(crate) fn ended(command: &mut Command) -> (i32, String, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// A server that answers. Dropping it kills it.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) line: String,
    /// From exec to the line that tells the address.
    pub(crate) started: Instant,
}

impl Running {
    /// Starts the program over `snapshot` on a free port and waits until it answers.
    pub(crate) fn start(snapshot: &Path, words: &[&str]) -> Self {
        let mut all = vec![snapshot.to_str().unwrap(), "--address", "127.0.0.1:0"];
        all.extend(words);
        Self::of(&mut command(&all))
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        let started = Instant::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Some(address) = line.split("://").nth(1) else {
            let mut told = String::new();
            child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
            panic!("the server did not start: {told}");
        };
        let address = address.split_whitespace().next().unwrap().to_owned();
        Self { child, address, line, started }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end; returns its status and what it told on standard error.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let mut told = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        (self.child.wait().unwrap(), told)
    }

    /// Asks; returns the status and the body.
    pub(crate) fn ask(&self, what: &str, lines: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!(
            "{what} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n{lines}Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path}"), "", "")
    }

    /// Looks up rows of `item`, a bag each.
    pub(crate) fn lookup(&self, rows: &[u64]) -> (u16, String) {
        let values = rows.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let offsets = (0..=rows.len()).map(|at| at.to_string()).collect::<Vec<_>>().join(",");
        let body = format!(
            "{{\"features\":{{\"item\":{{\"values\":[{values}],\"offsets\":[{offsets}]}}}}}}"
        );
        self.ask("POST /v1/lookup", "Content-Type: application/json\r\n", &body)
    }

    /// Looks up the sum of rows of `item`.
    pub(crate) fn sum(&self, rows: std::ops::Range<u64>) -> (u16, String) {
        let count = rows.end - rows.start;
        let values = rows.map(|row| row.to_string()).collect::<Vec<_>>().join(",");
        let body = format!(
            "{{\"features\":{{\"item\":{{\"values\":[{values}],\"offsets\":[0,{count}]}}}}}}"
        );
        self.ask("POST /v1/lookup", "Content-Type: application/json\r\n", &body)
    }

    /// Bytes of a line of the process's state, such as `VmRSS`.
    pub(crate) fn memory_bytes(&self, what: &str) -> u64 {
        let status = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find(|line| line.starts_with(what)).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib << 10
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
