//! Plain prose in documents: short sentences, short paragraphs, numbers where they are generated.

use super::documents::prose_lines;
use super::{File, Finding, Scan};

/// Words of a sentence, at most.
const SENTENCE_WORDS: usize = 25;
/// Words of a paragraph, list item or table cell, at most.
const PARAGRAPH_WORDS: usize = 80;

/// Where decimals may stand: pages of measurements, and pages that define exact values.
const MAY_MEASURE: [&str; 2] = ["docs/results/", "docs/reference/"];

/// Words whose next word is a version and no measurement.
const VERSIONED: [&str; 9] =
    ["Python", "Rust", "PyTorch", "torch", "Tierbed", "Version", "version", "before", "from"];
/// Words between versions: "Python 3.10 to 3.14".
const BETWEEN: [&str; 4] = ["to", "and", "or", "until"];

/// Words that make a thing a person, and what the field says.
const PRIVATE: [(&str, &str); 7] = [
    ("told", "reported, or registered"),
    ("nobody", "nothing, or no caller"),
    ("somebody", "another process"),
    ("whoever", "the process that"),
    ("friends", "rows requested together"),
    ("council", "commit coordinator"),
    ("ferry", "row mover"),
];

/// Refuses private words, long sentences and paragraphs, and measurements in prose.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    let is_document = file.path.starts_with("docs/") || !file.path.contains('/');
    if !matches!(file.scan, Scan::Markdown) || !is_document {
        return Vec::new();
    }
    let may_measure = MAY_MEASURE.iter().any(|folder| file.path.starts_with(folder));
    let mut findings = Vec::new();
    for block in blocks(&file.text) {
        let text = plain(&block.text);
        let count = words(&text);
        if count > PARAGRAPH_WORDS {
            let message = format!("paragraph of {count} words, at most {PARAGRAPH_WORDS}");
            findings.push(Finding::new(file, block.line, message));
        }
        for sentence in sentences(&text) {
            let count = words(sentence);
            if count > SENTENCE_WORDS {
                let begin: String = sentence.trim().chars().take(40).collect();
                let message =
                    format!("sentence of {count} words, at most {SENTENCE_WORDS}: {begin}");
                findings.push(Finding::new(file, block.line, message));
            }
        }
        for (word, instead) in PRIVATE {
            if text.to_lowercase().split(|c: char| !c.is_alphanumeric()).any(|w| w == word) {
                let message = format!("say \"{instead}\" instead of \"{word}\"");
                findings.push(Finding::new(file, block.line, message));
            }
        }
        findings.extend(
            decimals(&text, may_measure)
                .into_iter()
                .map(|(number, rule)| Finding::new(file, block.line, format!("{rule}: {number}"))),
        );
    }
    findings
}

/// Text that belongs together: a paragraph, a list item, a heading or a table cell.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    line: usize,
    text: String,
}

/// Cuts a page into blocks, outside fenced code.
fn blocks(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut is_open = false;
    let mut next_line = 1;
    for (line, prose) in prose_lines(text) {
        let trimmed = prose.trim();
        // A gap in the numbers is fenced code, which ends a paragraph.
        is_open &= line == next_line;
        next_line = line + 1;
        if trimmed.starts_with('|') {
            let cells = trimmed.split('|').map(|cell| Block { line, text: cell.to_owned() });
            blocks.extend(cells);
            is_open = false;
        } else if trimmed.is_empty() || trimmed.starts_with('#') {
            is_open = false;
        } else if let (true, false, Some(block)) =
            (is_open, begins_item(trimmed), blocks.last_mut())
        {
            block.text.push(' ');
            block.text.push_str(trimmed);
        } else {
            blocks.push(Block { line, text: trimmed.to_owned() });
            is_open = true;
        }
    }
    blocks
}

/// Whether a line begins a list item.
fn begins_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_numbered = number.len() < line.len() && number.starts_with(". ");
    is_numbered || line.starts_with("- ") || line.starts_with("* ")
}

/// Leaves out the addresses of links: readers see their texts.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        plain.push_str(before);
        let Some((_, behind)) = after.split_once(')') else { return plain };
        rest = behind;
    }
    plain.push_str(rest);
    plain
}

/// Cuts a text behind full stops, question marks and exclamation marks.
fn sentences(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut from = 0;
    for (at, _) in text.match_indices(' ') {
        let (before, _) = text.split_at(at);
        let before = before.trim_end_matches(['*', '_', ')', '"', ']']);
        let is_end = before.ends_with(['.', '?', '!']) && before.len() > from;
        let is_number = before.trim_end_matches('.').parse::<u32>().is_ok();
        if is_end && !is_number {
            found.extend(text.get(from..at));
            from = at + 1;
        }
    }
    found.extend(text.get(from..));
    found
}

/// Counts what is read as a word: anything between spaces with a letter or digit in it.
fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count()
}

/// Finds decimals that break a rule, and the rule.
fn decimals(text: &str, may_measure: bool) -> Vec<(String, &'static str)> {
    let mut found = Vec::new();
    let mut is_version = false;
    for word in text.split_whitespace() {
        let number = word.trim_matches(|c: char| !c.is_ascii_digit() && c != '.');
        let number = number.trim_end_matches('.');
        let Some((whole, fraction)) = number.split_once('.') else {
            let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
            is_version = VERSIONED.contains(&bare) || (is_version && BETWEEN.contains(&bare));
            continue;
        };
        let is_decimal = !fraction.is_empty() && fraction.bytes().all(|byte| byte.is_ascii_digit());
        // Sections of a paper and names such as Apache-2.0 are no numbers.
        if !is_decimal || word.contains(['\u{a7}', '-']) {
            continue;
        }
        if whole.is_empty() {
            found.push((number.to_owned(), "a decimal begins with its zero"));
        } else if !may_measure && !is_version {
            found.push((number.to_owned(), "measurements live in docs/results"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&File::new(path, text)).into_iter().map(|found| found.message).collect()
    }

    #[test]
    fn long_sentences_are_found_and_short_ones_are_not() {
        let long = format!("{}end.", "word ".repeat(SENTENCE_WORDS));
        let short = format!("{}end.", "word ".repeat(SENTENCE_WORDS - 1));
        assert_eq!(messages("docs/a.md", &long).len(), 1);
        assert_eq!(messages("docs/a.md", &format!("{short} {short}")).len(), 0);
        assert_eq!(messages("docs/a.md", &format!("**{short}** {short}")).len(), 0);
        assert_eq!(messages("docs/a.md", &format!("```text\n{long}\n```\n")).len(), 0);
        assert_eq!(messages("changes/a.md", &long).len(), 0);
    }

    #[test]
    fn paragraphs_items_and_cells_are_counted_apart() {
        let sentence = "one two three four five six seven eight nine ten.\n".repeat(8);
        assert_eq!(messages("docs/a.md", &sentence), Vec::<String>::new());
        assert_eq!(messages("docs/a.md", &format!("{sentence}{sentence}")).len(), 1);
        assert_eq!(messages("docs/a.md", &format!("{sentence}\n{sentence}")).len(), 0);
        assert_eq!(messages("docs/a.md", &format!("- {sentence}- {sentence}")).len(), 0);
        let cell = "word ".repeat(20);
        assert_eq!(messages("docs/a.md", &format!("| {cell} | {cell} |")).len(), 0);
    }

    #[test]
    fn addresses_of_links_are_not_read() {
        let links = "[a](b/c.md#d-0.5) ".repeat(SENTENCE_WORDS);
        assert_eq!(messages("docs/a.md", &links), Vec::<String>::new());
    }

    #[test]
    fn things_are_no_persons() {
        assert_eq!(messages("docs/a.md", "The policy is told of hits.").len(), 1);
        assert_eq!(messages("docs/a.md", "`told` is a name.").len(), 0);
    }

    #[test]
    fn decimals_have_zeros_and_stand_with_the_results() {
        assert_eq!(messages("docs/results/a.md", "a share of .5 %").len(), 1);
        assert_eq!(messages("docs/results/a.md", "a share of 0.5 %").len(), 0);
        assert_eq!(messages("docs/how-to/a.md", "it is 1.9 times as fast").len(), 1);
        assert_eq!(messages("docs/how-to/a.md", "up to 1.9x as fast").len(), 1);
        let fine = ["RecDB \u{a7}4.3", "Python 3.10 to 3.14", "Apache-2.0", "0.1.0", "5 %", "`.5`"];
        for text in fine {
            assert_eq!(messages("docs/how-to/a.md", text), Vec::<String>::new(), "{text}");
        }
    }
}
