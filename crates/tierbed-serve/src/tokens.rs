//! Tokens of clients: who may ask, and for what.
//!
//! A file has a line for each client: a name, the SHA-256 of its token in hexadecimal, and what it
//! may do: `infer`, `metrics`, `admin`, or several with commas between. A token is as good as it is
//! random; its digest tells nobody what it is, so others may read the file. It is read again when
//! it changes. One that is damaged by then is told by the log, and the tokens before it stay valid:
//! a slip of the pen must not shut out everybody.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use axum::http::{header, HeaderMap, StatusCode};
use sha2::{Digest, Sha256};
use tierbed_core::Error;

use crate::answer::Refusal;
use crate::stamp::{read_small, Stamp};

/// Bytes of a digest.
const DIGEST_BYTES: usize = 32;

/// What a client may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Lookups, predictions, and what is said of models.
    Infer,
    /// Metrics and failures of the server.
    Metrics,
    /// What changes the server.
    Admin,
}

impl Scope {
    fn name(self) -> &'static str {
        match self {
            Self::Infer => "infer",
            Self::Metrics => "metrics",
            Self::Admin => "admin",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Infer, Self::Metrics, Self::Admin].into_iter().find(|scope| scope.name() == name)
    }
}

/// One line of the file.
#[derive(Debug, PartialEq, Eq)]
struct Client {
    name: String,
    digest: [u8; DIGEST_BYTES],
    scopes: Vec<Scope>,
}

/// The clients of a file.
#[derive(Debug)]
pub(crate) struct Tokens {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    clients: Vec<Client>,
    /// Of what was read last, whole or damaged; none when there was no file.
    stamp: Option<Stamp>,
}

impl Tokens {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// `Invalid` for a file that cannot be read, has no client, or a line of another form.
    pub(crate) fn open(path: &Path) -> tierbed_core::Result<Self> {
        // Before the file is read: what changes meanwhile is read again.
        let stamp = Stamp::of(path);
        let clients = read(path)?;
        Ok(Self { path: path.to_owned(), state: Mutex::new(State { clients, stamp }) })
    }

    /// Reads the file again if it has changed; returns how many clients there are now.
    ///
    /// # Errors
    /// As [`Tokens::open`], once for each change; the clients stay as they were.
    pub(crate) fn follow(&self) -> tierbed_core::Result<Option<usize>> {
        let found = Stamp::of(&self.path);
        if self.state.lock().unwrap_or_else(PoisonError::into_inner).stamp == found {
            return Ok(None);
        }
        self.reload().map(Some)
    }

    /// Reads the file again; returns how many clients there are now.
    ///
    /// # Errors
    /// As [`Tokens::open`]; the clients stay as they were.
    pub(crate) fn reload(&self) -> tierbed_core::Result<usize> {
        // Before the file is read: what changes meanwhile is read again.
        let stamp = Stamp::of(&self.path);
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stamp = stamp;
        let clients = read(&self.path)?;
        let count = clients.len();
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clients = clients;
        Ok(count)
    }

    /// Checks that a request has a token which may do what `scope` says.
    ///
    /// # Errors
    /// 401 without a token that is known, 403 for one that may do something else.
    pub(crate) fn check(&self, headers: &HeaderMap, scope: Scope) -> Result<(), Refusal> {
        let unknown = |message| Refusal::new(StatusCode::UNAUTHORIZED, "invalid", message);
        let Some(token) = bearer(headers) else {
            return Err(unknown("the request needs the header Authorization: Bearer TOKEN"));
        };
        let digest: [u8; DIGEST_BYTES] = Sha256::digest(token).into();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(client) = state.clients.iter().find(|client| client.digest == digest) else {
            return Err(unknown("the token is not known"));
        };
        if client.scopes.contains(&scope) {
            return Ok(());
        }
        let message =
            format!("the token of {} does not allow this: it lacks {}", client.name, scope.name());
        Err(Refusal::new(StatusCode::FORBIDDEN, "invalid", message))
    }
}

/// Returns the token of a request that has exactly one.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !token.is_empty()).then_some(token)
}

fn read(path: &Path) -> tierbed_core::Result<Vec<Client>> {
    let text = String::from_utf8(read_small(path, "tokens")?).map_err(|cause| {
        Error::invalid("the tokens are no text").with("path", path.display()).with("cause", cause)
    })?;
    parse(&text).map_err(|error| error.with("path", path.display()))
}

fn parse(text: &str) -> tierbed_core::Result<Vec<Client>> {
    let wrong = |message: &str| {
        Error::invalid(message).with(
            "remedy",
            "write a line for each client: name, SHA-256 of its token, then infer, metrics, admin",
        )
    };
    let mut clients: Vec<Client> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some(client) = client(line) else {
            return Err(wrong("a line of the tokens is of another form").with("line", number));
        };
        let is_twice = |known: &Client| known.name == client.name || known.digest == client.digest;
        if clients.iter().any(is_twice) {
            return Err(wrong("a client or a token stands twice").with("line", number));
        }
        clients.push(client);
    }
    if clients.is_empty() {
        return Err(wrong("the tokens name no client: nobody could ask"));
    }
    Ok(clients)
}

/// Reads a line: `name digest scope[,scope]`.
fn client(line: &str) -> Option<Client> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, digest, scopes] = words[..] else { return None };
    let scopes = scopes.split(',').map(Scope::from_name).collect::<Option<Vec<_>>>()?;
    Some(Client { name: name.to_owned(), digest: digest_of(digest)?, scopes })
}

fn digest_of(text: &str) -> Option<[u8; DIGEST_BYTES]> {
    let mut digest = [0; DIGEST_BYTES];
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    if pairs.len() != DIGEST_BYTES {
        return None;
    }
    for (byte, [high, low]) in digest.iter_mut().zip(pairs) {
        let digit = |of: u8| char::from(of).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = (digit(*high)? << 4) | digit(*low)?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests;
