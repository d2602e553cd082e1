//! Every system trains the same bits, and every command is answered.

use std::path::Path;

use serde_json::{json, Value};

use super::session::{Mode, Session};
use super::{serve, Job};

const BATCH_LEN: usize = 32;
const DIM: u32 = 4;

fn ask(commands: &[Value]) -> Vec<Value> {
    let input: Vec<u8> = commands.iter().flat_map(|c| format!("{c}\n").into_bytes()).collect();
    let mut output = Vec::new();
    serve(&input[..], &mut output).unwrap();
    let answers: Vec<Value> =
        output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(parse).collect();
    assert_eq!(answers.len(), commands.len());
    answers
}

fn parse(line: &[u8]) -> Value {
    serde_json::from_slice(line).unwrap()
}

fn prepare(folder: &Path) {
    let commands = [
        json!({ "do": "trace", "path": folder.join("trace"), "scale": 5e-5, "seed": 3 }),
        json!({
            "do": "plan", "trace": folder.join("trace"), "folder": folder.join("plan"),
            "batch_len": BATCH_LEN, "dim": DIM, "window_bytes": 20_000, "memory_bytes": 1 << 20,
        }),
    ];
    for answer in ask(&commands) {
        assert!(answer.get("error").is_none(), "{answer}");
    }
}

fn job(folder: &Path, system: &str, look_ahead_batches: usize) -> Job {
    Job {
        system: system.to_owned(),
        trace: folder.join("trace"),
        plan: Some(folder.join("plan")),
        folder: folder.join(format!("{system}-{look_ahead_batches}")),
        dim: DIM,
        batch_len: BATCH_LEN,
        dram_budget_bytes: if system == "forward" { 600_000 } else { 200_000 },
        look_ahead_batches,
        threads: 1,
        io_engine: "inline".to_owned(),
    }
}

#[test]
fn every_system_trains_the_same_bits_whatever_its_look_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    prepare(folder);
    let mut memory = Session::open(&job(folder, "memory", 0)).unwrap();
    let mut systems = vec![("forward", 0), ("file", 0), ("file", 2), ("file", 64)];
    systems.extend(["cold", "recdb", "plain_lsm", "hashdb", "mmap"].map(|system| (system, 12)));
    // RocksDB is not on every machine; the tests of `tierbed-compare` say so.
    if tierbed_compare::is_rocksdb_available().is_ok() {
        systems.push(("rocksdb", 12));
    }
    let open =
        |(system, look_ahead)| (system, Session::open(&job(folder, system, look_ahead)).unwrap());
    let mut sessions: Vec<_> = systems.into_iter().map(open).collect();
    for number in 0..60 {
        let answer = memory.run(number, 1, Mode::Train).unwrap();
        for (system, session) in &mut sessions {
            let found = session.run(number, 1, Mode::Train).unwrap();
            assert_eq!(found["row_updates"], answer["row_updates"]);
            let same = session.output().iter().zip(memory.output());
            let same = same.filter(|(a, b)| a.to_bits() == b.to_bits()).count();
            assert_eq!(same, memory.output().len(), "{system}, batch {number}");
            if number == 25 {
                assert!(session.checkpoint().unwrap()["seconds"].is_number());
            }
        }
    }
    for (system, session) in &mut sessions {
        let counters = session.checkpoint().unwrap()["counters"].clone();
        // What the kernel writes of a mapped file is not counted.
        let name = if *system == "mmap" { "rows_written" } else { "device_write_bytes" };
        assert!(counters[name].as_u64().unwrap() > 0, "{system}");
        assert!(session.run(3, 1, Mode::Train).is_err(), "{system} jumped back");
    }
}

#[test]
fn a_failed_command_is_answered_and_the_next_one_served() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    prepare(folder);
    let unknown = json!({
        "do": "open",
        "job": {
            "system": "abacus", "trace": folder.join("trace"),
            "folder": folder.join("abacus"), "dim": DIM, "batch_len": BATCH_LEN,
            "dram_budget_bytes": 400_000,
        },
    });
    let mut file = unknown.clone();
    file["job"]["system"] = "file".into();
    file["job"]["folder"] = folder.join("file").to_str().into();
    let mut again = file.clone();
    again["job"]["look_ahead_batches"] = 8.into();
    let run =
        |first: u64, mode: &str| json!({ "do": "run", "first": first, "count": 2, "mode": mode });
    let commands = [
        json!({ "do": "fly" }),
        run(0, "train"),
        unknown,
        file,
        run(0, "train"),
        run(2, "pass"),
        run(2, "train"),
        json!({ "do": "checkpoint" }),
        run(4, "dance"),
        again,
        run(4, "train"),
    ];
    let answers = ask(&commands);
    let is_error: Vec<bool> = answers.iter().map(|answer| answer.get("error").is_some()).collect();
    assert_eq!(is_error, [true, true, true, false, false, true, false, false, true, false, false]);
    assert_eq!(answers[2]["kind"], "invalid");
    assert_eq!(answers[4]["steps_us"].as_array().unwrap().len(), 2);
    assert_eq!(answers[5]["kind"], "unsupported");
    assert!(answers[6]["growth"]["train_cpu_ns"].as_u64().unwrap() > 0);
}
