//! Does the tree keep the rules of STYLE.md? Each rule is a small scan over the sources.
//!
//! The scans are rough on purpose (no parser, no dependencies): they know comments, strings and
//! brackets, and that is enough. A rule that cannot be checked by a few lines is not here.

mod arrows;
pub(crate) mod count;
mod documents;
mod prose;
mod python_scan;
mod rust_scan;
mod sizes;
mod sources;
mod unsafe_code;
mod words;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) use arrows::package_name;
use python_scan::PythonLine;
use rust_scan::RustLine;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    line: usize,
    message: String,
}

impl Finding {
    fn new(file: &File, line: usize, message: impl Into<String>) -> Self {
        Self { path: file.path.clone(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// A text file of the tree, scanned once.
pub(crate) struct File {
    /// Path from the root, with `/`.
    path: String,
    text: String,
    scan: Scan,
}

/// What is known of a file's lines.
enum Scan {
    Rust(Vec<RustLine>),
    Python(Vec<PythonLine>),
    Markdown,
    Other,
}

impl File {
    fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let scan = match path.rsplit('.').next() {
            Some("rs") => Scan::Rust(rust_scan::scan(&text)),
            Some("py" | "pyi") => Scan::Python(python_scan::scan(&text)),
            Some("md") => Scan::Markdown,
            _ => Scan::Other,
        };
        Self { path, text, scan }
    }

    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }
}

/// Checks every rule and prints the findings.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let files = load(root)?;
    let mut findings = document_findings(&files);
    findings.extend(arrows::check(&files));
    findings.extend(count::check(&files));
    let mut notes = Vec::new();
    for file in &files {
        findings.extend(sizes::check(file));
        findings.extend(words::check(file));
        findings.extend(sources::check(file));
        findings.extend(unsafe_code::check(file));
        notes.extend(sizes::note(file));
    }
    for note in notes {
        println!("note: {note}");
    }
    report(&files, findings)
}

/// Checks only the rules about documents.
pub(crate) fn run_docs(root: &Path) -> Result<(), String> {
    let files = load(root)?;
    let findings = document_findings(&files);
    report(&files, findings)
}

fn document_findings(files: &[File]) -> Vec<Finding> {
    let mut findings = documents::check_links(files);
    findings.extend(documents::check_reachable(files));
    findings.extend(files.iter().flat_map(prose::check));
    findings
}

fn report(files: &[File], mut findings: Vec<Finding>) -> Result<(), String> {
    findings.sort();
    if findings.is_empty() {
        println!("tidy: {} files, no findings", files.len());
        return Ok(());
    }
    for finding in &findings {
        println!("{finding}");
    }
    Err(format!("tidy: {} findings in {} files", findings.len(), files.len()))
}

/// Reads every file that is written by hand.
fn load(root: &Path) -> Result<Vec<File>, String> {
    let mut files = Vec::new();
    for path in files_under(root)? {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let name = relative.to_string_lossy().replace('\\', "/");
        // Files that are not text (figures, fixtures) still count as targets of links.
        let bytes = fs::read(&path).map_err(|error| format!("{name}: {error}"))?;
        files.push(File::new(name, String::from_utf8(bytes).unwrap_or_default()));
    }
    Ok(files)
}

/// Lists the files under `folder`, sorted, leaving out what was built or fetched.
pub(crate) fn files_under(folder: &Path) -> Result<Vec<PathBuf>, String> {
    const BUILT: [&str; 8] = [
        "target",
        "build",
        "demo-out",
        "bench-out",
        "__pycache__",
        "shared",
        "corpus",
        "artifacts",
    ];
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for entry in entries {
            let entry = entry.map_err(|e| format!("{}: {e}", folder.display()))?;
            let kind = entry.file_type().map_err(|e| format!("{}: {e}", folder.display()))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_private = name.starts_with('.') && name != ".ci" && name != ".cargo";
            if kind.is_dir() && !is_private && !BUILT.contains(&name.as_str()) {
                folders.push(entry.path());
            } else if kind.is_file() && !name.ends_with(".so") {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}
