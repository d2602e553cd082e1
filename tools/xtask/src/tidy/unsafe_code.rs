//! Is `unsafe` only where it was agreed, and does each use say why it is sound?

use super::rust_scan::{is_word, RustLine};
use super::{File, Finding, Scan};

/// Beginnings of the paths that may hold `unsafe`.
const ALLOWED: [&str; 14] = [
    // RocksDB's C interface, and writable maps.
    "tools/compare/src/ffi",
    "crates/tierbed-data/src/vocabulary/mapping",
    // Memory that several processes write.
    "crates/tierbed-exchange/src/memory",
    "crates/tierbed-io/src/engine/uring",
    "crates/tierbed-io/src/buffer",
    "crates/tierbed-io/src/device/mmap",
    // Handlers of fork, and tests that fork.
    "crates/tierbed-io/src/process",
    "crates/tierbed-io/tests/fork",
    "crates/tierbed-remote/tests/fork",
    "crates/tierbed-io/tests/refused_ring",
    "crates/tierbed-kernels/src/simd",
    // Torch's C interface, and models that it compiled.
    "crates/tierbed-py/src/compiled",
    "crates/tierbed-py/src/tensors",
    // Triton's C interface.
    "crates/tierbed-triton/src/ffi",
];

/// How many lines above an `unsafe` its reason may begin.
const REASON_LINES_MAX: usize = 12;

/// Refuses `unsafe` elsewhere or without a reason.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    let Scan::Rust(lines) = &file.scan else { return Vec::new() };
    let is_allowed = ALLOWED.iter().any(|allowed| file.path.starts_with(allowed));
    let mut findings = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(use_of) = unsafe_use(&line.code) else { continue };
        if !is_allowed {
            let message = "unsafe outside the agreed files (tools/xtask/src/tidy/unsafe_code.rs)";
            findings.push(Finding::new(file, at + 1, message));
        } else if !has_reason(lines, at, use_of) {
            let message = "unsafe without a // SAFETY: line (or # Safety doc) above it";
            findings.push(Finding::new(file, at + 1, message));
        }
    }
    findings
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnsafeUse {
    /// A block or an impl: needs a reason.
    Relied,
    /// A function: needs a contract in its doc.
    Declared,
}

fn unsafe_use(code: &str) -> Option<UnsafeUse> {
    let at = code.match_indices("unsafe").map(|(at, _)| at).find(|&at| {
        let (before, from) = code.split_at(at);
        let after = from.get("unsafe".len()..).unwrap_or("");
        !before.chars().next_back().is_some_and(is_word)
            && !after.chars().next().is_some_and(is_word)
    })?;
    let after = code.get(at + "unsafe".len()..).unwrap_or("").trim_start();
    let is_function = after.starts_with("fn ") || after.starts_with("extern ");
    Some(if is_function { UnsafeUse::Declared } else { UnsafeUse::Relied })
}

/// Looks upwards from line `at` for the reason, across comments, attributes and the beginning
/// of the same statement.
fn has_reason(lines: &[RustLine], at: usize, use_of: UnsafeUse) -> bool {
    let wanted = |line: &RustLine| match use_of {
        UnsafeUse::Relied => line.comment.contains("SAFETY:"),
        UnsafeUse::Declared => {
            line.comment.contains("# Safety") || line.comment.contains("SAFETY:")
        }
    };
    if lines.get(at).is_some_and(wanted) {
        return true;
    }
    let above = lines.iter().take(at).rev().take(REASON_LINES_MAX);
    above.take_while(|line| !ends_statement(&line.code)).any(wanted)
}

fn ends_statement(code: &str) -> bool {
    let code = code.trim_end();
    code.ends_with(';') || code.ends_with('}') && !code.trim_start().starts_with("#[")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: &str = "crates/tierbed-io/src/buffer.rs";

    #[test]
    fn unsafe_lives_in_agreed_files() {
        let source = "// SAFETY: fine.\nunsafe { f() }\n";
        assert_eq!(check(&File::new(HOME, source)), []);
        assert_eq!(check(&File::new("crates/tierbed-train/src/window/lookup.rs", source)).len(), 1);
        assert_eq!(check(&File::new("a.rs", "// unsafe\nlet a = \"unsafe\"; unsafe_code();")), []);
    }

    #[test]
    fn every_use_has_its_own_reason() {
        let shared = "// SAFETY: one.\nunsafe { f() };\nunsafe { g() };\n";
        assert_eq!(check(&File::new(HOME, shared)).len(), 1);
        let spread = "// SAFETY: one.\nlet a =\n    unsafe { f() };\n";
        assert_eq!(check(&File::new(HOME, spread)), []);
        let declared =
            "/// # Safety\n/// `p` is valid.\n#[inline]\npub unsafe fn f(p: *const u8) {";
        assert_eq!(check(&File::new(HOME, declared)), []);
        assert_eq!(check(&File::new(HOME, "/// Reads.\nunsafe fn f() {")).len(), 1);
    }
}
