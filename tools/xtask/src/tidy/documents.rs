//! Does every link lead somewhere, and can every document be found?

use std::collections::{BTreeMap, BTreeSet};

use super::{File, Finding, Scan};

/// Where readers come in.
const FRONT_DOOR: &str = "README.md";

/// Refuses links to files, folders or headings that are not there.
pub(crate) fn check_links(files: &[File]) -> Vec<Finding> {
    let mut known = BTreeSet::new();
    for file in files {
        // Every folder on the way is a target too.
        let ends = file.path.match_indices('/').map(|(at, _)| at);
        known.extend(ends.filter_map(|at| file.path.get(..at)));
        known.insert(file.path.as_str());
    }
    let headings: BTreeMap<&str, BTreeSet<String>> =
        documents(files).map(|file| (file.path.as_str(), anchors(&file.text))).collect();
    let mut findings = Vec::new();
    for file in documents(files) {
        for link in links(&file.text) {
            let Some(target) = resolve(&file.path, &link.target) else {
                let message = format!("link leaves the repository: {}", link.target);
                findings.push(Finding::new(file, link.line, message));
                continue;
            };
            if !known.contains(target.as_str()) && !target.is_empty() {
                let message = format!("dead link: {}", link.target);
                findings.push(Finding::new(file, link.line, message));
            } else if let (Some(anchor), Some(there)) =
                (&link.anchor, headings.get(target.as_str()))
            {
                if !there.contains(anchor) {
                    let message = format!("no such heading: {}#{anchor}", link.target);
                    findings.push(Finding::new(file, link.line, message));
                }
            }
        }
    }
    findings
}

/// Refuses documents that no chain of links from the README reaches.
pub(crate) fn check_reachable(files: &[File]) -> Vec<Finding> {
    let by_path: BTreeMap<&str, &File> =
        documents(files).map(|file| (file.path.as_str(), file)).collect();
    let mut reached = BTreeSet::new();
    let mut next = vec![FRONT_DOOR.to_owned()];
    while let Some(path) = next.pop() {
        let Some(file) = by_path.get(path.as_str()) else { continue };
        if reached.insert(path.clone()) {
            next.extend(links(&file.text).into_iter().filter_map(|l| resolve(&path, &l.target)));
        }
    }
    let is_document = |path: &str| path.starts_with("docs/") || !path.contains('/');
    documents(files)
        .filter(|file| is_document(&file.path) && !reached.contains(&file.path))
        .map(|file| {
            Finding::new(file, 1, format!("no chain of links from {FRONT_DOOR} leads here"))
        })
        .collect()
}

fn documents(files: &[File]) -> impl Iterator<Item = &File> {
    files.iter().filter(|file| matches!(file.scan, Scan::Markdown))
}

#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    /// Path as written, empty for a link within the page.
    target: String,
    anchor: Option<String>,
}

/// Lists the links into the repository, outside code.
fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, prose) in prose_lines(text) {
        for (at, _) in prose.match_indices("](") {
            let from = prose.get(at + 2..).unwrap_or("");
            let address = from.split([')', ' ']).next().unwrap_or("");
            let is_outside = address.contains("://") || address.starts_with("mailto:");
            if is_outside {
                continue;
            }
            let (target, anchor) = match address.split_once('#') {
                Some((target, anchor)) => (target, Some(anchor.to_owned())),
                None => (address, None),
            };
            found.push(Link { line, target: target.to_owned(), anchor });
        }
    }
    found
}

/// Returns the lines outside fenced code, with inline code blanked, numbered from 1.
pub(super) fn prose_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut is_code = false;
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            // Odd pieces between backticks are code; link texts in code keep their brackets.
            let pieces: Vec<&str> = line.split('`').collect();
            let is_closed = pieces.len() % 2 == 1;
            let prose = pieces.iter().enumerate().map(|(number, piece)| {
                if number % 2 == 1 && is_closed {
                    ""
                } else {
                    *piece
                }
            });
            lines.push((at + 1, prose.collect()));
        }
    }
    lines
}

/// Returns the path from the root that `target`, written in file `from`, means.
fn resolve(from: &str, target: &str) -> Option<String> {
    if target.is_empty() {
        return Some(from.to_owned());
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the anchors of a page's headings, as the usual renderers name them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let slug: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let number = (1..).find(|number| !found.contains(&format!("{slug}-{number}")));
        if found.contains(&slug) {
            found.extend(number.map(|number| format!("{slug}-{number}")));
        }
        found.insert(slug);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_are_found_and_live_ones_are_not() {
        let files = [
            File::new("README.md", "[a](docs/a.md) [b](docs) `[c](no.md)` [d](https://x.y)"),
            File::new("docs/a.md", "# Why, and how?\n[up](../README.md) [in](#why-and-how)"),
        ];
        assert_eq!(check_links(&files), []);
        let dead = ["[x](gone.md)", "[x](#no-heading)", "[x](../../out.md)", "[x](a.md#no)"];
        for text in dead {
            let found = check_links(&[File::new("docs/a.md", text)]);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
        }
    }

    #[test]
    fn fenced_code_holds_no_links() {
        let text = "```text\n[x](gone.md)\n```\n";
        assert_eq!(check_links(&[File::new("a.md", text)]), []);
    }

    #[test]
    fn every_document_is_reachable_from_the_readme() {
        let files = [
            File::new("README.md", "[index](docs/index.md)"),
            File::new("docs/index.md", "[a](a.md)"),
            File::new("docs/a.md", ""),
            File::new("docs/lost.md", "[index](index.md)"),
            File::new("changes/1.md", ""),
        ];
        let found: Vec<String> = check_reachable(&files).into_iter().map(|f| f.path).collect();
        assert_eq!(found, ["docs/lost.md"]);
    }

    #[test]
    fn anchors_follow_the_usual_renderers() {
        let found = anchors("# `tierbed-core`: What do we talk about?\n## A\n## A\n```\n# no\n```");
        let expected = ["a", "a-1", "tierbed-core-what-do-we-talk-about"];
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}
