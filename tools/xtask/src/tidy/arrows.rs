//! Arrows between crates: which crate may depend on which, exactly.
//!
//! The table is checked in both directions. A manifest must not name a crate that the table does
//! not allow; an allowed arrow that no manifest has, or that no source uses, is an error too. So
//! the table is always the true picture. What must never be reached, not even through others, is
//! said by [`NEVER`].

use std::collections::BTreeSet;

use super::{File, Finding, Scan};

/// A crate and the crates of this repository that it depends on.
struct Crate {
    name: &'static str,
    /// `[dependencies]`, without the prefix `tierbed-`.
    uses: &'static [&'static str],
    /// Optional ones, which a build of the product leaves out.
    may_use: &'static [&'static str],
    /// `[dev-dependencies]` beside them: tests, examples, benches.
    tests_use: &'static [&'static str],
}

impl Crate {
    fn allowed(&self, kind: Kind) -> &'static [&'static str] {
        match kind {
            Kind::Linked => self.uses,
            Kind::Optional => self.may_use,
            Kind::Tests => self.tests_use,
        }
    }
}

const fn row(
    name: &'static str,
    uses: &'static [&'static str],
    tests_use: &'static [&'static str],
) -> Crate {
    Crate { name, uses, may_use: &[], tests_use }
}

/// All crates, bottom first. ARCHITECTURE.md draws the same picture.
const CRATES: [Crate; 23] = [
    row("tierbed-core", &[], &[]),
    row("tierbed-kernels", &["core"], &[]),
    row("tierbed-io", &["core"], &["sim"]),
    row("tierbed-sim", &["core", "io"], &[]),
    // They compile files of the core and of the cache, not the crates.
    row("tierbed-models", &[], &[]),
    row("xtask", &[], &[]),
    row("tierbed-exchange", &["core", "kernels"], &["io"]),
    row("tierbed-data", &["core", "io"], &[]),
    row("tierbed-cache", &["core"], &[]),
    row("tierbed-remote", &["core", "io"], &["sim"]),
    row("tierbed-lab", &["core", "io", "data", "cache"], &["sim"]),
    row("tierbed-store", &["core", "io"], &["sim"]),
    row("tierbed-vocab", &["core"], &["store", "sim"]),
    row("tierbed-lsm", &["core", "io", "store"], &["sim"]),
    row("tierbed-compare", &["core", "io", "store"], &["sim"]),
    row("tierbed-snapshot", &["core", "io", "kernels", "cache", "vocab"], &["sim"]),
    row("tierbed-placement", &["core", "io", "cache", "snapshot"], &["sim"]),
    row(
        "tierbed-train",
        &["core", "io", "kernels", "store", "lsm", "vocab", "snapshot"],
        &["compare", "sim"],
    ),
    row("tierbed-serve", &["core", "io", "remote", "snapshot"], &["sim"]),
    row("tierbed-server", &["core", "io", "kernels", "snapshot", "serve"], &["remote"]),
    row("tierbed-triton", &["core", "serve", "server"], &["io", "snapshot"]),
    row(
        "tierbed-bench",
        &[
            "core",
            "io",
            "kernels",
            "cache",
            "data",
            "store",
            "lsm",
            "lab",
            "compare",
            "snapshot",
            "placement",
            "train",
        ],
        &[],
    ),
    Crate {
        name: "tierbed-py",
        uses: &[
            "core",
            "io",
            "kernels",
            "exchange",
            "cache",
            "data",
            "store",
            "snapshot",
            "placement",
            "remote",
            "train",
            "serve",
        ],
        may_use: &["lab", "compare", "bench"],
        tests_use: &[],
    },
];

/// Crates of `tools/`, which no crate of the product is linked with.
const TOOLS: [&str; 6] = ["sim", "models", "xtask", "lab", "compare", "bench"];

/// Where the optional dependencies of `tierbed-py` are used: its module of the feature `lab`.
const LAB_GLUE: &str = "tools/python/native/";
/// Entries of the fuzz targets, a file or some for each crate: its tests replay their seeds.
const FUZZ_ENTRIES: &str = "tools/fuzz/entries/";

/// A crate, and what it must not reach through any chain of arrows of the table.
const NEVER: [(&str, &[&str]); 7] = [
    // The program without Python is its server and a snapshot.
    ("server", &["train", "data", "placement", "lsm", "store"]),
    // Within Triton the same.
    ("triton", &["train", "data", "placement", "lsm", "store"]),
    // A server answers lookups: no training, no readers of logs, no partitioner.
    ("serve", &["train", "data", "placement", "lsm", "store"]),
    // Serving must not need what was computed off-line for it.
    ("snapshot", &["placement", "data", "train"]),
    // A placement is made from queries, whatever reads or trains the rows.
    ("placement", &["data", "store", "train"]),
    // Folders and bytes: what is published in them is not its business.
    ("remote", &["snapshot", "store", "train", "cache", "kernels"]),
    // A store knows rows; pages that are served and the engines above it are not its business.
    ("store", &["snapshot", "kernels", "cache"]),
];

/// Refuses arrows that the table does not have, arrows of the table that nothing uses, and crates
/// that ARCHITECTURE.md does not name.
pub(crate) fn check(files: &[File]) -> Vec<Finding> {
    let architecture = files.iter().find(|file| file.path == "ARCHITECTURE.md");
    let mut findings = Vec::new();
    for manifest in files.iter().filter(|file| is_crate_manifest(&file.path)) {
        findings.extend(check_manifest(manifest));
        findings.extend(check_sources(manifest, files));
        let Some(name) = package_name(&manifest.text) else { continue };
        let is_named = architecture.is_some_and(|page| page.text.contains(&format!("`{name}`")));
        if !is_named {
            let message = format!("ARCHITECTURE.md does not name {name}");
            findings.push(Finding::new(manifest, 1, message));
        }
    }
    findings
}

/// Manifests of `crates/*` and `tools/*`; the fuzz targets are a workspace of their own.
fn is_crate_manifest(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    matches!(parts.as_slice(), ["crates" | "tools", folder, "Cargo.toml"] if *folder != "fuzz")
}

/// Returns the `name = "..."` of a manifest, which is that of its package.
pub(crate) fn package_name(manifest: &str) -> Option<&str> {
    let line = manifest.lines().find_map(|line| line.strip_prefix("name = \""))?;
    line.strip_suffix('"')
}

fn short(name: &str) -> &str {
    name.strip_prefix("tierbed-").unwrap_or(name)
}

/// Compares the dependencies of a manifest with the crate's row of the table.
fn check_manifest(manifest: &File) -> Vec<Finding> {
    let Some(name) = package_name(&manifest.text) else { return Vec::new() };
    let Some(row) = CRATES.iter().find(|row| row.name == name) else {
        let message = format!("{name} has no arrows; add it to tools/xtask/src/tidy/arrows.rs");
        return vec![Finding::new(manifest, 1, message)];
    };
    let mut findings = Vec::new();
    let found = dependencies(&manifest.text);
    for dependency in &found {
        let allowed = row.allowed(dependency.kind);
        if !allowed.contains(&short(dependency.name)) {
            let message = format!("{name} must not depend on {}", dependency.name);
            findings.push(Finding::new(manifest, dependency.line, message));
        }
    }
    for kind in [Kind::Linked, Kind::Optional, Kind::Tests] {
        for arrow in row.allowed(kind) {
            let mut same = found.iter().filter(|found| found.kind == kind);
            if !same.any(|found| short(found.name) == *arrow) {
                let message = format!("{name} does not depend on {arrow}; remove the arrow");
                findings.push(Finding::new(manifest, 1, message));
            }
        }
    }
    let reached = reached(row);
    let never = NEVER.iter().filter(|(from, _)| *from == short(name)).flat_map(|(_, to)| *to);
    let is_tool = manifest.path.starts_with("tools/");
    let tools = TOOLS.iter().filter(|_| !is_tool);
    for arrow in never.chain(tools).filter(|arrow| reached.contains(**arrow)) {
        let message = format!("{name} must not reach {arrow}, not even through other crates");
        findings.push(Finding::new(manifest, 1, message));
    }
    if !manifest.text.lines().any(|line| line.starts_with("description = ")) {
        findings.push(Finding::new(manifest, 1, "crate without description"));
    }
    findings
}

/// Lists the crates that the library of `row` is linked with.
fn reached(row: &Crate) -> BTreeSet<&'static str> {
    let mut reached = BTreeSet::new();
    let mut left = row.uses.to_vec();
    while let Some(next) = left.pop() {
        if reached.insert(next) {
            let below = CRATES.iter().filter(|row| short(row.name) == next);
            left.extend(below.flat_map(|row| row.uses));
        }
    }
    reached
}

/// Refuses dependencies that no source of the crate names.
fn check_sources(manifest: &File, files: &[File]) -> Vec<Finding> {
    let Some(folder) = manifest.path.strip_suffix("Cargo.toml") else { return Vec::new() };
    let mut findings = Vec::new();
    for dependency in dependencies(&manifest.text) {
        let library = format!("{folder}src/");
        let within = if dependency.kind == Kind::Tests { folder } else { &library };
        let name = dependency.name.replace('-', "_");
        let beside = match dependency.kind {
            Kind::Linked => library.clone(),
            Kind::Optional => LAB_GLUE.to_owned(),
            Kind::Tests => folder.trim_end_matches('/').replace("crates/tierbed-", FUZZ_ENTRIES),
        };
        let mut sources = files
            .iter()
            .filter(|file| file.path.starts_with(within) || file.path.starts_with(&beside));
        let is_used = sources.any(|file| match &file.scan {
            Scan::Rust(lines) => lines.iter().any(|line| names(&line.code, &name)),
            _ => false,
        });
        if !is_used {
            let message = format!("no source names {}; remove the dependency", dependency.name);
            findings.push(Finding::new(manifest, dependency.line, message));
        }
    }
    findings
}

/// Whether code names the crate `name` as the beginning of a path.
fn names(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let (before, rest) = code.split_at(at);
        let (_, behind) = rest.split_at(name.len());
        before.chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':')
            && (behind.starts_with("::") || behind.starts_with(';') || behind.starts_with(" as "))
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Linked,
    Optional,
    Tests,
}

#[derive(Debug, PartialEq, Eq)]
struct Dependency<'a> {
    name: &'a str,
    line: usize,
    kind: Kind,
}

/// Lists the crates of this repository that a manifest depends on, whatever the notation.
fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut found = Vec::new();
    let mut is_listing = false;
    let mut is_dev = false;
    for (at, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            is_dev = section.contains("dev-dependencies");
            is_listing = section.ends_with("dependencies");
            // [dependencies.tierbed-core] names the crate in the section itself.
            if let Some((_, name)) = section.rsplit_once("dependencies.") {
                push_own(&mut found, name, at + 1, kind_of(line, is_dev));
            }
        } else if is_listing {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            push_own(&mut found, name, at + 1, kind_of(line, is_dev));
        }
    }
    found
}

fn kind_of(line: &str, is_dev: bool) -> Kind {
    match (is_dev, line.contains("optional = true")) {
        (true, _) => Kind::Tests,
        (false, true) => Kind::Optional,
        (false, false) => Kind::Linked,
    }
}

fn push_own<'a>(found: &mut Vec<Dependency<'a>>, name: &'a str, line: usize, kind: Kind) {
    let name = name.trim_matches('"');
    if name == "tierbed" || name.starts_with("tierbed-") {
        found.push(Dependency { name, line, kind });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(name: &str, dependencies: &str) -> File {
        let text =
            format!("name = \"{name}\"\ndescription = \"What?\"\n[dependencies]\n{dependencies}");
        File::new(format!("crates/{name}/Cargo.toml"), text)
    }

    const FINE: &str = "tierbed-core.workspace = true
        tierbed-io = { path = \"x\" }
        [dev-dependencies]
        tierbed-sim.workspace = true";

    #[test]
    fn a_manifest_has_exactly_the_arrows_of_the_table() {
        assert_eq!(check_manifest(&manifest("tierbed-store", FINE)), []);
        let no_tests = "tierbed-core.workspace = true\ntierbed-io.workspace = true";
        for (name, wrong) in [
            ("tierbed-core", "tierbed-io.workspace = true"),
            ("tierbed-cache", "tierbed-core = {}\n[dependencies.tierbed-io]\nworkspace = true"),
            ("tierbed-core", "[target.'cfg(unix)'.dependencies]\ntierbed = { path = \"x\" }"),
            ("tierbed-core", "[dev-dependencies]\ntierbed-sim.workspace = true"),
            // In tests only.
            ("tierbed-core", "tierbed-sim = { workspace = true, optional = true }"),
            // Allowed, but nothing depends on it.
            ("tierbed-kernels", ""),
            ("tierbed-store", no_tests),
            ("tierbed-attic", ""),
        ] {
            let found = check_manifest(&manifest(name, wrong));
            assert_eq!(found.len(), 1, "{name}: {wrong}: {found:?}");
        }
    }

    #[test]
    fn a_dependency_is_named_by_a_source() {
        let named = |path: &str, source: &str| {
            let manifest = manifest("tierbed-store", FINE);
            let files = [
                File::new("crates/tierbed-store/src/lib.rs", "use tierbed_core::Error;"),
                File::new("crates/tierbed-store/tests/a.rs", "tierbed_sim::run();"),
                File::new(path, source),
            ];
            check_sources(&manifest, &files).len()
        };
        assert_eq!(named("crates/tierbed-store/src/a.rs", "use tierbed_io::Folder;"), 0);
        assert_eq!(named("crates/tierbed-store/src/a.rs", "use tierbed_iota::Folder;"), 1);
        assert_eq!(named("crates/tierbed-store/src/a.rs", "// tierbed_io::Folder"), 1);
        assert_eq!(named("crates/tierbed-store/tests/b.rs", "use tierbed_io::Folder;"), 1);
        assert_eq!(named("crates/tierbed-lsm/src/a.rs", "use tierbed_io::Folder;"), 1);
        assert_eq!(named("tools/fuzz/entries/store_file.rs", "use tierbed_io::Folder;"), 1);
    }

    #[test]
    fn the_table_points_down_and_keeps_the_rules() {
        for (at, row) in CRATES.iter().enumerate() {
            let is_below = |arrow| CRATES.iter().take(at).any(|lower| short(lower.name) == arrow);
            for arrow in row.uses.iter().chain(row.may_use) {
                assert!(is_below(*arrow), "{} points up to {arrow}", row.name);
            }
            // The simulator holds devices and folders to their contract, those of I/O below it
            // too: a test may be linked with a crate above its own.
            for arrow in row.tests_use {
                assert!(is_below(*arrow) || *arrow == "sim", "{} tests with {arrow}", row.name);
            }
        }
        for (from, forbidden) in NEVER {
            let row = CRATES.iter().find(|row| short(row.name) == from).unwrap();
            for arrow in forbidden {
                assert!(CRATES.iter().any(|row| short(row.name) == *arrow), "{arrow} is a crate");
                assert!(!reached(row).contains(arrow), "{from} reaches {arrow}");
            }
        }
    }

    #[test]
    fn every_crate_is_named_in_the_architecture() {
        let page = File::new("ARCHITECTURE.md", "`tierbed-core`");
        let files = [page, manifest("tierbed-core", ""), manifest("tierbed-io", "")];
        let found = check(&files);
        let unnamed = found.iter().filter(|finding| finding.message.contains("does not name"));
        assert_eq!(unnamed.map(|f| f.path.as_str()).collect::<Vec<_>>(), [files[2].path.as_str()]);
    }
}
