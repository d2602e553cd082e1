//! Compiles the hand-overs of `tierbed-core` as they are, and with one thing wrong in each copy.
//!
//! Their files name threads' tools only through `super::sync`, so inside this crate they become
//! models. A mistake is a piece of text and what stands in its place.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// File, name of the copy, what it says, what it says wrongly.
const MISTAKES: [(&str, &str, &str, &str); 12] = [
    (
        "desk",
        "desk_give_wakes_nobody",
        "drop(state);\n        self.changed.notify_all();",
        "drop(state);",
    ),
    (
        "desk",
        "desk_deliver_wakes_nobody",
        "done = Some(done);\n        self.changed.notify_all();",
        "done = Some(done);",
    ),
    (
        "desk",
        "desk_close_wakes_nobody",
        "is_closed = true;\n        self.changed.notify_all();",
        "is_closed = true;",
    ),
    (
        "desk",
        "desk_desert_wakes_nobody",
        "is_deserted = true;\n        self.changed.notify_all();",
        "is_deserted = true;",
    ),
    ("desk", "desk_without_last_word", "drop(last_word)", "std::mem::forget(last_word)"),
    ("desk", "desk_sleeps_after_looking", "state = self.changed.wait(state)", SLEEP_LATER),
    (
        "desk",
        "desk_wait_sees_the_end_first",
        "return Ok(done);\n",
        "return if state.is_deserted { Err(Deserted) } else { Ok(done) };\n",
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
];

const SLEEP_LATER: &str =
    "drop(state);\n            state = self.lock();\n            state = self.changed.wait(state)";

/// Returns a module of this name with the text of `source`.
fn module(name: &str, source: &str) -> Result<String, Box<dyn Error>> {
    let mut text = format!("/// {name}\n#[allow(missing_docs, dead_code)]\npub mod {name} {{\n");
    // A module's own text cannot begin with inner documentation.
    for line in source.lines().filter(|line| !line.starts_with("//!")) {
        writeln!(text, "{line}")?;
    }
    text.push_str("}\n");
    Ok(text)
}

#[expect(clippy::disallowed_methods, reason = "a build output, not data")]
fn main() -> Result<(), Box<dyn Error>> {
    let sources = Path::new("../tierbed-core/src/handover");
    let mut text = String::new();
    for file in ["desk", "queue"] {
        let path = sources.join(file).with_extension("rs");
        println!("cargo::rerun-if-changed={}", path.display());
        let source = fs::read_to_string(&path)?;
        text.push_str(&module(file, &source)?);
        for (_, name, right, wrong) in MISTAKES.iter().filter(|mistake| mistake.0 == file) {
            if !source.contains(right) {
                return Err(format!("{name}: {} no longer says: {right}", path.display()).into());
            }
            text.push_str(&module(name, &source.replace(right, wrong))?);
        }
    }
    let out = env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?;
    Ok(fs::write(Path::new(&out).join("handovers.rs"), text)?)
}
