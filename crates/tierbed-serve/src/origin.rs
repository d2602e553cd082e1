//! Origin of a request: the id that its client gave it, and the trace that it is part of.
//!
//! Both are sent back and stand in the lines of the log about the request, so that a line is found
//! from the client's side. What a client sends is never refused for them: an id that cannot be a
//! header, or a trace that is malformed, is passed over.
//!
//! Source: W3C Trace Context, version 00.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::OnceLock;

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::spans::Steps;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Longest id that is taken.
const ID_BYTES_MAX: usize = 256;

/// Who asked. Ids of bodies become known later than headers.
#[derive(Debug, Default)]
pub(crate) struct Origin {
    id: OnceLock<HeaderValue>,
    pub(crate) trace: Option<Trace>,
    /// What the request does, where its spans are sent.
    pub(crate) steps: Steps,
}

/// What the log says of an origin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named<'a> {
    pub(crate) request_id: Option<&'a str>,
    pub(crate) trace_id: Option<&'a str>,
    pub(crate) span_id: Option<&'a str>,
}

/// A trace, and this request's part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trace {
    /// `00-trace-span-flags`, in which the span is this request's.
    text: String,
    /// The caller's span; 0 where the trace begins here.
    #[cfg(any(test, feature = "otel"))]
    pub(crate) parent_id: u64,
}

impl Origin {
    /// Reads the headers of a request, or the metadata of a call.
    pub(crate) fn new(headers: &HeaderMap) -> Self {
        let trace = Trace::of(headers);
        let origin = Self { id: OnceLock::new(), trace, steps: Steps::default() };
        if let Some(Ok(id)) = headers.get(REQUEST_ID).map(HeaderValue::to_str) {
            origin.name(id);
        }
        origin
    }

    /// Takes the id that a body gives its request, where the header gave none.
    pub(crate) fn name(&self, id: &str) {
        let is_short = !id.is_empty() && id.len() <= ID_BYTES_MAX;
        if let Some(id) = HeaderValue::from_str(id).ok().filter(|_| is_short) {
            // The header's id came first: a proxy knows the request by it.
            let _ = self.id.set(id);
        }
    }

    /// Returns what the log says of it.
    pub(crate) fn named(&self) -> Named<'_> {
        let trace = self.trace.as_ref();
        Named {
            // It was made of a text.
            request_id: self.id.get().and_then(|id| id.to_str().ok()),
            trace_id: trace.map(Trace::trace_id),
            span_id: trace.map(Trace::span_id),
        }
    }

    /// Adds both to the head of an answer.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        if let Some(id) = self.id.get() {
            headers.insert(REQUEST_ID, id.clone());
        }
        if let Some(trace) = &self.trace {
            headers.insert(TRACEPARENT, trace.told());
        }
    }
}

impl Trace {
    /// Continues the trace of a request; `None` without one, or with several.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let mut given = headers.get_all(TRACEPARENT).iter();
        let text = given.next()?.to_str().ok()?;
        if given.next().is_some() {
            return None;
        }
        Self::parse(text)
    }

    /// Parses `version-trace-span-flags`, in which the span is the caller's.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('-');
        let mut field = |digits| fields.next().filter(|field| is_hex(field, digits));
        let (version, trace_id, parent_id, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
        // Later versions may have more fields.
        let is_whole = version != "00" || fields.next().is_none();
        let is_known = version != "ff" && is_whole;
        let is_there = [trace_id, parent_id].iter().all(|id| id.bytes().any(|digit| digit != b'0'));
        (is_known && is_there).then(|| {
            let is_sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
            // Digits were looked at.
            let parent_id = u64::from_str_radix(parent_id, 16).unwrap_or_default();
            Self::new(trace_id, parent_id, is_sampled)
        })
    }

    /// Makes a span of a trace.
    pub(crate) fn new(trace_id: &str, parent_id: u64, is_sampled: bool) -> Self {
        // Two servers that one caller asks need different ids: they are random.
        let span_id = RandomState::new().hash_one(parent_id).max(1);
        let text = format!("00-{trace_id}-{span_id:016x}-{:02x}", u8::from(is_sampled));
        Self {
            text,
            #[cfg(any(test, feature = "otel"))]
            parent_id,
        }
    }

    /// Says that its spans are sent, or that they are not.
    #[cfg(feature = "otel")]
    pub(crate) fn sampled(mut self, is_sampled: bool) -> Self {
        self.text.pop();
        self.text.push(if is_sampled { '1' } else { '0' });
        self
    }

    pub(crate) fn trace_id(&self) -> &str {
        self.digits(3..35)
    }

    pub(crate) fn span_id(&self) -> &str {
        self.digits(36..52)
    }

    #[cfg(any(test, feature = "otel"))]
    pub(crate) fn is_sampled(&self) -> bool {
        self.text.ends_with('1')
    }

    fn digits(&self, range: Range<usize>) -> &str {
        let Some(digits) = self.text.get(range) else { panic!("{:?} is no trace", self.text) };
        digits
    }

    fn told(&self) -> HeaderValue {
        let Ok(value) = HeaderValue::from_str(&self.text) else {
            panic!("digits and hyphens are a header: {:?}", self.text);
        };
        value
    }
}

fn is_hex(field: &str, digits: usize) -> bool {
    field.len() == digits && field.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    #[test]
    fn a_trace_goes_on_under_a_new_span() {
        let of = |text: &str| Trace::parse(text).unwrap();
        let first = of(&format!("00-{TRACE}-{PARENT}-01"));
        let second = of(&format!("00-{TRACE}-{PARENT}-01"));
        assert_eq!((first.trace_id(), first.is_sampled()), (TRACE, true));
        assert_eq!(format!("{:016x}", first.parent_id), PARENT);
        assert!(first.span_id() != PARENT && first.span_id() != second.span_id());
        assert_eq!(first.told(), format!("00-{TRACE}-{}-01", first.span_id()));
        assert_eq!(Trace::parse(first.told().to_str().unwrap()).unwrap().trace_id(), TRACE);
        let later = of(&format!("cc-{TRACE}-{PARENT}-fe-what-comes"));
        assert_eq!(later.told(), format!("00-{TRACE}-{}-00", later.span_id()));
    }

    #[test]
    fn malformed_traces_are_passed_over() {
        let (zeros, upper) = ("0".repeat(32), TRACE.to_uppercase());
        for bad in [
            String::new(),
            format!("00-{TRACE}-{PARENT}"),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{zeros}-{PARENT}-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{upper}-{PARENT}-01"),
            format!("00-{TRACE}-{PARENT}-1"),
            format!("00-{TRACE}0-{PARENT}-01"),
            format!("0-{TRACE}-{PARENT}-01"),
        ] {
            assert_eq!(Trace::parse(&bad), None, "{bad}");
        }
        let mut twice = HeaderMap::new();
        for _ in 0..2 {
            let text = format!("00-{TRACE}-{PARENT}-01");
            twice.append(TRACEPARENT, text.parse().unwrap());
        }
        assert_eq!(Origin::new(&twice).trace, None);
    }

    #[test]
    fn the_header_names_a_request_before_its_body() {
        let mut headers = HeaderMap::new();
        let named = |headers: &HeaderMap, id: &str| {
            let origin = Origin::new(headers);
            origin.name(id);
            origin.named().request_id.map(str::to_owned)
        };
        assert_eq!(named(&headers, "of-body").as_deref(), Some("of-body"));
        for bad in ["", "line\nbreak", "caf\u{e9}", &"long".repeat(ID_BYTES_MAX)] {
            assert_eq!(named(&headers, bad), None, "{bad:?}");
        }
        headers.insert(REQUEST_ID, HeaderValue::from_static("of-header"));
        assert_eq!(named(&headers, "of-body").as_deref(), Some("of-header"));
    }
}
