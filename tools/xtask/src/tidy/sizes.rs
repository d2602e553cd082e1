//! Is a file, a function or a line too long to read?

use super::python_scan::PythonLine;
use super::rust_scan::{is_word, RustLine};
use super::{File, Finding, Scan};

/// Longest file.
const FILE_LINES_MAX: usize = 800;
/// From here on a file is named in a note, so that the review asks why.
const FILE_LINES_NOTED: usize = 500;
/// Longest function, in lines that are not blank; docstrings and Python's parameter lists, which
/// describe a command line's options, do not count.
const FUNCTION_LINES_MAX: usize = 70;
/// Longest line, in characters. Lines with an address may be longer.
const LINE_CHARS_MAX: usize = 100;

/// Refuses what is too long.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    let functions = match &file.scan {
        Scan::Rust(lines) => rust_functions(lines),
        Scan::Python(lines) => python_functions(lines),
        Scan::Markdown | Scan::Other => return findings,
    };
    let line_count = file.text.lines().count();
    if line_count > FILE_LINES_MAX {
        let message = format!("file has {line_count} lines, at most {FILE_LINES_MAX}; split it");
        findings.push(Finding::new(file, line_count, message));
    }
    for (at, line) in file.text.lines().enumerate() {
        // A note to a checker stands behind the line, not in it.
        let written = ["  # type: ignore", "  # noqa"].iter().find_map(|note| line.find(note));
        let char_count = line.get(..written.unwrap_or(line.len())).unwrap_or(line).chars().count();
        if char_count > LINE_CHARS_MAX && !line.contains("://") {
            let message = format!("line has {char_count} characters, at most {LINE_CHARS_MAX}");
            findings.push(Finding::new(file, at + 1, message));
        }
    }
    for function in functions.iter().filter(|found| found.line_count > FUNCTION_LINES_MAX) {
        let message = format!(
            "function {} has {} lines, at most {FUNCTION_LINES_MAX}; split it",
            function.name, function.line_count
        );
        findings.push(Finding::new(file, function.line, message));
    }
    findings
}

/// Names files that are long but not refused.
pub(crate) fn note(file: &File) -> Option<String> {
    let line_count = file.text.lines().count();
    let is_source = matches!(file.scan, Scan::Rust(_) | Scan::Python(_));
    (is_source && line_count > FILE_LINES_NOTED && line_count <= FILE_LINES_MAX)
        .then(|| format!("{} has {line_count} lines", file.path))
}

#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    /// Line of its first word, from 1.
    line: usize,
    line_count: usize,
}

/// Finds every `fn name` and follows its braces.
fn rust_functions(lines: &[RustLine]) -> Vec<Function> {
    let mut functions = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        for (column, _) in line.code.match_indices("fn ") {
            let (before, from) = line.code.split_at(column);
            let after = from.get(3..).unwrap_or("");
            let name: String = after.chars().take_while(|&c| is_word(c)).collect();
            if before.chars().next_back().is_some_and(is_word) || name.is_empty() {
                continue;
            }
            let following = lines.iter().skip(at + 1).map(|line| line.code.as_str());
            let span = brace_span(std::iter::once(after).chain(following));
            let body = lines.iter().skip(at).take(span);
            let line_count = body.filter(|line| !line.is_blank).count();
            functions.push(Function { name, line: at + 1, line_count });
        }
    }
    functions
}

/// Returns the number of lines up to the brace that closes the first one opened, or up to the
/// semicolon of a function without a body.
pub(super) fn brace_span<'a>(lines: impl Iterator<Item = &'a str>) -> usize {
    let (mut braces, mut brackets) = (0_usize, 0_usize);
    let mut span = 0;
    for line in lines {
        span += 1;
        for c in line.chars() {
            match c {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets = brackets.saturating_sub(1),
                '{' => braces += 1,
                '}' if braces <= 1 => return span,
                '}' => braces -= 1,
                ';' if braces == 0 && brackets == 0 => return span,
                _ => {}
            }
        }
    }
    span
}

/// Finds every `def name` and follows its indent.
fn python_functions(lines: &[PythonLine]) -> Vec<Function> {
    let mut functions = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.code.trim_start();
        let code = code.strip_prefix("async ").unwrap_or(code);
        let Some(after) = code.strip_prefix("def ") else { continue };
        if line.is_continued {
            continue;
        }
        let is_outside = |other: &&PythonLine| {
            !other.is_continued && !other.code.trim().is_empty() && other.indent() <= line.indent()
        };
        let body = lines
            .iter()
            .skip(at + 1)
            .skip_while(|other| other.is_continued)
            .take_while(|other| !is_outside(other));
        let line_count = 1 + body.filter(|line| !line.is_blank && !line.is_bare_string()).count();
        let name = after.chars().take_while(|&c| is_word(c)).collect();
        functions.push(Function { name, line: at + 1, line_count });
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long_body(line_count: usize, line: &str) -> String {
        format!("{line}\n").repeat(line_count)
    }

    #[test]
    fn rust_functions_are_measured_to_their_closing_brace() {
        let source = r#"
trait A {
    fn short(x: [u8; 4]) -> u8;
}
fn long<'a>(
    x: &'a u8,
) {
    let s = "}";

    if true { f() } // }
}
struct After;
"#;
        let file = File::new("a.rs", source);
        let Scan::Rust(lines) = &file.scan else { panic!("not Rust") };
        let found = rust_functions(lines);
        assert_eq!(
            found,
            [
                Function { name: "short".into(), line: 3, line_count: 1 },
                Function { name: "long".into(), line: 5, line_count: 6 },
            ]
        );
    }

    #[test]
    fn python_functions_are_measured_by_indent_without_parameters_and_docstring() {
        let source = r#"
class A:
    def f(
        self,
    ) -> int:
        """Says.

        More.
        """
        # why
        return 1

    def g(self) -> int:
        return (
2
)
"#;
        let file = File::new("a.py", source);
        let Scan::Python(lines) = &file.scan else { panic!("not Python") };
        let lengths: Vec<_> =
            python_functions(lines).into_iter().map(|f| (f.name, f.line_count)).collect();
        assert_eq!(lengths, [("f".to_owned(), 3), ("g".to_owned(), 4)]);
    }

    #[test]
    fn long_things_are_refused_and_the_limit_itself_is_not() {
        let just = format!("fn f() {{\n{}}}\n", long_body(FUNCTION_LINES_MAX - 2, "    g();"));
        assert_eq!(check(&File::new("a.rs", just)), []);
        let over = format!("fn f() {{\n{}}}\n", long_body(FUNCTION_LINES_MAX - 1, "    g();"));
        assert_eq!(check(&File::new("a.rs", over)).len(), 1);
        let file = File::new("a.py", long_body(FILE_LINES_MAX + 1, "x = 1"));
        assert!(check(&file)[0].message.contains("801 lines"));
        let wide = "x".repeat(LINE_CHARS_MAX + 1);
        assert_eq!(check(&File::new("a.rs", format!("// {wide}"))).len(), 1);
        assert_eq!(check(&File::new("a.rs", format!("// https://{wide}"))), []);
        assert!(note(&File::new("a.py", long_body(501, "x = 1"))).is_some());
    }
}
