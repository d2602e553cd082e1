//! Is every word the glossary's word? Refuses the names that meant two things elsewhere.

use super::rust_scan::is_word;
use super::{File, Finding, Scan};

/// Words that are refused, in lower case, and what to say. A leading or trailing `_` means
/// "also inside an identifier"; otherwise the whole word must match.
const REFUSED: [(&str, &str); 17] = [
    ("invert index", "inverted index"),
    ("ev_cache", "admission bitmap, or group-aware policy"),
    ("ev-cache", "admission bitmap, or group-aware policy"),
    ("evcache", "admission bitmap, or group-aware policy"),
    ("ev_buffer", "look-ahead buffer"),
    ("part_cnt", "page_count"),
    ("block_idx", "page_id"),
    ("cluster_id", "page_id"),
    ("_cnt", "_count"),
    ("sstable", "SST"),
    ("embedding vector", "row"),
    ("embedding_vector", "row"),
    ("num_rows", "row_count"),
    ("n_rows", "row_count"),
    ("cache level", "tier"),
    ("cache layer", "tier"),
    ("batchsize", "batch_size"),
];

/// File and folder names that say nothing.
const REFUSED_NAMES: [&str; 6] = ["utils", "util", "helpers", "helper", "misc", "stuff"];

/// Files that quote the refused words: the glossary and what explains or checks it.
const MAY_QUOTE: [&str; 4] = [
    "docs/reference/glossary.md",
    "docs/explanation/papers/",
    "STYLE.md",
    "tools/xtask/src/tidy/words.rs",
];

/// Refuses words and file names outside the glossary.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    for part in file.path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if REFUSED_NAMES.contains(&stem) {
            let message = format!("the name {part} says nothing; name it after what it does");
            findings.push(Finding::new(file, 1, message));
        }
        if ends_with_version(stem) && !file.path.contains("formats/") {
            let message = format!("{part}: versions live in the format's module, not in names");
            findings.push(Finding::new(file, 1, message));
        }
    }
    let is_prose_or_code = !matches!(file.scan, Scan::Other) || file.name().ends_with(".toml");
    if !is_prose_or_code || MAY_QUOTE.iter().any(|quoted| file.path.starts_with(quoted)) {
        return findings;
    }
    for (at, line) in file.text.lines().enumerate() {
        let line = line.to_lowercase();
        for (word, instead) in REFUSED {
            if contains_word(&line, word) {
                let message =
                    format!("say \"{instead}\" instead of \"{word}\" (docs/reference/glossary.md)");
                findings.push(Finding::new(file, at + 1, message));
            }
        }
    }
    findings
}

/// Whether a name ends in `_v2` or the like.
fn ends_with_version(stem: &str) -> bool {
    let Some((before, digits)) = stem.rsplit_once("_v") else { return false };
    !before.is_empty() && !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit())
}

fn contains_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let (before, from) = line.split_at(at);
        let after = from.get(word.len()..).unwrap_or("");
        // What stands behind a dot is an attribute of somebody else's object.
        let is_free = |c: char| !is_word(c) && c != '.';
        let starts = word.starts_with('_') || before.chars().next_back().is_none_or(is_free);
        let ends = word.ends_with('_') || !after.chars().next().is_some_and(is_word);
        starts && ends
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_words_are_found_whole_and_in_any_case() {
        assert_eq!(check(&File::new("a.md", "the Invert Index of a page")).len(), 1);
        assert_eq!(check(&File::new("a.rs", "let part_cnt = 1;")).len(), 2);
        assert_eq!(check(&File::new("a.rs", "let page_cnt = 1;")).len(), 1);
        assert_eq!(check(&File::new("a.rs", "inverted index, prev_cache, page_cnts")), []);
        assert_eq!(check(&File::new("a.py", "count = group.num_rows")), []);
        assert_eq!(check(&File::new("a.py", "num_rows = 1")).len(), 1);
        assert_eq!(check(&File::new("docs/reference/glossary.md", "not ev_cache")), []);
    }

    #[test]
    fn names_that_say_nothing_are_refused() {
        for path in ["a/utils.rs", "utils/a.rs", "a/helpers.py", "a/codec_v2.rs"] {
            assert_eq!(check(&File::new(path, "")).len(), 1, "{path}");
        }
        assert_eq!(check(&File::new("testdata/formats/page_v1.bin", "")), []);
        assert_eq!(check(&File::new("a/solve.rs", "")), []);
    }
}
