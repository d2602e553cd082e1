//! What went wrong, with the code that Triton tells clients.

use std::any::Any;
use std::fmt::Display;

use tierbed_core::{Error, ErrorKind};
use tierbed_serve::Refused;

/// Kinds of errors of Triton's interface, by their numbers there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Internal = 1,
    NotFound = 2,
    InvalidArg = 3,
    Unavailable = 4,
    Unsupported = 5,
}

/// An error as Triton takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: Code, message: impl Display) -> Self {
        Self { code, message: message.to_string() }
    }

    /// Of a panic, which ends at the border to Triton.
    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("a panic without a message");
        Self::new(Code::Internal, format_args!("the backend panicked: {text}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid => Code::InvalidArg,
            ErrorKind::Unsupported => Code::Unsupported,
            ErrorKind::Closed => Code::Unavailable,
            _ => Code::Internal,
        };
        Self::new(code, error)
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        let code = match refused.status {
            404 => Code::NotFound,
            501 => Code::Unsupported,
            503 => Code::Unavailable,
            400..=499 => Code::InvalidArg,
            _ => Code::Internal,
        };
        Self::new(code, refused.message)
    }
}
