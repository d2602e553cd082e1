//! The figures of one source file.

use std::ops::AddAssign;

use super::super::python_scan::PythonLine;
use super::super::rust_scan::{is_word, RustLine};
use super::super::sizes::brace_span;
use super::super::{File, Scan};
use super::masked;

/// What is counted, of a file or of many; tests, examples and benches count nothing.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Measures {
    /// Lines of Rust that are neither blank nor comment.
    pub(super) rust_lines: usize,
    /// Lines of Python that are neither blank, comment nor docstring.
    pub(super) python_lines: usize,
    /// Fallbacks behind an access that failed.
    pub(super) masked: usize,
    /// `let .. else` that pass over an access that failed.
    pub(super) exits: usize,
    /// Functions with a tuple as parameter.
    pub(super) tuples: usize,
    /// Uses of `unsafe`.
    pub(super) unsafes: usize,
    pub(super) asserts: usize,
    pub(super) functions: usize,
    /// Types whose name ends in `Plan`.
    pub(super) plans: usize,
}

impl AddAssign for Measures {
    fn add_assign(&mut self, other: Self) {
        self.rust_lines += other.rust_lines;
        self.python_lines += other.python_lines;
        self.masked += other.masked;
        self.exits += other.exits;
        self.tuples += other.tuples;
        self.unsafes += other.unsafes;
        self.asserts += other.asserts;
        self.functions += other.functions;
        self.plans += other.plans;
    }
}

impl Measures {
    /// Counts one file.
    pub(super) fn of(file: &File) -> Self {
        match &file.scan {
            // A stub declares what a Rust crate has.
            _ if is_test(&file.path) || file.path.ends_with(".pyi") => Self::default(),
            Scan::Rust(lines) => {
                let mut counted = Self::of_rust(&code_of(lines));
                // The Python border repeats the types of other crates.
                if file.path.starts_with("crates/tierbed-py/") {
                    counted.plans = 0;
                }
                counted
            }
            Scan::Python(lines) => {
                let counted = lines.iter().filter(|line| is_python_code(line));
                let classes = lines.iter().filter_map(|l| l.code.trim().strip_prefix("class "));
                let plans = classes.filter(|rest| is_plan(word(rest))).count();
                Self { python_lines: counted.count(), plans, ..Self::default() }
            }
            Scan::Markdown | Scan::Other => Self::default(),
        }
    }

    fn of_rust(code: &str) -> Self {
        let functions = parameter_lists(code);
        Self {
            rust_lines: code.lines().filter(|line| !line.trim().is_empty()).count(),
            python_lines: 0,
            masked: masked::fallbacks(code).len(),
            exits: masked::exits(code).len(),
            tuples: functions.iter().filter(|(_, list)| has_tuple(list)).count(),
            unsafes: words(code, "unsafe").count(),
            asserts: asserts(code),
            functions: functions.len(),
            plans: ["struct", "enum", "trait", "type"]
                .iter()
                .flat_map(|kind| words(code, kind))
                .filter(|rest| is_plan(word(rest.trim_start())))
                .count(),
        }
    }
}

/// Whether a line of Python is more than a comment or a piece of a docstring.
fn is_python_code(line: &PythonLine) -> bool {
    let code = line.code.trim();
    let is_string = code.chars().all(|c| c == '"' || c == ' ');
    !code.is_empty() && (line.is_continued || !is_string) && !line.is_bare_string()
}

/// Returns line and meaning of every masked access and tuple parameter of a file.
pub(super) fn places(file: &File) -> Vec<(usize, &'static str)> {
    let Scan::Rust(lines) = &file.scan else { return Vec::new() };
    if is_test(&file.path) {
        return Vec::new();
    }
    let code = code_of(lines);
    let line_of = |at: usize| code.get(..at).unwrap_or("").matches('\n').count() + 1;
    let mut places = Vec::new();
    places.extend(masked::fallbacks(&code).into_iter().map(|at| (line_of(at), "masked")));
    places.extend(masked::exits(&code).into_iter().map(|at| (line_of(at), "exit")));
    let tuples = parameter_lists(&code).into_iter().filter(|(_, list)| has_tuple(list));
    places.extend(tuples.map(|(at, _)| (line_of(at), "tuple")));
    places.sort_unstable();
    places
}

/// Whether a file belongs to tests, examples or benches.
fn is_test(path: &str) -> bool {
    let mut folders = path.split('/');
    let name = folders.next_back().unwrap_or("");
    let is_apart = |folder: &str| ["tests", "examples", "benches"].contains(&folder);
    name == "tests.rs" || name == "build.rs" || folders.any(is_apart)
}

/// Joins the code of a Rust file, a line each, with inline tests blank.
fn code_of(lines: &[RustLine]) -> String {
    let kept = without_tests(lines);
    let code = lines.iter().zip(kept).map(|(line, is_kept)| match is_kept {
        true if line.code.is_ascii() => line.code.clone(),
        true => line.code.replace(|c: char| !c.is_ascii(), " "),
        false => String::new(),
    });
    code.collect::<Vec<_>>().join("\n")
}

/// Tells of every line whether it lies outside the items that only tests have.
fn without_tests(lines: &[RustLine]) -> Vec<bool> {
    let mut kept = vec![true; lines.len()];
    for (at, line) in lines.iter().enumerate() {
        if line.code.trim_start().starts_with("#[cfg(test)]") {
            let following = lines.iter().skip(at).map(|line| line.code.as_str());
            let span = brace_span(following);
            kept.iter_mut().skip(at).take(span).for_each(|is_kept| *is_kept = false);
        }
    }
    kept
}

/// Returns what follows every whole word `wanted`.
fn words<'a>(code: &'a str, wanted: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(wanted).filter_map(move |(at, _)| {
        let (before, from) = code.split_at(at);
        let after = from.get(wanted.len()..).unwrap_or("");
        let is_whole = !before.ends_with(is_word) && !after.starts_with(is_word);
        is_whole.then_some(after)
    })
}

fn word(text: &str) -> &str {
    text.split(|c| !is_word(c)).next().unwrap_or("")
}

fn is_plan(name: &str) -> bool {
    name.ends_with("Plan")
}

fn asserts(code: &str) -> usize {
    let names = ["assert", "assert_eq", "assert_ne"];
    let debug = ["debug_assert", "debug_assert_eq", "debug_assert_ne"];
    let all = names.iter().chain(&debug).flat_map(|name| words(code, name));
    all.filter(|after| after.starts_with("!(")).count()
}

/// Returns offset and parameter list, without brackets, of every function.
fn parameter_lists(code: &str) -> Vec<(usize, &str)> {
    let mut lists = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let (before, from) = code.split_at(at);
        let after = from.get(3..).unwrap_or("");
        let name = word(after);
        if before.ends_with(is_word) || name.is_empty() {
            continue;
        }
        let list = parameter_list(after.get(name.len()..).unwrap_or(""));
        lists.push((at, list.unwrap_or("")));
    }
    lists
}

/// Returns the text between the brackets after `<generics>`.
fn parameter_list(after: &str) -> Option<&str> {
    let (mut angles, mut depth, mut from) = (0_usize, 0_usize, 0);
    let mut previous = ' ';
    for (at, c) in after.char_indices() {
        match c {
            '<' if depth == 0 => angles += 1,
            '>' if depth == 0 && previous != '-' => angles = angles.saturating_sub(1),
            '(' if angles == 0 => {
                depth += 1;
                from = if depth == 1 { at + 1 } else { from };
            }
            ')' if angles == 0 => {
                depth -= 1;
                if depth == 0 {
                    return after.get(from..at);
                }
            }
            _ => {}
        }
        previous = c;
    }
    None
}

/// Whether the type of a parameter is a tuple or a reference to one.
fn has_tuple(list: &str) -> bool {
    let (mut depth, mut is_type) = (0_usize, false);
    let mut rest = list;
    while let Some(c) = rest.chars().next() {
        match c {
            '(' | '[' | '<' => depth += 1,
            ')' | ']' | '>' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => is_type = false,
            ':' if depth == 0 && !is_type => {
                is_type = true;
                let typed = rest.get(1..).unwrap_or("").trim_start_matches(['&', ' ', '\n']);
                let typed = match typed.strip_prefix('\'') {
                    Some(lifetime) => lifetime.trim_start_matches(is_word),
                    None => typed,
                };
                let typed = typed.trim_start();
                let typed = typed.strip_prefix("mut ").unwrap_or(typed);
                if is_tuple(typed) {
                    return true;
                }
            }
            _ => {}
        }
        rest = rest.get(c.len_utf8()..).unwrap_or("");
    }
    false
}

/// Whether a type begins with a tuple; `(dyn Error)` and `()` are none.
fn is_tuple(typed: &str) -> bool {
    let Some(inside) = typed.strip_prefix('(') else { return false };
    let mut depth = 0_usize;
    for c in inside.chars() {
        match c {
            '(' | '[' | '<' => depth += 1,
            ',' if depth == 0 => return true,
            ')' if depth == 0 => return false,
            ')' | ']' | '>' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: &str) -> Measures {
        Measures::of(&File::new("crates/a/src/a.rs", source))
    }

    #[test]
    fn tests_and_comments_count_nothing() {
        let source = "//! A.\n\nfn f() {\n    // why\n    unsafe { g() }\n}\n\
            #[cfg(test)]\nmod tests {\n    fn h(a: (u8, u8)) { assert!(true); }\n}\n";
        let counted = of(source);
        assert_eq!((counted.rust_lines, counted.functions, counted.unsafes), (3, 1, 1));
        assert_eq!((counted.tuples, counted.asserts), (0, 0));
        assert_eq!(Measures::of(&File::new("crates/a/tests/a.rs", source)), Measures::default());
        assert_eq!(
            Measures::of(&File::new("crates/a/src/b/tests.rs", source)),
            Measures::default()
        );
    }

    #[test]
    fn tuples_count_as_parameters_only() {
        for tuple in ["a: (u8, u8)", "&self, (a, b): (A, B)", "a: &'a mut (A, B)", "a: &(A, B),"] {
            let source = format!("pub fn f<'a, T: Fn(u8) -> (u8, u8)>({tuple}) -> u8 {{ 1 }}");
            assert_eq!(of(&source).tuples, 1, "{tuple}");
        }
        for other in ["a: u8", "a: &[(u8, u8)]", "a: impl Fn((u8, u8))", "a: ()", "a: &(dyn A)", ""]
        {
            let source = format!("fn f({other}) -> (u8, u8) {{ (1, 2) }}");
            assert_eq!(of(&source).tuples, 0, "{other}");
        }
    }

    #[test]
    fn asserts_unsafe_and_plans_are_whole_words() {
        let counted = of("fn f() { assert!(a); debug_assert_eq!(a, b); static_assert!(c); }\n\
            #![deny(unsafe_code)]\nstruct MergePlan;\nstruct Planned(MergePlan);\n");
        assert_eq!((counted.asserts, counted.unsafes, counted.plans), (2, 0, 1));
        let python = File::new(
            "python/a.py",
            "\"\"\"A.\n\nB.\n\"\"\"\n# c\nclass APlan:\n    \"\"\"C.\"\"\"\n    x = 1\n",
        );
        let counted = Measures::of(&python);
        assert_eq!((counted.python_lines, counted.plans), (2, 1));
    }
}
