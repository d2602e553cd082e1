//! Which parts of a Rust line are code, and which are comment or string?

/// One line of a Rust source.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RustLine {
    /// The line with comments and the insides of strings blanked.
    pub(crate) code: String,
    /// The text of its comments, without `//`; doc comments keep their `/` or `!`.
    pub(crate) comment: String,
    /// Whether the line has any text at all.
    pub(crate) is_blank: bool,
    /// Whether code or a string holds a character outside ASCII.
    pub(crate) has_wide_code: bool,
}

impl RustLine {
    /// Whether the line is only a `//` comment that is no doc comment.
    pub(crate) fn is_plain_comment(&self) -> bool {
        self.code.trim().is_empty()
            && !self.comment.is_empty()
            && !self.comment.starts_with(['/', '!', '*'])
    }
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    BlockComment { depth: u32 },
    Text { is_raw: bool, hash_count: usize },
}

/// Splits `source` into lines of code and comment.
pub(crate) fn scan(source: &str) -> Vec<RustLine> {
    let chars: Vec<char> = source.chars().collect();
    let mut lines = Vec::new();
    let mut line = RustLine { is_blank: true, ..RustLine::default() };
    let mut state = State::Code;
    let mut previous = ' ';
    let mut rest = chars.as_slice();
    while let [first, ..] = rest {
        if *first == '\n' {
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            let fresh = RustLine { is_blank: true, ..RustLine::default() };
            lines.push(std::mem::replace(&mut line, fresh));
            (rest, previous) = (skip(rest, 1), ' ');
            continue;
        }
        let (next_state, length) = step(state, rest, previous);
        take(&mut line, state, next_state, rest.get(..length).unwrap_or(rest));
        previous = *rest.get(length.saturating_sub(1)).unwrap_or(first);
        rest = skip(rest, length);
        state = next_state;
    }
    if !line.is_blank {
        lines.push(line);
    }
    lines
}

fn skip(chars: &[char], count: usize) -> &[char] {
    chars.get(count..).unwrap_or(&[])
}

/// Returns the state after the next token and the token's length.
fn step(state: State, rest: &[char], previous: char) -> (State, usize) {
    match (state, rest) {
        (State::Code, ['/', '/', ..]) => (State::LineComment, 2),
        (State::Code, ['/', '*', ..]) => (State::BlockComment { depth: 1 }, 2),
        (State::Code, ['"', ..]) => (State::Text { is_raw: false, hash_count: 0 }, 1),
        (State::Code, ['r', tail @ ..]) if !is_word(previous) || previous == 'b' => {
            let hash_count = tail.iter().take_while(|&&c| c == '#').count();
            match tail.get(hash_count) {
                Some('"') => (State::Text { is_raw: true, hash_count }, hash_count + 2),
                _ => (State::Code, 1),
            }
        }
        // A character literal; anything else after a tick is a lifetime.
        (State::Code, ['\'', '\\', _, tail @ ..]) => {
            let to_close = tail.iter().take_while(|&&c| c != '\'' && c != '\n').count();
            (State::Code, to_close + 4)
        }
        (State::Code, ['\'', c, '\'', ..]) if *c != '\n' => (State::Code, 3),
        (State::BlockComment { depth }, ['/', '*', ..]) => {
            (State::BlockComment { depth: depth + 1 }, 2)
        }
        (State::BlockComment { depth: 1 }, ['*', '/', ..]) => (State::Code, 2),
        (State::BlockComment { depth }, ['*', '/', ..]) => {
            (State::BlockComment { depth: depth - 1 }, 2)
        }
        (State::Text { is_raw: false, .. }, ['\\', c, ..]) if *c != '\n' => (state, 2),
        (State::Text { hash_count, .. }, ['"', tail @ ..])
            if tail.iter().take(hash_count).filter(|&&c| c == '#').count() == hash_count =>
        {
            (State::Code, hash_count + 1)
        }
        _ => (state, 1),
    }
}

/// Adds one token to the line: as code, as comment text, or as blanks.
fn take(line: &mut RustLine, before: State, after: State, token: &[char]) {
    line.is_blank &= token.iter().all(|c| c.is_whitespace());
    let is_comment = |state| matches!(state, State::LineComment | State::BlockComment { .. });
    if is_comment(before) || is_comment(after) {
        if is_comment(before) && is_comment(after) {
            line.comment.extend(token);
        }
        line.code.extend(token.iter().map(|_| ' '));
        return;
    }
    line.has_wide_code |= !token.iter().all(char::is_ascii);
    let is_literal = matches!(token, ['\'', _, ..]);
    let is_inside = matches!((before, after), (State::Text { .. }, State::Text { .. }));
    if is_literal || is_inside {
        line.code.extend(token.iter().map(|_| ' '));
    } else {
        line.code.extend(token);
    }
}

/// Whether `c` may stand in an identifier.
pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(source: &str) -> Vec<String> {
        scan(source).into_iter().map(|line| line.code.trim_end().to_owned()).collect()
    }

    #[test]
    fn comments_and_strings_are_blanked() {
        let source = "let a = \"x // y {\"; // say {\nb(/* { */ c)\n";
        assert_eq!(code(source), ["let a = \"        \";", "b(        c)"]);
        assert_eq!(scan(source)[0].comment, " say {");
    }

    #[test]
    fn raw_strings_end_with_their_hashes_and_may_span_lines() {
        let source = "let a = r#\"one \" {\ntwo\"#; end();";
        assert_eq!(code(source), ["let a = r#\"", "   \"#; end();"]);
        // A raw identifier is no string.
        assert_eq!(code("r#type { }"), ["r#type { }"]);
    }

    #[test]
    fn ticks_are_literals_or_lifetimes() {
        assert_eq!(
            code("f('{', '\\'', '\\u{7d}'); fn g<'a>(x: &'a str) {"),
            ["f(   ,     ,         ); fn g<'a>(x: &'a str) {"]
        );
    }

    #[test]
    fn doc_comments_keep_their_mark_and_block_comments_nest() {
        let lines = scan("/// doc\n//! module\n// plain\n/* a /* b */ c */ d");
        assert_eq!(lines[0].comment, "/ doc");
        assert_eq!(lines[1].comment, "! module");
        assert!(lines[2].is_plain_comment() && !lines[0].is_plain_comment());
        assert_eq!(lines[3].code.trim(), "d");
    }

    #[test]
    fn wide_characters_are_noted_only_outside_comments() {
        let lines = scan("// \u{a7}4\nlet a = \"\u{a7}\";\n");
        assert!(!lines[0].has_wide_code && lines[1].has_wide_code);
    }
}
