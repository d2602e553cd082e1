//! Throttle for repeated log lines.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A line of a kind is written at once; then so many within a span, and the rest is counted.
const LINES_MAX: u32 = 5;
const SPAN_US: u64 = 10_000_000;

/// Counts lines of each kind.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    spans: Mutex<BTreeMap<&'static str, Span>>,
}

#[derive(Debug, Default)]
struct Span {
    start_us: u64,
    line_count: u32,
    suppressed: u64,
}

impl Throttle {
    /// Tells whether a line of this kind is written now, and how many were left out before it.
    pub(super) fn admit(&self, what: &'static str, now_us: u64) -> Option<u64> {
        // A span's counts are whole after every statement.
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let span =
            spans.entry(what).or_insert_with(|| Span { start_us: now_us, ..Span::default() });
        if now_us.saturating_sub(span.start_us) >= SPAN_US {
            (span.start_us, span.line_count) = (now_us, 0);
        }
        if span.line_count >= LINES_MAX {
            span.suppressed += 1;
            return None;
        }
        span.line_count += 1;
        Some(std::mem::take(&mut span.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_lines_of_a_kind_are_counted_and_other_kinds_still_written() {
        let throttle = Throttle::default();
        let admitted = (0..100).filter(|_| throttle.admit("busy", 0).is_some());
        assert_eq!(admitted.count(), LINES_MAX as usize);
        assert_eq!(throttle.admit("panic", 0), Some(0));
        assert_eq!(throttle.admit("busy", SPAN_US - 1), None);
        assert_eq!(throttle.admit("busy", SPAN_US), Some(96));
        assert_eq!(throttle.admit("busy", SPAN_US), Some(0));
    }
}
