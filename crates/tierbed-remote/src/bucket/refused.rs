//! What a store's refusal means, and what to do about it.

use std::error::Error as StdError;
use std::ops::Range;

use object_store::Error as StoreError;
use tierbed_core::{Error, ErrorKind};

use super::BucketKind;
use crate::objects::no_conditions;

/// What was asked of a bucket.
pub(super) struct Asked<'a> {
    pub(super) kind: BucketKind,
    pub(super) bucket: &'a str,
    pub(super) endpoint: Option<&'a str>,
    pub(super) verb: &'static str,
    pub(super) name: &'a str,
}

/// Whether a write was refused because its condition did not hold.
pub(super) fn is_lost(error: &StoreError) -> bool {
    match error {
        // 404 of a write that replaces: the object is gone, unless the bucket is.
        StoreError::Precondition { source, .. } => !is_of_bucket(&**source),
        StoreError::AlreadyExists { .. } => true,
        _ => false,
    }
}

/// Whether a write was given up because of another one at the same time, and may be made again.
pub(super) fn is_conflict(kind: BucketKind, error: &StoreError) -> bool {
    // 412 is wrapped twice, 409 once. Of others both say that the object is there.
    kind == BucketKind::S3
        && matches!(error, StoreError::AlreadyExists { source, .. } if !source.is::<StoreError>())
}

/// Whether an answer says that there is no bucket.
pub(super) fn is_of_bucket(cause: &(dyn StdError + Send + Sync + 'static)) -> bool {
    code_of(&words(cause)).is_some_and(is_no_bucket)
}

/// Azure calls a bucket a container.
fn is_no_bucket(code: &str) -> bool {
    matches!(code, "NoSuchBucket" | "ContainerNotFound")
}

/// Returns an error and its causes, as far as each says something new.
fn words(cause: &(dyn StdError + 'static)) -> String {
    let mut text = cause.to_string();
    let mut next = cause.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text
}

/// Returns what stands in an element of an answer.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(value, _)| value)
}

fn code_of(text: &str) -> Option<&str> {
    element(text, "Code")
}

impl Asked<'_> {
    /// Returns `meaning` with what was asked, and what `cause` says.
    fn error(&self, meaning: &Error, cause: Option<&str>) -> Error {
        let mut error = Error::new(meaning.kind(), meaning.message())
            .with("bucket", self.bucket)
            .with("request", self.verb);
        if !self.name.is_empty() {
            error = error.with("name", self.name);
        }
        if let Some(endpoint) = self.endpoint {
            error = error.with("endpoint", endpoint);
        }
        let said = |text| element(text, "Message").filter(|said| !said.is_empty());
        if let Some(cause) = cause {
            error = match code_of(cause) {
                Some(code) => error.with("code", code).with("cause", said(cause).unwrap_or(code)),
                None => error.with("cause", cause),
            };
        }
        let advice = meaning.context().iter();
        advice.fold(error, |error, (key, value)| error.with(key, value))
    }

    /// Returns the error of an answer that the store gave, or did not give.
    pub(super) fn refused(&self, cause: &StoreError) -> Error {
        let text = words(cause);
        let meaning = match self.kind {
            BucketKind::S3 => meaning_of(cause, &text),
            BucketKind::Gs | BucketKind::Az => meaning_elsewhere(cause, &text),
        };
        self.error(&meaning, Some(&text))
    }

    /// Returns the error of an object that ends before what was asked for.
    pub(super) fn too_short(&self, range: &Range<u64>) -> Error {
        self.error(&ends_before(), None).with("range", format_args!("{range:?}"))
    }

    /// Returns the error of a store that does not compare before it writes.
    pub(super) fn no_conditions(&self) -> Error {
        self.error(&no_conditions(), None)
    }
}

fn meaning_of(cause: &StoreError, text: &str) -> Error {
    let code = code_of(text).unwrap_or("");
    match (cause, code) {
        (_, "NoSuchBucket") => Error::invalid("there is no such bucket").with(
            "remedy",
            "create the bucket, or name another; AWS_ENDPOINT_URL says at which store",
        ),
        (_, "RequestTimeTooSkewed") => {
            Error::invalid("clocks of this machine and the store differ")
                .with("remedy", "set the clock of this machine")
        }
        _ if text.contains("/latest/api/token") || text.contains("/latest/meta-data") => {
            Error::invalid("there are no credentials for the bucket")
                .with("remedy", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
        _ if is_elsewhere(text, code) => Error::invalid("bucket is in another region")
            .with("remedy", "set AWS_REGION to the region of the bucket"),
        _ if text.contains("certificate") => {
            Error::invalid("certificate of the store is not known")
                .with("remedy", "name the file of its authority by SSL_CERT_FILE")
        }
        (StoreError::NotImplemented { .. } | StoreError::NotSupported { .. }, _)
        | (_, "NotImplemented") => no_conditions(),
        _ => by_status(text),
    }
}

/// What an answer of a store means that is none of S3: its settings have other names.
fn meaning_elsewhere(cause: &StoreError, text: &str) -> Error {
    let refused =
        matches!(cause, StoreError::Unauthenticated { .. } | StoreError::PermissionDenied { .. });
    match code_of(text).unwrap_or("") {
        code if is_no_bucket(code) => Error::invalid("there is no such bucket")
            .with("remedy", "create the bucket or container, or name another"),
        // Who has no credentials asks the machine for some: of Google, or of Azure.
        _ if text.contains("/computeMetadata/") || text.contains("/metadata/identity/") => {
            Error::invalid("there are no credentials for the bucket").with(
                "remedy",
                "set GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and its key",
            )
        }
        _ if refused || text.contains("status code: 401") || text.contains("status code: 403") => {
            Error::invalid("store does not let us do this").with(
                "remedy",
                "check the credentials, and that they may get, put, delete and list",
            )
        }
        _ if text.contains("certificate") => {
            Error::invalid("certificate of the store is not known")
                .with("remedy", "name the file of its authority by SSL_CERT_FILE")
        }
        _ => by_status(text),
    }
}

/// 301 and 307 without an address, and 400 where a signature is for another region.
fn is_elsewhere(text: &str, code: &str) -> bool {
    text.contains("redirect without LOCATION")
        || matches!(code, "PermanentRedirect" | "AuthorizationHeaderMalformed")
}

fn by_status(text: &str) -> Error {
    const SAYS: &str = "status code: ";
    let status = text.split_once(SAYS).and_then(|(_, rest)| rest.get(..3)?.parse::<u16>().ok());
    let io = |what: &str| Error::new(ErrorKind::Io, what);
    match status {
        Some(507) => Error::new(ErrorKind::NoSpace, "store is full"),
        Some(401 | 403) => Error::invalid("store does not let us do this").with(
            "remedy",
            "check AWS_ACCESS_KEY_ID and its secret, and that it may get, put, delete and list",
        ),
        Some(416) => ends_before(),
        Some(408 | 409 | 429 | 500..) => io("store is busy, or fails"),
        Some(_) => Error::invalid("store refuses the request"),
        None if text.contains("Error performing") => io("store cannot be reached"),
        None => io("store did not answer whole"),
    }
}

fn ends_before() -> Error {
    Error::corruption("object ends before its range")
}
