//! One version on its way: threads that fetch, verify and mark parts.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tierbed_core::{Error, Result};
use tierbed_io::{Device, Folder, FsFolder, OpenMode};

use super::{Missing, Pull};
use crate::digest::Hasher;
use crate::location::{not_whole, Location};
use crate::marks::Marks;
use crate::parts::{Part, PartAt, Parts};
use crate::retry::stopped;

/// Bytes of one request: a slow network ends it before its time limit, and eight fit in memory.
const PIECE_BYTES: u64 = 8 << 20;
/// How often the caller is told while nothing arrives, so that Ctrl-C is heard.
const TELL: Duration = Duration::from_millis(100);

/// A download, and what its threads share.
pub(super) struct Download<'a> {
    location: &'a Location,
    parts: &'a Parts,
    how: &'a Pull,
    files: Vec<Arc<dyn Device>>,
    marks: Mutex<Marks>,
    left: Vec<PartAt>,
    next: Mutex<usize>,
    stop: AtomicBool,
    error: Mutex<Option<Error>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Download<'a> {
    /// Opens the files of a version in `folder`, and finds out which parts are left.
    pub(super) fn begin(
        location: &'a Location,
        folder: &FsFolder,
        version: &'a Missing,
        how: &'a Pull,
    ) -> Result<Self> {
        let parts = &version.parts;
        let (mut marks, mut done) = Marks::open(folder, version.link.parts_sha256)?;
        let mut files = Vec::with_capacity(parts.files.len());
        let mut is_new = false;
        for file in &parts.files {
            let device = folder.open(&file.name, OpenMode::Create)?;
            if device.len_bytes()? != file.bytes {
                is_new = true;
                device.set_len(file.bytes)?;
                device.sync()?;
            }
            files.push(device);
        }
        // A file that is not as long as it was made was not made by who left the marks.
        if is_new && !done.is_empty() {
            marks.clear()?;
            done.clear();
        }
        // Names last before marks do.
        folder.sync()?;
        let left = parts.all().filter(|at| !done.contains(at)).collect();
        Ok(Self {
            location,
            parts,
            how,
            files,
            marks: Mutex::new(marks),
            left,
            next: Mutex::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
        })
    }

    /// Returns how many parts are left.
    pub(super) fn part_count(&self) -> u64 {
        self.left.len() as u64
    }

    /// Returns how many bytes they have.
    pub(super) fn bytes_left(&self) -> u64 {
        let parts = self.left.iter().map(|at| self.part(*at));
        parts.map(|part| part.range.end - part.range.start).sum()
    }

    #[expect(clippy::expect_used, reason = "parts that are left are parts of the version")]
    fn part(&self, at: PartAt) -> Part<'a> {
        self.parts.get(at).expect("a part of the version")
    }

    /// Fetches all parts that are left; `told` hears of the bytes that it fetched.
    pub(super) fn run(self, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        let mut done = 0;
        let thread_count = self.how.thread_count.clamp(1, self.left.len().max(1));
        let (sender, arrived) = channel();
        let heard = std::thread::scope(|scope| {
            for _ in 0..thread_count {
                let sender = sender.clone();
                scope.spawn(|| self.work(sender));
            }
            drop(sender);
            loop {
                match arrived.recv_timeout(TELL) {
                    Ok(bytes) => done += bytes,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return told(done),
                }
                if let Err(error) = told(done) {
                    self.stop.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        });
        let failed = self.error.into_inner().unwrap_or_else(PoisonError::into_inner);
        heard.and(failed.map_or(Ok(()), Err))
    }

    /// Fetches parts until none is left, or one of the threads fails.
    fn work(&self, arrived: Sender<u64>) {
        while let Some(at) = self.take() {
            if let Err(error) = self.fetch(at, &arrived) {
                self.stop.store(true, Ordering::Relaxed);
                // The first one is the cause of the others.
                lock(&self.error).get_or_insert(error);
                return;
            }
        }
    }

    fn take(&self) -> Option<PartAt> {
        if self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let mut next = lock(&self.next);
        let at = self.left.get(*next).copied();
        *next += 1;
        at
    }

    /// Brings a part here, verified, synced and marked.
    #[expect(clippy::expect_used, reason = "each file was opened; a piece is 8 MiB at most")]
    fn fetch(&self, at: PartAt, arrived: &Sender<u64>) -> Result<()> {
        let part = self.part(at);
        let file = self.files.get(at.file as usize).expect("a file of the version");
        let fetched = self.how.retry.run(&self.stop, || self.fetch_once(&part, &**file));
        fetched.map_err(|error| error.with("file", part.file).with("part", at.part))?;
        // Never tried again: after a failed sync the bytes may be gone for good.
        file.sync()?;
        for piece in pieces(&part.range) {
            let len = u32::try_from(piece.end - piece.start).expect("a piece is small");
            file.drop_cached(piece.start, len);
        }
        lock(&self.marks).push(at)?;
        // Nobody listens any more once the caller wants an end.
        let _ = arrived.send(part.range.end - part.range.start);
        Ok(())
    }

    fn fetch_once(&self, part: &Part<'_>, file: &dyn Device) -> Result<()> {
        let seq = self.parts.seq;
        let name = seq.object(part.file);
        let mut hasher = Hasher::default();
        for piece in pieces(&part.range) {
            self.how.bandwidth.take(piece.end - piece.start, &self.stop)?;
            if self.stop.load(Ordering::Relaxed) {
                return Err(stopped());
            }
            let len = piece.end - piece.start;
            let bytes = self.location.objects.get_range(&name, piece.clone())?;
            let bytes = bytes.ok_or_else(|| not_whole("a file of the version is gone", seq))?;
            if bytes.len() as u64 != len {
                return Err(not_whole("a file of the version is cut short", seq));
            }
            hasher.update(&bytes);
            file.write_at(piece.start, &bytes)?;
        }
        let found = hasher.finish();
        if found == part.sha256 {
            return Ok(());
        }
        let error = not_whole("a part is not the one that was published", seq);
        Err(error.with("expected", part.sha256).with("found", found))
    }
}

/// Cuts a range into the requests that fetch it.
fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let (start, end) = (range.start, range.end);
    let count = (end - start).div_ceil(PIECE_BYTES);
    (0..count).map(move |at| {
        let start = start + at * PIECE_BYTES;
        start..end.min(start + PIECE_BYTES)
    })
}
