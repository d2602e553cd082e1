//! Key-value stores: the row's number is the key.

use std::io::Write;

use tierbed_core::Result;

use super::{cut, line, not_protocol, number, Answer, Outcome, Peer};

/// How rows are brought into a store.
pub(super) struct Store {
    /// Appends the request for a row.
    pub(super) set: fn(u64, &[u8], &mut Vec<u8>),
    /// To one that was stored.
    pub(super) reply: &'static [u8],
}

pub(super) const REDIS: Store = Store { set: redis_set, reply: b"+OK\r\n" };
pub(super) const MEMCACHED: Store = Store { set: memcached_set, reply: b"STORED\r\n" };

fn put(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    // A vector takes what it is given.
    let _ = out.write_fmt(text);
}

fn redis_set(id: u64, row: &[u8], out: &mut Vec<u8>) {
    let key = id.to_string();
    put(out, format_args!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), row.len()));
    out.extend_from_slice(row);
    out.extend_from_slice(b"\r\n");
}

fn memcached_set(id: u64, row: &[u8], out: &mut Vec<u8>) {
    put(out, format_args!("set {id} 0 0 {}\r\n", row.len()));
    out.extend_from_slice(row);
    out.extend_from_slice(b"\r\n");
}

/// Asks by `MGET`.
#[derive(Debug)]
pub(super) struct Redis;

/// A bulk string at the beginning of some bytes, and what follows; `None` while it is not whole.
fn bulk(bytes: &[u8]) -> Result<Option<(&[u8], &[u8])>> {
    let Some((head, rest)) = line(bytes) else { return Ok(None) };
    if head == b"$-1" {
        return Ok(Some((&[], rest)));
    }
    let Some(length) = head.strip_prefix(b"$") else { return Err(not_protocol("$", head)) };
    let length = number(length)?;
    let Some((value, rest)) = cut(rest, length) else { return Ok(None) };
    Ok(cut(rest, 2).map(|(_, rest)| (value, rest)))
}

impl Redis {
    /// Goes through the values of an answer; returns what follows.
    fn values<'a>(bytes: &'a [u8], mut each: impl FnMut(&'a [u8])) -> Result<Option<&'a [u8]>> {
        let Some((head, mut rest)) = line(bytes) else { return Ok(None) };
        let Some(count) = head.strip_prefix(b"*") else { return Err(not_protocol("*", head)) };
        for _ in 0..number(count)? {
            let Some((value, after)) = bulk(rest)? else { return Ok(None) };
            each(value);
            rest = after;
        }
        Ok(Some(rest))
    }
}

impl Peer for Redis {
    fn ask(&self, _: u32, ids: &[i64], out: &mut Vec<u8>) {
        put(out, format_args!("*{}\r\n$4\r\nMGET\r\n", ids.len() + 1));
        for id in ids {
            let length = id.checked_ilog10().map_or(1, |digits| digits + 1);
            put(out, format_args!("${length}\r\n{id}\r\n"));
        }
    }

    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>> {
        // An error is a line of its own.
        let (rest, outcome) = match bytes.first() {
            Some(b'-') => (line(bytes).map(|(_, rest)| rest), Outcome::Failed),
            _ => (Self::values(bytes, |_| ())?, Outcome::Good),
        };
        Ok(rest.map(|rest| Answer { byte_count: bytes.len() - rest.len(), outcome }))
    }

    fn rows(&self, answer: &[u8], out: &mut Vec<u8>) {
        // What breaks off leaves fewer rows, which no check takes for right.
        let _ = Self::values(answer, |value| out.extend_from_slice(value));
    }
}

/// Asks by `get`. A row that is not there is left out of the answer.
#[derive(Debug)]
pub(super) struct Memcached;

impl Memcached {
    fn values<'a>(bytes: &'a [u8], mut each: impl FnMut(&'a [u8])) -> Result<Option<&'a [u8]>> {
        let mut rest = bytes;
        loop {
            let Some((head, after)) = line(rest) else { return Ok(None) };
            if head == b"END" {
                return Ok(Some(after));
            }
            // VALUE key flags bytes
            let length =
                head.strip_prefix(b"VALUE ").and_then(|head| head.rsplit(|b| *b == b' ').next());
            let Some(length) = length else { return Err(not_protocol("VALUE or END", head)) };
            let Some((value, end)) = cut(after, number(length)?) else {
                return Ok(None);
            };
            let Some((_, after)) = cut(end, 2) else { return Ok(None) };
            each(value);
            rest = after;
        }
    }
}

impl Peer for Memcached {
    fn ask(&self, _: u32, ids: &[i64], out: &mut Vec<u8>) {
        out.extend_from_slice(b"get");
        for id in ids {
            put(out, format_args!(" {id}"));
        }
        out.extend_from_slice(b"\r\n");
    }

    fn answer(&self, bytes: &[u8]) -> Result<Option<Answer>> {
        let is_error = bytes.starts_with(b"ERROR") || bytes.starts_with(b"SERVER_ERROR");
        let (rest, outcome) = match is_error {
            true => (line(bytes).map(|(_, rest)| rest), Outcome::Failed),
            false => (Self::values(bytes, |_| ())?, Outcome::Good),
        };
        Ok(rest.map(|rest| Answer { byte_count: bytes.len() - rest.len(), outcome }))
    }

    fn rows(&self, answer: &[u8], out: &mut Vec<u8>) {
        // What breaks off leaves fewer rows, which no check takes for right.
        let _ = Self::values(answer, |value| out.extend_from_slice(value));
    }
}
