//! Which parts of a Python line are code, and where does a statement go on?

/// One line of a Python source.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct PythonLine {
    /// The line with comments and the insides of strings blanked.
    pub(crate) code: String,
    /// The text of its comment, without `#`.
    pub(crate) comment: String,
    /// Whether the line has any text at all.
    pub(crate) is_blank: bool,
    /// Whether the line begins inside brackets or a string, so that its indent says nothing.
    pub(crate) is_continued: bool,
}

impl PythonLine {
    /// Returns the number of leading spaces.
    pub(crate) fn indent(&self) -> usize {
        self.code.chars().take_while(|&c| c == ' ').count()
    }

    /// Whether the line is only a piece of a string, as docstrings are.
    pub(crate) fn is_bare_string(&self) -> bool {
        let code = self.code.trim();
        !self.is_blank && self.comment.is_empty() && code.chars().all(|c| c == '"' || c == '\'')
    }
}

#[derive(Clone, Copy)]
enum State {
    Code,
    Comment,
    Text { quote: char, is_triple: bool },
}

/// Splits `source` into lines of code and comment.
pub(crate) fn scan(source: &str) -> Vec<PythonLine> {
    let chars: Vec<char> = source.chars().collect();
    let mut lines = Vec::new();
    let mut line = PythonLine { is_blank: true, ..PythonLine::default() };
    let mut state = State::Code;
    let mut bracket_depth = 0_u32;
    let mut rest = chars.as_slice();
    while let [first, ..] = rest {
        if *first == '\n' {
            if !matches!(state, State::Text { is_triple: true, .. }) {
                state = State::Code;
            }
            let is_continued = bracket_depth > 0 || matches!(state, State::Text { .. });
            let fresh = PythonLine { is_blank: true, is_continued, ..PythonLine::default() };
            lines.push(std::mem::replace(&mut line, fresh));
            rest = rest.get(1..).unwrap_or(&[]);
            continue;
        }
        let (next_state, length) = step(state, rest);
        line.is_blank &= first.is_whitespace();
        let token = rest.get(..length).unwrap_or(rest);
        match (state, next_state) {
            (State::Code, State::Code) => {
                match first {
                    '(' | '[' | '{' => bracket_depth += 1,
                    ')' | ']' | '}' => bracket_depth = bracket_depth.saturating_sub(1),
                    _ => {}
                }
                line.code.extend(token);
            }
            (State::Code, State::Text { .. }) | (State::Text { .. }, State::Code) => {
                line.code.extend(token);
            }
            (State::Comment, _) => line.comment.extend(token),
            _ => line.code.extend(token.iter().map(|_| ' ')),
        }
        rest = rest.get(length..).unwrap_or(&[]);
        state = next_state;
    }
    if !line.is_blank {
        lines.push(line);
    }
    lines
}

/// Returns the state after the next token and the token's length.
fn step(state: State, rest: &[char]) -> (State, usize) {
    match (state, rest) {
        (State::Code, ['#', ..]) => (State::Comment, 1),
        (State::Code, [a @ ('"' | '\''), b, c, ..]) if a == b && b == c => {
            (State::Text { quote: *a, is_triple: true }, 3)
        }
        (State::Code, [quote @ ('"' | '\''), ..]) => {
            (State::Text { quote: *quote, is_triple: false }, 1)
        }
        (State::Text { .. }, ['\\', next, ..]) if *next != '\n' => (state, 2),
        (State::Text { quote, is_triple: true }, [a, b, c, ..])
            if *a == quote && *b == quote && *c == quote =>
        {
            (State::Code, 3)
        }
        (State::Text { quote, is_triple: false }, [a, ..]) if *a == quote => (State::Code, 1),
        _ => (state, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_comments_are_blanked() {
        let lines = scan("a = \"# no\"  # yes\nb = '''x\n  y''' + c\n");
        assert_eq!(lines[0].code.trim_end(), "a = \"    \"");
        assert_eq!(lines[0].comment, " yes");
        assert!(lines[2].is_continued);
        assert_eq!(lines[2].code, "   ''' + c");
    }

    #[test]
    fn brackets_continue_a_statement() {
        let lines = scan("def f(\n    a,\n) -> int:\n    return 1\n");
        let continued: Vec<bool> = lines.iter().map(|line| line.is_continued).collect();
        assert_eq!(continued, [false, true, true, false]);
        assert_eq!(lines[3].indent(), 4);
    }

    #[test]
    fn docstrings_are_bare_strings() {
        let lines = scan("\"\"\"Says\n\nmore.\"\"\"\nx = \"\"\n");
        let bare: Vec<bool> = lines.iter().map(PythonLine::is_bare_string).collect();
        assert_eq!(bare, [true, false, true, false]);
    }
}
