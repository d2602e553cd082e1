//! Does every crate know only what lies below it? The only arrows allowed between crates.

use super::{File, Finding};

/// What each crate may depend on, bottom first. ARCHITECTURE.md draws the same picture.
const ARROWS: [(&str, &[&str]); 22] = [
    ("tierbed-core", &[]),
    ("tierbed-kernels", &["core"]),
    ("tierbed-io", &["core"]),
    ("tierbed-exchange", &["core", "io", "kernels"]),
    ("tierbed-data", &["core"]),
    ("tierbed-cache", &["core"]),
    ("tierbed-placement", &["core", "cache", "data"]),
    ("tierbed-sim", &["core", "io"]),
    // It compiles files of the core, not the crate.
    ("tierbed-models", &[]),
    ("xtask", &[]),
    ("tierbed-trainstore", &["core", "io", "kernels", "cache"]),
    ("tierbed-lsm", &["core", "io", "trainstore"]),
    ("tierbed-compare", &["core", "io", "trainstore"]),
    ("tierbed-vocab", &["core", "trainstore"]),
    ("tierbed-cold", &["core", "io", "trainstore"]),
    ("tierbed-pagestore", &["core", "io", "kernels", "cache", "placement"]),
    (
        "tierbed",
        &[
            "core",
            "io",
            "kernels",
            "cache",
            "trainstore",
            "lsm",
            "cold",
            "compare",
            "vocab",
            "pagestore",
        ],
    ),
    // Its tests and examples hold it against the engine.
    ("tierbed-forward", &["core", "io", "kernels", "trainstore", "cold", "pagestore", "tierbed"]),
    (
        "tierbed-orders",
        &["core", "io", "kernels", "cache", "trainstore", "pagestore", "tierbed", "forward"],
    ),
    ("tierbed-serve", &["core", "io", "kernels", "cache", "pagestore", "tierbed"]),
    (
        "tierbed-bench",
        &[
            "core",
            "io",
            "kernels",
            "cache",
            "data",
            "trainstore",
            "lsm",
            "cold",
            "compare",
            "placement",
            "pagestore",
            "tierbed",
            "forward",
        ],
    ),
    (
        "tierbed-py",
        &[
            "core",
            "io",
            "kernels",
            "exchange",
            "cache",
            "data",
            "placement",
            "trainstore",
            "pagestore",
            "placement",
            "tierbed",
            "orders",
            "serve",
            "bench",
        ],
    ),
];

/// Who may use the faulty disk, in tests only.
const MAY_TEST_WITH_SIM: [&str; 12] = [
    "tierbed-orders",
    "tierbed-data",
    "tierbed-vocab",
    "tierbed-trainstore",
    "tierbed-lsm",
    "tierbed-compare",
    "tierbed-cold",
    "tierbed-placement",
    "tierbed-pagestore",
    "tierbed-forward",
    "tierbed",
    "tierbed-bench",
];

/// Refuses arrows that point up or sideways, and crates nobody has been told about.
pub(crate) fn check(files: &[File]) -> Vec<Finding> {
    let architecture = files.iter().find(|file| file.path == "ARCHITECTURE.md");
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| is_crate_manifest(&file.path)) {
        findings.extend(check_manifest(file));
        let Some(name) = package_name(&file.text) else { continue };
        let is_told = architecture.is_some_and(|page| page.text.contains(&format!("`{name}`")));
        if !is_told {
            findings.push(Finding::new(file, 1, format!("ARCHITECTURE.md does not name {name}")));
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

fn check_manifest(file: &File) -> Vec<Finding> {
    let Some(name) = package_name(&file.text) else { return Vec::new() };
    let Some((_, below)) = ARROWS.iter().find(|(known, _)| *known == name) else {
        let message = format!("{name} has no arrows; add it to tools/xtask/src/tidy/arrows.rs");
        return vec![Finding::new(file, 1, message)];
    };
    let mut findings = Vec::new();
    for found in dependencies(&file.text) {
        let short = found.name.strip_prefix("tierbed-").unwrap_or(found.name);
        let is_sim_in_tests = short == "sim" && found.is_dev && MAY_TEST_WITH_SIM.contains(&name);
        if !below.contains(&short) && !is_sim_in_tests {
            let message = format!("{name} must not depend on {}", found.name);
            findings.push(Finding::new(file, found.line, message));
        }
    }
    if !file.text.lines().any(|line| line.starts_with("description = ")) {
        findings.push(Finding::new(file, 1, "crate without description"));
    }
    findings
}

#[derive(Debug, PartialEq, Eq)]
struct Dependency<'a> {
    name: &'a str,
    line: usize,
    is_dev: bool,
}

/// Lists the house's own crates a manifest depends on, whatever the notation.
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
                push_own(&mut found, name, at + 1, is_dev);
            }
        } else if is_listing {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            push_own(&mut found, name, at + 1, is_dev);
        }
    }
    found
}

fn push_own<'a>(found: &mut Vec<Dependency<'a>>, name: &'a str, line: usize, is_dev: bool) {
    let name = name.trim_matches('"');
    if name == "tierbed" || name.starts_with("tierbed-") {
        found.push(Dependency { name, line, is_dev });
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

    #[test]
    fn arrows_point_down() {
        let fine =
            "tierbed-core.workspace = true\n[dev-dependencies]\ntierbed-sim = { path = \"x\" }";
        assert_eq!(check_manifest(&manifest("tierbed-trainstore", fine)), []);
        for (name, wrong) in [
            ("tierbed-core", "tierbed-io.workspace = true"),
            ("tierbed-data", "tierbed-io = { path = \"../tierbed-io\" }"),
            ("tierbed-cache", "[dependencies.tierbed-io]\nworkspace = true"),
            ("tierbed-io", "[target.'cfg(unix)'.dependencies]\ntierbed = { path = \"x\" }"),
            ("tierbed-trainstore", "tierbed-sim.workspace = true"),
            ("tierbed-io", "[dev-dependencies]\ntierbed-sim.workspace = true"),
            ("tierbed-attic", ""),
        ] {
            let found = check_manifest(&manifest(name, wrong));
            assert_eq!(found.len(), 1, "{name}: {wrong}: {found:?}");
        }
    }

    #[test]
    fn the_table_itself_points_down() {
        for (at, (name, below)) in ARROWS.iter().enumerate() {
            for short in *below {
                let known = ARROWS
                    .iter()
                    .take(at)
                    .any(|(lower, _)| lower.strip_prefix("tierbed-").unwrap_or(lower) == *short);
                assert!(known, "{name} points up to {short}");
            }
        }
    }

    #[test]
    fn every_crate_is_named_in_the_architecture() {
        let page = File::new("ARCHITECTURE.md", "`tierbed-core`");
        let files = [page, manifest("tierbed-core", ""), manifest("tierbed-io", "")];
        let found = check(&files);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("tierbed-io"));
    }
}
