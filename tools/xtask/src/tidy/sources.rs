//! Is every source introduced, finished and free of leftovers?

use super::python_scan::PythonLine;
use super::rust_scan::RustLine;
use super::{File, Finding, Scan};

/// Refuses sources without a module doc, leftovers, dead code in comments, and wide characters.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    match &file.scan {
        Scan::Rust(lines) => check_rust(file, lines),
        Scan::Python(lines) => check_python(file, lines),
        Scan::Markdown | Scan::Other => Vec::new(),
    }
}

fn check_rust(file: &File, lines: &[RustLine]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let first = lines.iter().find(|line| {
        let code = line.code.trim_start();
        !line.is_blank && !code.starts_with("#![") && !code.starts_with("#!/")
    });
    // `foo/tests.rs` is introduced by `foo` itself.
    let needs_doc = file.name() != "tests.rs";
    if needs_doc && !first.is_some_and(|line| line.comment.starts_with('!')) {
        findings.push(Finding::new(file, 1, "module doc (//!) missing"));
    }
    for (at, line) in lines.iter().enumerate() {
        let mut refuse =
            |message: &str| findings.push(Finding::new(file, at + 1, message.to_owned()));
        if line.has_wide_code {
            refuse("character outside ASCII; keep those to comments, or write \\u{...}");
        }
        for call in ["dbg!", "todo!", "unimplemented!"] {
            if line.code.contains(call) {
                refuse("unfinished code");
            }
        }
        if let Some(message) = leftover(&line.comment) {
            refuse(message);
        }
        if line.is_plain_comment() && is_rust_code(&line.comment) {
            refuse("code in a comment; remove it, git remembers");
        }
    }
    findings
}

fn check_python(file: &File, lines: &[PythonLine]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let first = lines.iter().find(|line| !line.code.trim().is_empty());
    let has_docstring = first.is_none_or(|line| {
        line.code.trim_start_matches(['r', 'R']).starts_with(['"', '\'']) && line.indent() == 0
    });
    if !has_docstring {
        findings.push(Finding::new(file, 1, "module docstring missing"));
    }
    for (at, line) in lines.iter().enumerate() {
        let mut refuse =
            |message: &str| findings.push(Finding::new(file, at + 1, message.to_owned()));
        if line.code.trim_start().starts_with("breakpoint(") {
            refuse("unfinished code");
        }
        if let Some(message) = leftover(&line.comment) {
            refuse(message);
        }
        if line.code.trim().is_empty() && is_python_code(&line.comment) {
            refuse("code in a comment; remove it, git remembers");
        }
    }
    findings
}

/// Returns what is wrong with a comment that puts work off. Words in backticks are quoted.
fn leftover(comment: &str) -> Option<&'static str> {
    let spoken: String = comment.split('`').step_by(2).collect::<Vec<_>>().join(" ");
    let marks = |word: &str| spoken.split(|c: char| !c.is_alphanumeric()).any(|w| w == word);
    if marks("FIXME") || marks("XXX") {
        return Some("FIXME in a comment; fix it or open an issue");
    }
    (marks("TODO") && !spoken.contains("TODO(#")).then_some("TODO without issue: TODO(#number)")
}

/// Whether a comment reads as a Rust statement.
fn is_rust_code(comment: &str) -> bool {
    const STARTS: [&str; 12] = [
        "let ", "use ", "fn ", "pub ", "impl ", "struct ", "enum ", "mod ", "return ", "if ",
        "for ", "match ",
    ];
    let comment = comment.trim();
    let ends = comment.ends_with(';') || comment.ends_with('{') || comment.ends_with(");");
    let is_call = comment.ends_with(");") && !comment.contains(". ");
    ends && (is_call || STARTS.iter().any(|start| comment.starts_with(start)))
        && comment.contains(['(', '=', '{', ':'])
}

/// Whether a comment reads as a Python statement.
fn is_python_code(comment: &str) -> bool {
    let comment = comment.trim();
    let is_block = ["def ", "class ", "if ", "for ", "while ", "with "]
        .iter()
        .any(|start| comment.starts_with(start))
        && comment.ends_with(':')
        && comment.contains(['(', '=', '[', '.']);
    let is_import = comment.starts_with("import ") && comment.split(' ').count() == 2
        || comment.starts_with("from ") && comment.contains(" import ");
    let is_call = comment.starts_with("print(") || comment.starts_with("return self.");
    is_block || is_import || is_call
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&File::new(path, text)).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn sources_open_with_a_doc() {
        assert!(messages("a.rs", "#![allow(x)]\n\n//! Says.\nfn f() {}\n").is_empty());
        assert_eq!(messages("a.rs", "use a;\n//! Late.\n"), ["module doc (//!) missing"]);
        assert!(messages("a/tests.rs", "use super::*;\n").is_empty());
        assert!(messages("a.py", "# note\n\"\"\"Says.\"\"\"\nimport a\n").is_empty());
        assert!(messages("a.py", "").is_empty());
        assert_eq!(messages("a.py", "import a\n"), ["module docstring missing"]);
    }

    #[test]
    fn leftovers_are_refused_and_quotes_are_not() {
        assert_eq!(messages("a.rs", "//! A.\n// FIXME later\n").len(), 1);
        assert_eq!(messages("a.rs", "//! A.\n// TODO later\n").len(), 1);
        assert!(messages("a.rs", "//! A, no `FIXME`.\n// TODO(#7): later\n").is_empty());
        assert_eq!(messages("a.rs", "//! A.\nfn f() { dbg!(1); }\n"), ["unfinished code"]);
        assert!(messages("a.rs", "//! A.\nconst A: &str = \"todo!\";\n").is_empty());
        assert_eq!(messages("a.py", "\"\"\"A.\"\"\"\nx = 1  # FIXME\n").len(), 1);
    }

    #[test]
    fn code_in_comments_is_refused_and_prose_is_not() {
        for code in ["// let x = f(y);", "// self.rows.clear();", "// if a == b {"] {
            assert_eq!(messages("a.rs", &format!("//! A.\n{code}\n")).len(), 1, "{code}");
        }
        for prose in [
            "// Rows first; pages later;",
            "// if the page is new, nothing was read:",
            "// A worked example: rows 1, 2 (page 0).",
            "/// let x = f(y);",
        ] {
            assert!(messages("a.rs", &format!("//! A.\n{prose}\n")).is_empty(), "{prose}");
        }
        assert_eq!(messages("a.py", "\"\"\"A.\"\"\"\n# from a import b\n").len(), 1);
        assert!(messages("a.py", "\"\"\"A.\"\"\"\n# for every row: one read\n").is_empty());
    }

    #[test]
    fn code_is_ascii_and_comments_need_not_be() {
        assert!(messages("a.rs", "//! RecDB \u{a7}4.3 \u{2192} us.\n").is_empty());
        assert_eq!(messages("a.rs", "//! A.\nconst A: &str = \"\u{2192}\";\n").len(), 1);
    }
}
