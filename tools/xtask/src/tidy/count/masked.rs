//! Finds fallbacks that hide a failed access, in code whose comments and strings are blank.
//!
//! `rows.get(at).copied().unwrap_or(0)` continues with row 0 where `at` is out of bounds. A place
//! counts when the method chain before the fallback has an access that can fail. The chain ends at
//! `?`, at `ok_or`, and at an earlier fallback: what failed before is handled there.

use super::super::rust_scan::is_word;

/// Methods that answer a failed access with `None` or `Err`.
const ACCESSES: [&str; 16] = [
    "get",
    "get_mut",
    "nth",
    "nth_back",
    "split_off",
    "split_off_mut",
    "split_off_first",
    "split_off_first_mut",
    "split_at_checked",
    "split_at_mut_checked",
    "split_first",
    "split_first_mut",
    "first_chunk",
    "binary_search",
    "binary_search_by",
    "binary_search_by_key",
];

/// Methods that continue with a value made up on the spot.
const FALLBACKS: [&str; 5] =
    ["unwrap_or", "unwrap_or_default", "unwrap_or_else", "map_or", "map_or_else"];

/// Returns the offsets of fallbacks behind an access.
pub(super) fn fallbacks(code: &str) -> Vec<usize> {
    let chars = code.as_bytes();
    let mut found = Vec::new();
    for (dot, _) in code.match_indices('.') {
        let name = word_from(code, dot + 1);
        if FALLBACKS.contains(&name) && chain_has_access(chars, code, dot) {
            found.push(dot);
        }
    }
    found
}

/// Returns the offsets of `let Some(..) = .. else` behind an access whose `else` passes over the
/// failure: it continues, breaks, or returns as if all were well.
pub(super) fn exits(code: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("let ") {
        let before = code.get(..at).unwrap_or("");
        if before.ends_with(is_word) || is_condition(before) {
            continue;
        }
        let Some((value, body)) = let_else(code.get(at..).unwrap_or("")) else { continue };
        let passes_over = ["continue", "break", "return;", "return Ok", "return 0", "return false"]
            .iter()
            .any(|start| body.trim_start().starts_with(start));
        if passes_over && has_access(value) {
            found.push(at);
        }
    }
    found
}

/// Whether a `let` after this text is part of a condition.
fn is_condition(before: &str) -> bool {
    ["if", "while", "&&"].iter().any(|start| before.trim_end().ends_with(start))
}

/// Splits `let pattern = value else { body` into value and everything after the brace.
fn let_else(statement: &str) -> Option<(&str, &str)> {
    let (mut depth, mut value_at) = (0_usize, None);
    for (at, c) in statement.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '=' if depth == 0 && value_at.is_none() => value_at = Some(at + 1),
            ';' if depth == 0 => return None,
            '{' if depth == 0 => {
                let value = statement.get(value_at?..at)?.trim_end();
                return Some((value.strip_suffix("else")?, statement.get(at + 1..)?));
            }
            _ => {}
        }
    }
    None
}

/// Whether an access with arguments stands anywhere in `value`, and `?` does not end it.
fn has_access(value: &str) -> bool {
    value.match_indices('.').any(|(dot, _)| is_access(value, dot))
}

/// Whether the method called at `dot` is an access; `get()` of a cell has no argument and is none.
fn is_access(code: &str, dot: usize) -> bool {
    let name = word_from(code, dot + 1);
    let rest = code.get(dot + 1 + name.len()..).unwrap_or("");
    let rest = rest.strip_prefix("::").map_or(rest, |typed| typed.trim_start_matches(|c| c != '('));
    ACCESSES.contains(&name) && rest.starts_with('(') && !rest.starts_with("()")
}

/// Returns the identifier that begins at `at`.
fn word_from(code: &str, at: usize) -> &str {
    let rest = code.get(at..).unwrap_or("");
    rest.split(|c| !is_word(c)).next().unwrap_or("")
}

/// Walks the method chain that ends before `dot` backwards.
fn chain_has_access(chars: &[u8], code: &str, mut dot: usize) -> bool {
    loop {
        let Some(start) = link_start(chars, dot) else { return false };
        // `start` is the first letter of a link; the chain goes on when a dot stands before it.
        let before = skip_space_back(chars, start);
        if before == 0 || chars.get(before - 1) != Some(&b'.') {
            return false;
        }
        dot = before - 1;
        let name = word_from(code, dot + 1);
        if is_access(code, dot) {
            return true;
        }
        if FALLBACKS.contains(&name) || name.starts_with("ok_or") {
            return false;
        }
    }
}

/// Returns where the link before `end` begins: `name`, `name(..)`, `name[..]`, `name::<T>(..)`.
fn link_start(chars: &[u8], end: usize) -> Option<usize> {
    let mut at = skip_space_back(chars, end);
    while let Some(close) = at.checked_sub(1).and_then(|last| chars.get(last)) {
        match close {
            b')' => at = matching(chars, at, b'(', b')')?,
            b']' => at = matching(chars, at, b'[', b']')?,
            b'>' => at = matching(chars, at, b'<', b'>')?,
            b':' => at -= 1,
            c if is_word(char::from(*c)) => {
                while at.checked_sub(1).and_then(|last| chars.get(last)).is_some_and(in_word) {
                    at -= 1;
                }
                return Some(at);
            }
            _ => return None,
        }
    }
    None
}

fn in_word(c: &u8) -> bool {
    is_word(char::from(*c))
}

fn skip_space_back(chars: &[u8], mut end: usize) -> usize {
    while end.checked_sub(1).and_then(|last| chars.get(last)).is_some_and(u8::is_ascii_whitespace) {
        end -= 1;
    }
    end
}

/// Returns the offset of the bracket that opens what closes just before `end`.
fn matching(chars: &[u8], end: usize, open: u8, close: u8) -> Option<usize> {
    let mut depth = 0_usize;
    for at in (0..end).rev() {
        let c = *chars.get(at)?;
        if c == close {
            depth += 1;
        } else if c == open {
            depth -= 1;
            if depth == 0 {
                return Some(at);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fallback_behind_an_access_is_found() {
        for masked in [
            "let a = rows.get(at).copied().unwrap_or(0);",
            "f(rows\n    .get(from..to)\n    .unwrap_or(&[]))",
            "let a = self.rows.iter().nth(2).map_or(0, |r| r.len());",
            "let a = keys.binary_search(&key).unwrap_or(0);",
            "let a = x[f(3)].get_mut(1).map(|a| *a).unwrap_or_default();",
            "let a = iter.map::<u8, _>(f).nth(1).unwrap_or(7)",
        ] {
            assert_eq!(fallbacks(masked).len(), 1, "{masked}");
        }
    }

    #[test]
    fn a_fallback_without_an_access_is_not() {
        for honest in [
            "let a = rows.iter().max().unwrap_or(0);",
            "let a = rows.get(at).ok_or(Lost)?.iter().max().unwrap_or(0);",
            "let a = rows.get(at).ok_or_else(lost).unwrap_or(0);",
            "let a = cell.get().unwrap_or(0);",
            "f(rows.get(1)); let a = b.unwrap_or(0);",
            "let a = f(rows.get(1)).unwrap_or(0);",
        ] {
            assert_eq!(fallbacks(honest), [0_usize; 0], "{honest}");
        }
        let chained = "rows.get(at).unwrap_or(&[]).iter().max().unwrap_or(0)";
        assert_eq!(fallbacks(chained).len(), 1);
    }

    #[test]
    fn an_exit_behind_an_access_is_found() {
        for masked in [
            "let Some(row) = rows.get(at) else { continue };",
            "let Some(row) = rows\n.get(at) else {\n    break;\n};",
            "let (Some(a), Some(b)) = (x.get(1), y) else { return Ok(()) };",
            "let Some(row) = rows.get_mut(at) else { return };"
                .replace("return ", "return; ")
                .as_str(),
        ] {
            assert_eq!(exits(masked).len(), 1, "{masked}");
        }
        for honest in [
            "let Some(row) = rows.next() else { continue };",
            "let Some(row) = rows.get(at) else { return Err(lost()) };",
            "let Some(row) = rows.get(at) else { return None };",
            "if let Some(row) = rows.get(at) { f(row) } else { continue }",
            "let row = rows.get(at); if a { b } else { continue }",
        ] {
            assert_eq!(exits(honest), [0_usize; 0], "{honest}");
        }
    }
}
