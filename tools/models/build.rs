//! Compiles the hand-overs of `tierbed-core`, and the locks of `tierbed-cache`, as they are, and
//! with one thing wrong in each copy.
//!
//! Their files name threads' tools only through `super::sync`, so inside this crate they become
//! models. A mistake is a piece of text and what stands in its place.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// File, name of the copy, what it says, what it says wrongly.
const MISTAKES: [(&str, &str, &str, &str); 23] = [
    (
        "rendezvous",
        "rendezvous_give_wakes_nobody",
        "drop(state);\n        self.changed.notify_all();",
        "drop(state);",
    ),
    (
        "rendezvous",
        "rendezvous_deliver_wakes_nobody",
        "done = Some(done);\n        self.changed.notify_all();",
        "done = Some(done);",
    ),
    (
        "rendezvous",
        "rendezvous_close_wakes_nobody",
        "is_closed = true;\n        self.changed.notify_all();",
        "is_closed = true;",
    ),
    (
        "rendezvous",
        "rendezvous_disconnect_wakes_nobody",
        "is_disconnected = true;\n        self.changed.notify_all();",
        "is_disconnected = true;",
    ),
    (
        "rendezvous",
        "rendezvous_without_last_word",
        "drop(last_word)",
        "std::mem::forget(last_word)",
    ),
    (
        "rendezvous",
        "rendezvous_sleeps_after_looking",
        "state = self.changed.wait(state)",
        SLEEP_LATER,
    ),
    (
        "rendezvous",
        "rendezvous_wait_sees_the_end_first",
        "return Ok(done);\n",
        "return if state.is_disconnected { Err(Disconnected) } else { Ok(done) };\n",
    ),
    (
        "queue",
        "queue_push_wakes_nobody",
        "push_back(job);\n        self.changed.notify_one();",
        "push_back(job);",
    ),
    (
        "queue",
        "queue_close_wakes_nobody",
        "is_closed = true;\n        self.changed.notify_all();",
        "is_closed = true;",
    ),
    ("queue", "queue_close_wakes_one", "self.changed.notify_all()", "self.changed.notify_one()"),
    (
        "queue",
        "queue_closes_with_work_left",
        "if let Some(job) = state.jobs.pop_front() {",
        "if let Some(job) = state.jobs.pop_front().filter(|_| !state.is_closed) {",
    ),
    ("queue", "queue_sleeps_after_looking", "state = self.changed.wait(state)", SLEEP_LATER),
    ("leases", "leases_without_first_wait", "self.wait(number);\n        let worked", "let worked"),
    ("leases", "leases_without_last_wait", "self.wait(number);\n        //", "//"),
    (
        "leases",
        "leases_work_before_announcing",
        LEASES_FIRST,
        "let worked = work();\n        let (number, before) = self.put(Arc::new(announced));",
    ),
    // What is pending is forgotten before it is replaced.
    (
        "leases",
        "leases_serve_the_next_before_work",
        LEASES_WORK,
        "let (number, announced) = self.put(Arc::new(next));\n        let worked = work();",
    ),
    (
        "leases",
        "leases_end_wakes_nobody",
        "drop(state);\n            self.returned.notify_all();",
        "drop(state);",
    ),
    ("leases", "leases_count_nothing", "if before.lease_count > 0 {", "if false {"),
    // Whoever works on a copy of the handle works without the lock.
    ("parts", "parts_unlock_too_early", GIVEN, UNLOCKED),
    ("parts", "parts_never_unlock", GIVEN, NEVER_UNLOCKED),
    ("parts", "parts_skip_the_busy", WAITING, "None"),
    ("parts", "parts_claim_the_busy", "if left == 0 {", "if true {"),
    (
        "parts",
        "parts_of_keys_by_call",
        "visits.part_of.extend(hashes.map(|hash| self.part(hash)));",
        "visits.part_of.extend((0u8..).zip(hashes).map(|(at, _)| at % self.part_count as u8));",
    ),
];

const GIVEN: &str = "Some((parts, visits.of_parts(lock.first, lock.end)))";
const UNLOCKED: &str =
    "Some((Box::new(parts.clone()), { drop(parts); visits.of_parts(lock.first, lock.end) }))";
const NEVER_UNLOCKED: &str = "std::mem::forget(parts);
            Some((wait_for(&lock.parts), visits.of_parts(lock.first, lock.end)))";
const WAITING: &str = "self.locks.get(at).map(|lock| (at, wait_for(&lock.parts)))";

const LEASES_FIRST: &str = "let (number, before) = self.put(Arc::new(announced));
        self.wait(number);
        let worked = work();";
const LEASES_WORK: &str = "let worked = work();
        let next = if worked.is_ok() { Arc::new(next) } else { Arc::clone(&before) };
        let (number, announced) = self.put(next);";

const SLEEP_LATER: &str =
    "drop(state);\n            state = self.lock();\n            state = self.changed.wait(state)";

/// Returns a module of this name with the text of `source`.
fn module(name: &str, source: &str) -> Result<String, Box<dyn Error>> {
    let mut text = format!(
        "/// {name}\n#[allow(missing_docs, dead_code, unused_variables)]\npub mod {name} {{\n"
    );
    // A module's own text cannot begin with inner documentation.
    for line in source.lines().filter(|line| !line.starts_with("//!")) {
        writeln!(text, "{line}")?;
    }
    text.push_str("}\n");
    Ok(text)
}

/// The files that become models, by folder.
const SOURCES: [(&str, &[&str]); 2] =
    [("tierbed-core/src/handover", HANDOVERS), ("tierbed-cache/src/shard", &["parts"])];
const HANDOVERS: &[&str] = &["rendezvous", "queue", "leases"];

#[expect(clippy::disallowed_methods, reason = "a build output, not data")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut text = String::new();
    for (folder, file) in SOURCES.iter().flat_map(|(f, names)| names.iter().map(move |n| (f, n))) {
        let path = Path::new("../../crates").join(folder).join(file).with_extension("rs");
        println!("cargo::rerun-if-changed={}", path.display());
        // What is open to the module around it is open to the tests here.
        let source = fs::read_to_string(&path)?.replace("pub(super) ", "pub ");
        text.push_str(&module(file, &source)?);
        for (_, name, right, wrong) in MISTAKES.iter().filter(|mistake| mistake.0 == *file) {
            if !source.contains(right) {
                return Err(format!("{name}: {} no longer says: {right}", path.display()).into());
            }
            let mistaken = source.replace(right, wrong);
            // A mistake may need to copy what the right file never does.
            let mistaken = mistaken.replace("impl<T> Parts", "impl<T: Clone> Parts");
            text.push_str(&module(name, &mistaken)?);
        }
    }
    let out = env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?;
    Ok(fs::write(Path::new(&out).join("handovers.rs"), text)?)
}
