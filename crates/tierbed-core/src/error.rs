//! The error type: kind, message, values, cause.
//!
//! Three classes of events, three treatments. An *outcome* (a miss, an absent row) is an enum
//! value or an `Option`; an *operating error* (bad argument, bad disk, full disk) is an
//! [`Error`]; a *programmer error* is an `assert!`. The kind of an error prescribes the remedy,
//! the context names the thing.

use std::error::Error as StdError;
use std::fmt;

/// Result with Tierbed's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the caller should do. New kinds need a design note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Fix the call: an argument, a name, a budget, or a file of another format.
    Invalid,
    /// Stop and restore from a checkpoint: bytes on disk are not what was written.
    Corruption,
    /// The device or the operating system refused; it may be retried.
    Io,
    /// Free disk space or raise the quota, then reopen.
    NoSpace,
    /// An earlier flush, sync or update failed; reopen to continue from the last checkpoint.
    Poisoned,
    /// The store is closed, or another process owns it.
    Closed,
    /// This store, device or build cannot do that.
    Unsupported,
}

impl ErrorKind {
    /// Returns the kind's lower-case name, as shown to users and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Corruption => "corruption",
            Self::Io => "io",
            Self::NoSpace => "no_space",
            Self::Poisoned => "poisoned",
            Self::Closed => "closed",
            Self::Unsupported => "unsupported",
        }
    }
}

/// An operating error: kind, message, and the values one needs on call.
///
/// Messages are lower case without a full stop; context pairs use the glossary's names
/// (`table`, `page_id`, `offset_bytes`, `expected`, `found`, `path`, `remedy`).
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    minimum_bytes: Option<u64>,
    source: Option<Box<dyn StdError + Send + Sync + 'static>>,
}

impl Error {
    /// Builds an error of `kind`.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            context: Vec::new(),
            minimum_bytes: None,
            source: None,
        }
    }

    /// Builds an [`ErrorKind::Invalid`] error.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Builds an [`ErrorKind::Corruption`] error.
    #[must_use]
    pub fn corruption(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corruption, message)
    }

    /// Builds an [`ErrorKind::Unsupported`] error.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Wraps an operating-system error: full disks become [`ErrorKind::NoSpace`], the rest
    /// [`ErrorKind::Io`].
    #[must_use]
    pub fn os(message: impl Into<String>, source: std::io::Error) -> Self {
        // ENOSPC (28) and EDQUOT (122) on Linux; StorageFull covers the portable spelling.
        let is_full = matches!(source.raw_os_error(), Some(28 | 122))
            || source.kind() == std::io::ErrorKind::StorageFull;
        let kind = if is_full { ErrorKind::NoSpace } else { ErrorKind::Io };
        let mut error = Self::new(kind, message).with("cause", &source);
        if is_full {
            error = error.with("remedy", "free disk space, then reopen the store");
        }
        error.source = Some(Box::new(source));
        error
    }

    /// Adds one context pair.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((key, value.to_string()));
        self
    }

    /// Adds the least memory that would do, as the context `minimum_bytes` and as a number.
    #[must_use]
    pub fn with_minimum_bytes(self, bytes: u64) -> Self {
        Self { minimum_bytes: Some(bytes), ..self.with("minimum_bytes", bytes) }
    }

    /// Returns the least memory that would do, where memory was too small.
    #[must_use]
    pub fn minimum_bytes(&self) -> Option<u64> {
        self.minimum_bytes
    }

    /// Returns the kind, which prescribes the remedy.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the message without context.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the context pairs in the order they were added.
    #[must_use]
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.context
    }

    /// Returns the operating system's error number, when there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref()?.downcast_ref::<std::io::Error>()?.raw_os_error()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for (at, (key, value)) in self.context.iter().enumerate() {
            f.write_str(if at == 0 { " (" } else { ", " })?;
            write!(f, "{key}: {value}")?;
        }
        if !self.context.is_empty() {
            f.write_str(")")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_shows_message_and_context() {
        let error =
            Error::corruption("page checksum mismatch").with("page_id", 7).with("table", "c3");
        assert_eq!(error.to_string(), "page checksum mismatch (page_id: 7, table: c3)");
        assert_eq!(error.kind(), ErrorKind::Corruption);
    }

    #[test]
    fn a_full_disk_has_its_own_kind() {
        let full = Error::os("write failed", std::io::Error::from_raw_os_error(28));
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert_eq!(full.errno(), Some(28));
        let other = Error::os("write failed", std::io::Error::from_raw_os_error(5));
        assert_eq!(other.kind(), ErrorKind::Io);
    }
}
