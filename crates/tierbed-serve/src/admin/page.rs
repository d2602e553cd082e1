//! The live page: one file, which asks this server only.

use std::sync::OnceLock;

use axum::http::{header, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use sha2::{Digest, Sha256};

use crate::answer::with_type;

const PAGE: &str = include_str!("page.html");

/// Sends the page. The policy lets the browser run its own script and style, and nothing else.
pub(super) async fn show() -> Response {
    static POLICY: OnceLock<String> = OnceLock::new();
    let policy = POLICY.get_or_init(policy);
    let mut response = with_type(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, policy.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        let Ok(value) = HeaderValue::from_str(value) else { panic!("{value} is ASCII") };
        headers.insert(name, value);
    }
    response
}

/// Returns the page's policy, which names its script and its style by their digests.
///
/// Source: Content Security Policy Level 3.
fn policy() -> String {
    let (style, script) = (digest_of("style"), digest_of("script"));
    format!(
        "default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    )
}

/// Returns the SHA-256, in base64, of the page's only element of a kind.
fn digest_of(element: &str) -> String {
    let (open, close) = (format!("<{element}>"), format!("</{element}>"));
    let inner = PAGE.split_once(&open).and_then(|(_, rest)| rest.split_once(&close));
    let Some((inner, _)) = inner else { panic!("the page has no {element}") };
    base64(&Sha256::digest(inner))
}

/// Writes bytes in base64, with padding.
///
/// Source: RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let word = group.iter().fold(0, |word, byte| word << 8 | usize::from(*byte));
        let word = word << (8 * (3 - group.len()));
        for at in 0..4 {
            let digit = DIGITS.get(word >> (18 - 6 * at) & 63).filter(|_| at <= group.len());
            text.push(digit.map_or('=', |digit| char::from(*digit)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_its_rfc() {
        let vectors = [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v")];
        for (bytes, text) in vectors.into_iter().chain([("foobar", "Zm9vYmFy"), ("~~?", "fn4/")]) {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn the_page_takes_nothing_from_elsewhere_and_writes_no_markup() {
        assert_eq!(PAGE.matches("<script").count(), 1);
        assert_eq!(PAGE.matches("<style").count(), 1);
        // The policy would stop these; text from the server goes into text nodes only.
        for never in ["http:", "https:", "src=", "style=", "onclick=", "innerHTML", "eval("] {
            let found = PAGE.replace("http://www.w3.org/2000/svg", "").contains(never);
            assert!(!found, "the page has {never}");
        }
        assert!(policy().is_ascii());
    }
}
