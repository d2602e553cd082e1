//! Remedies of errors: none tells to destroy what cannot be made again.
//!
//! All remedies are read from the sources. One that removes something is on the list below, with
//! the test that does what it says and finds the rows as they were.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it reads the sources"
)]

#[path = "common/auto.rs"]
mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::Run;
use tierbed_core::OptimizerKind;
use tierbed_io::{Folder, FsFolder};
use tierbed_train::window::Backend;
use tierbed_train::{drop_checkpoint, kept_checkpoints, Order, OrderConfig};

/// A remedy that removes something, and the test that follows it: its file and its name.
struct Followed {
    remedy: &'static str,
    file: &'static str,
    test: &'static str,
}

const HERE: &str = "tierbed-train/tests/remedies.rs";
const KEPT: &str = "tierbed-train/tests/window_kept_checkpoints.rs";
const PLANS: &str = "tierbed-train/src/planned/plan/tests.rs";
const BUILDS: &str = "tierbed-placement/src/resume.rs";

const FOLLOWED: [Followed; 10] = [
    Followed {
        remedy: "open the store once, which finishes it, then drop the checkpoint",
        file: HERE,
        test: "a_checkpoint_that_is_being_restored_is_dropped_when_that_is_finished",
    },
    Followed {
        remedy: "drop it first, or choose another name",
        file: KEPT,
        test: "names_and_folders_are_checked",
    },
    Followed {
        remedy: "drop this checkpoint, or bring the file back from a copy",
        file: KEPT,
        test: "going_back_to_a_damaged_checkpoint_leaves_the_last_one_as_it_is",
    },
    Followed {
        remedy: "open the store at its last checkpoint, or drop the kept one",
        file: KEPT,
        test: "going_back_to_a_damaged_checkpoint_leaves_the_last_one_as_it_is",
    },
    Followed {
        remedy: "raise disk_quota, or drop a checkpoint",
        file: KEPT,
        test: "kept_checkpoints_count_against_the_disk_quota",
    },
    Followed {
        remedy: "delete it and make the plan again",
        file: PLANS,
        test: "an_unfinished_plan_that_is_damaged_is_made_again_as_its_remedy_says",
    },
    Followed {
        remedy: "delete the files of the unfinished plan and make it again",
        file: PLANS,
        test: "an_unfinished_plan_that_is_damaged_is_made_again_as_its_remedy_says",
    },
    Followed {
        remedy: "name another plan, or delete this one to make it again",
        file: PLANS,
        test: "a_plan_of_another_origin_is_refused_and_kept",
    },
    Followed {
        remedy: "delete the file: its step is done again",
        file: BUILDS,
        test: "damaged_files_and_those_of_something_else_are_told_by_name",
    },
    Followed {
        remedy: "delete the file, or name another folder",
        file: BUILDS,
        test: "damaged_files_and_those_of_something_else_are_told_by_name",
    },
];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// The first string of `text`, which may go on over lines.
fn first_string(text: &str) -> Option<String> {
    let (_, text) = text.split_once('"')?;
    let mut words = String::new();
    let mut chars = text.chars();
    loop {
        match chars.next()? {
            '"' => return Some(words),
            '\\' => match chars.next()? {
                '\n' => {
                    let rest = chars.as_str().trim_start();
                    chars = rest.chars();
                }
                escaped => words.push(escaped),
            },
            one => words.push(one),
        }
    }
}

/// Every remedy of the sources, with the files it is in.
fn remedies() -> BTreeMap<String, Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(crates()).unwrap() {
        let src = entry.unwrap().path().join("src");
        if src.is_dir() {
            sources(&src, &mut files);
        }
    }
    let mut all: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for rest in text.split("\"remedy\",").skip(1) {
            all.entry(first_string(rest).unwrap()).or_default().push(file.clone());
        }
    }
    all
}

#[test]
fn who_follows_a_remedy_destroys_nothing() {
    let all = remedies();
    assert!(all.len() > 150, "{} remedies were found", all.len());
    let removes = ["delete", "remove", "drop ", "overwrite", "wipe", "clear", "empty the"];
    for (remedy, files) in &all {
        let is_named = |one: &Followed| one.remedy == remedy.as_str();
        let is_listed = FOLLOWED.iter().any(is_named);
        let removes = removes.iter().any(|word| remedy.contains(word));
        assert_eq!(removes, is_listed, "{remedy:?} in {files:?}: which test follows it?");
    }
    for Followed { remedy, file, test } in FOLLOWED {
        assert!(all.contains_key(remedy), "no error has the remedy {remedy:?} any more");
        let text = std::fs::read_to_string(crates().join(file)).unwrap();
        assert!(text.contains(&format!("fn {test}(")), "{test} is not in {file}");
    }
}

#[test]
fn a_checkpoint_that_is_being_restored_is_dropped_when_that_is_finished() {
    let run = Run { budget_bytes: 32 << 20, ..Run::pooled(OptimizerKind::Adagrad) };
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let config = OrderConfig { backend: Some(Backend::File), ..run.config(Order::Auto, None) };
    let mut engine = run.open(Some(folder.clone()), &config).unwrap();
    run.step(&mut engine, 0).unwrap();
    engine.single().unwrap().keep_checkpoint("old", &[]).unwrap();
    let old = run.records(&mut engine).unwrap();
    run.step(&mut engine, 1).unwrap();
    run.checkpoint(&mut engine, 2).unwrap();
    drop(engine);
    folder.write_atomic("RESTORE", b"old").unwrap();
    let refused = drop_checkpoint(scratch.path(), "old").unwrap_err();
    assert!(refused.to_string().contains("open the store once"), "{refused}");
    let mut engine = run.open(Some(folder), &config).unwrap();
    assert!(run.records(&mut engine).unwrap() == old);
    drop(engine);
    drop_checkpoint(scratch.path(), "old").unwrap();
    assert!(kept_checkpoints(scratch.path()).unwrap().is_empty());
}
