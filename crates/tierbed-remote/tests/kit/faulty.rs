//! A store that fails on command: cuts, corrupts, answers 503 and 412, or dies.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_remote::{Chunks, Found, Listed, Objects, Put, When};
use tierbed_sim::kill::die;

/// A request on its way to the store.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Counted from 0.
    pub number: u64,
    pub verb: &'static str,
    pub name: &'a str,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The store answers.
    Fine,
    /// It refuses, and nothing is done: 503.
    Busy,
    /// It is done, and the answer is lost on the way.
    DoneUnheard,
    /// A bit of what is read is another.
    Flipped,
    /// What is read ends early.
    Cut,
    /// It is done, and answered by 412: the client asked again.
    DoneAndLost,
    /// It is done, whatever its condition was.
    Unconditional,
    /// Who asks is killed, before or after it is done.
    Kills { after: bool },
}

type Answers = dyn Fn(&Call<'_>) -> Answer + Send + Sync;

/// A store that answers as it is told.
pub struct Faulty {
    inner: Arc<dyn Objects>,
    answer: Box<Answers>,
    count: AtomicU64,
    /// Names and beginnings of the ranges that were read whole.
    pub ranges: Mutex<Vec<(String, u64)>>,
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faulty")
    }
}

fn busy(call: &Call<'_>) -> Error {
    Error::new(ErrorKind::Io, "503 slow down").with("verb", call.verb).with("name", call.name)
}

impl Faulty {
    pub fn new(
        inner: Arc<dyn Objects>,
        answer: impl Fn(&Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let count = AtomicU64::new(0);
        Self { inner, answer: Box::new(answer), count, ranges: Mutex::default() }
    }

    /// Returns how many requests there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    fn ask<T>(
        &self,
        verb: &'static str,
        name: &str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Answer)> {
        let call = Call { number: self.count.fetch_add(1, Ordering::SeqCst), verb, name };
        let answer = (self.answer)(&call);
        match answer {
            Answer::Busy => return Err(busy(&call)),
            Answer::Kills { after: false } => die(),
            _ => {}
        }
        let done = work()?;
        match answer {
            Answer::DoneUnheard => Err(busy(&call)),
            Answer::Kills { .. } => die(),
            answer => Ok((done, answer)),
        }
    }
}

fn damaged(mut bytes: Vec<u8>, answer: Answer) -> Vec<u8> {
    match answer {
        Answer::Flipped => {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 4;
            }
        }
        Answer::Cut => bytes.truncate(bytes.len() / 2),
        _ => {}
    }
    bytes
}

impl Objects for Faulty {
    fn list(&self, folder: Option<&str>) -> Result<Vec<Listed>> {
        let listed = self.ask("list", folder.unwrap_or(""), || self.inner.list(folder));
        listed.map(|(listed, _)| listed)
    }

    fn get(&self, name: &str, bytes_max: u64) -> Result<Option<Found>> {
        let (found, answer) = self.ask("get", name, || self.inner.get(name, bytes_max))?;
        Ok(found.map(|found| Found { bytes: damaged(found.bytes, answer), ..found }))
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Option<Vec<u8>>> {
        let read = || self.inner.get_range(name, range.clone());
        let (found, answer) = self.ask("get_range", name, read)?;
        self.ranges.lock().unwrap().push((name.to_owned(), range.start));
        Ok(found.map(|bytes| damaged(bytes, answer)))
    }

    fn put(&self, name: &str, bytes: &[u8], when: &When) -> Result<Put> {
        let (put, answer) = self.ask("put", name, || self.inner.put(name, bytes, when))?;
        match answer {
            Answer::DoneAndLost => Ok(Put::Lost),
            Answer::Unconditional => self.inner.put(name, bytes, &When::Always),
            _ => Ok(put),
        }
    }

    fn put_large(&self, name: &str, chunks: &mut Chunks<'_>) -> Result<()> {
        let (done, _) = self.ask("put_large", name, || self.inner.put_large(name, chunks))?;
        Ok(done)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.ask("remove", name, || self.inner.remove(name)).map(drop)
    }
}
