//! Size and robustness figures of every crate, and the ceilings that they must not exceed.
//!
//! `cargo x count` prints the table. `cargo x tidy` refuses a crate that exceeds its line in
//! `ceilings.txt`; `cargo x count --set` writes that file anew, as long as no total rises.

mod ceilings;
mod masked;
mod measures;
mod table;

use std::path::Path;

use super::{load, File, Finding};

/// Prints the figures of every crate.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    print!("{}", table::Table::of(&load(root)?));
    Ok(())
}

/// Prints every place that the columns `masked`, `exits` and `tuples` count.
pub(crate) fn list(root: &Path) -> Result<(), String> {
    for file in load(root)? {
        for (line, what) in measures::places(&file) {
            println!("{}:{line}: {what}", file.path);
        }
    }
    Ok(())
}

/// Lowers the ceilings to what the crates have today, or moves allowance between crates.
#[expect(clippy::disallowed_methods, reason = "a file of the source tree, kept by git")]
pub(crate) fn set(root: &Path) -> Result<(), String> {
    let files = load(root)?;
    let (path, text) = ceilings::renew(&files, &table::Table::of(&files))?;
    std::fs::write(root.join(&path), text).map_err(|error| format!("{path}: {error}"))?;
    println!("wrote {path}");
    Ok(())
}

/// Refuses crates above their ceilings.
pub(super) fn check(files: &[File]) -> Vec<Finding> {
    ceilings::check(files, &table::Table::of(files))
}
