//! The conformance kit of devices, I/O engines and folders.
//!
//! Each function panics with what was broken; call them from tests, as those of `tierbed-io`
//! and of the simulated disk do.

#![expect(clippy::expect_used, reason = "checks panic: they are tests as a library")]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;
use tierbed_io::{
    BufId, Completion, Device, DeviceId, Folder, IoEngine, Op, OpenMode, Request, PAGE_BYTES,
    SECTOR_BYTES,
};

/// Longest device a check grows.
const LEN_BYTES_MAX: u64 = 256 << 10;

/// Checks `device` through `engine` against a plain vector: `op_count` random reads and writes,
/// many in flight, at sector and at odd byte positions, between changes of length. The device
/// must be empty and writable, and the engine idle.
///
/// # Panics
///
/// When a promise of [`Device`] or [`IoEngine`] is broken.
pub fn check_device(
    engine: &mut dyn IoEngine,
    device: Arc<dyn Device>,
    seed: u64,
    op_count: usize,
) {
    let id = engine.attach(Arc::clone(&device));
    let mut check =
        Check { engine, id, model: Vec::new(), flying: Vec::new(), rng: SplitMix64::new(seed) };
    for at in 0..op_count {
        if at % 64 == 63 {
            check.drain();
            device.sync().expect("sync of a healthy device works");
            check.change_length(device.as_ref());
        }
        check.one_op(at as u64);
    }
    check.drain();
    check.write_nothing(device.as_ref());
    check.read_past_the_end(device.as_ref());
    check.engine.detach(id);
    device.sync().expect("sync of a healthy device works");
    assert_eq!(check.engine.in_flight_count(), 0);
}

struct InFlight {
    request: Request,
    /// Where its effect lies.
    range: Range<u64>,
    /// What a read must bring.
    expected: Vec<u8>,
}

/// Returns the bytes that no other code may touch while the transfer is in flight: its own, for a
/// write past the end also the gap before it, and for an odd write the whole pages.
fn range_of(op: Op, place: Range<u64>, old_end_bytes: u64) -> Range<u64> {
    let (sector, page) = (SECTOR_BYTES as u64, PAGE_BYTES as u64);
    let mut range = place.start.min(old_end_bytes)..place.end;
    let is_odd = !place.start.is_multiple_of(sector) || !place.end.is_multiple_of(sector);
    if op == Op::Write && is_odd {
        range = range.start - range.start % page..range.end.next_multiple_of(page);
    }
    range
}

struct Check<'a> {
    engine: &'a mut dyn IoEngine,
    id: DeviceId,
    model: Vec<u8>,
    flying: Vec<InFlight>,
    rng: SplitMix64,
}

impl Check<'_> {
    /// Draws a place: whole sectors mostly, odd bytes now and then.
    fn place(&mut self, end_bytes: u64) -> (u64, u32) {
        let unit = if self.rng.below(4) == 0 { 1 } else { SECTOR_BYTES as u64 };
        let offset = self.rng.below(end_bytes / unit + 1) * unit;
        let longest = (self.engine.buf_bytes() as u64).min(end_bytes - offset) / unit;
        let len = self.rng.below(longest + 1) * unit;
        (offset, u32::try_from(len).expect("buffers are below 4 GiB"))
    }

    /// Submits one random transfer, after waiting for those it could disturb.
    fn one_op(&mut self, tag: u64) {
        let op = if self.rng.below(2) == 0 { Op::Read } else { Op::Write };
        let end_bytes = if op == Op::Read { self.model.len() as u64 } else { LEN_BYTES_MAX };
        let (offset_bytes, len_bytes) = self.place(end_bytes);
        let end = offset_bytes + u64::from(len_bytes);
        let range = range_of(op, offset_bytes..end, self.model.len() as u64);
        let meets = |other: &InFlight| {
            (op == Op::Write || other.request.op == Op::Write)
                && other.range.start < range.end
                && range.start < other.range.end
        };
        while self.flying.iter().any(meets) {
            self.wait();
        }
        let buf = self.acquire();
        let request = Request { device: self.id, op, offset_bytes, len_bytes, buf, tag };
        let place = offset_bytes as usize..end as usize;
        let mut expected = Vec::new();
        if op == Op::Read {
            expected.extend_from_slice(self.model.get(place).expect("read within the model"));
        } else {
            let bytes: Vec<u8> = place.clone().map(|_| self.rng.next_u64() as u8).collect();
            if len_bytes > 0 {
                self.model.resize(self.model.len().max(place.end), 0);
                self.model.splice(place.clone(), bytes.iter().copied());
            }
            let target = self.engine.bytes_mut(buf).get_mut(..bytes.len());
            target.expect("transfer fits the buffer").copy_from_slice(&bytes);
        }
        self.engine.submit(request);
        self.flying.push(InFlight { request, range, expected });
        assert_eq!(self.engine.in_flight_count(), self.flying.len());
        match self.rng.below(8) {
            0 => self.wait(),
            1 => self.poll(),
            _ => {}
        }
    }

    /// Takes a buffer, waiting for one to come back if all are taken.
    fn acquire(&mut self) -> BufId {
        loop {
            if let Some(buf) = self.engine.acquire() {
                return buf;
            }
            assert!(!self.flying.is_empty(), "no buffer free and none in flight");
            self.wait();
        }
    }

    fn wait(&mut self) {
        let mut done = Vec::new();
        self.engine.wait(&mut done).expect("wait works");
        assert!(!done.is_empty() || self.flying.is_empty(), "wait brought nothing");
        for completion in done {
            self.finish(completion);
        }
    }

    /// Takes what is there, which may be nothing.
    fn poll(&mut self) {
        let mut done = Vec::new();
        self.engine.poll(&mut done).expect("poll works");
        for completion in done {
            self.finish(completion);
        }
        assert_eq!(self.engine.in_flight_count(), self.flying.len());
    }

    fn finish(&mut self, completion: Completion) {
        let is_it = |flight: &InFlight| flight.request.tag == completion.tag;
        let at = self.flying.iter().position(is_it).expect("completion of a flight");
        let InFlight { request, expected, .. } = self.flying.swap_remove(at);
        completion.result.unwrap_or_else(|error| panic!("{request:?} failed: {error}"));
        assert_eq!((completion.buf, completion.op), (request.buf, request.op));
        if request.op == Op::Read {
            let found = self.engine.bytes(request.buf).get(..expected.len());
            assert!(found == Some(expected.as_slice()), "{request:?} brought other bytes");
        }
        self.engine.release(request.buf);
    }

    fn drain(&mut self) {
        // Polling alone starts what is queued and brings all of it in the end.
        let is_patient = self.rng.below(2) == 0;
        while !self.flying.is_empty() {
            if is_patient {
                self.poll();
                std::thread::yield_now();
            } else {
                self.wait();
            }
        }
    }

    fn change_length(&mut self, device: &dyn Device) {
        let len_bytes = self.rng.below(LEN_BYTES_MAX);
        device.set_len(len_bytes).expect("set_len works");
        self.model.resize(len_bytes as usize, 0);
        assert_eq!(device.len_bytes().expect("length is known"), len_bytes);
        self.compare(device);
    }

    /// Writing nothing, anywhere, changes nothing. A memory device once grew by it.
    fn write_nothing(&self, device: &dyn Device) {
        device.write_at(LEN_BYTES_MAX * 2, &[]).expect("writing nothing works");
        self.compare(device);
    }

    /// Compares everything, bypassing the engine.
    fn compare(&self, device: &dyn Device) {
        assert_eq!(device.len_bytes().expect("length is known"), self.model.len() as u64);
        let mut all = vec![0; self.model.len()];
        device.read_at(0, &mut all).expect("the whole device can be read");
        assert!(all == self.model, "device and model differ");
        device.allocated_bytes().expect("occupied bytes are known");
    }

    /// Reads that start inside, at and beyond the end must say that the file is short.
    fn read_past_the_end(&mut self, device: &dyn Device) {
        let len_bytes = (2 * SECTOR_BYTES) as u32;
        let end = self.model.len() as u64;
        let last_sector = (end - end % SECTOR_BYTES as u64).saturating_sub(SECTOR_BYTES as u64);
        for offset_bytes in [last_sector + SECTOR_BYTES as u64, end, end + 4096, end + 4097] {
            let buf = self.acquire();
            let (device, op) = (self.id, Op::Read);
            self.engine.submit(Request { device, op, offset_bytes, len_bytes, buf, tag: 1 });
            let mut done = Vec::new();
            self.engine.wait(&mut done).expect("wait works");
            let result = done.pop().expect("the read completes").result;
            let error = result.expect_err("a read past the end fails");
            assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
            assert_eq!(error.message(), "file is shorter than expected");
            self.engine.release(buf);
        }
        let error = device.read_at(end, &mut [0]).expect_err("a read past the end fails");
        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
    }
}

/// Checks an empty `folder`: small files, large files, names, the lock.
///
/// # Panics
///
/// When a promise of [`Folder`] is broken.
pub fn check_folder(folder: &dyn Folder) {
    check_small_files(folder);
    check_large_files(folder);
    for name in ["", ".", "..", "a/b", "/a", "LOCK", "a.tmp", "a\0b"] {
        let error = folder.read(name).expect_err("a name that is not plain is refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name:?}: {error}");
    }
    let lock = folder.lock().expect("a free folder can be locked");
    let error = folder.lock().expect_err("a locked folder cannot be locked");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    let keys: Vec<_> = error.context().iter().map(|(key, _)| *key).collect();
    assert_eq!(keys, ["path", "holder_pid", "remedy"]);
    drop(lock);
    drop(folder.lock().expect("a folder given back can be locked"));
    assert!(folder.list().expect("list works").is_empty(), "the lock is not a file of the store");
}

fn check_small_files(folder: &dyn Folder) {
    assert!(folder.list().expect("list works").is_empty(), "the folder is empty");
    assert_eq!(folder.read("a").expect("read works"), None);
    folder.remove("a").expect("removing nothing is fine");
    folder.write_atomic("a", b"one").expect("write works");
    folder.write_atomic("a", b"second").expect("replacing works");
    folder.write_durable("b", b"longer").expect("write works");
    folder.write_durable("b", b"short").expect("overwriting works");
    folder.sync().expect("sync works");
    assert_eq!(folder.read("a").expect("read works").as_deref(), Some(&b"second"[..]));
    assert_eq!(folder.read("b").expect("read works").as_deref(), Some(&b"short"[..]));
    assert_eq!(folder.list().expect("list works"), ["a", "b"]);
    folder.remove("b").expect("remove works");
    assert_eq!(folder.read("b").expect("read works"), None);
}

fn check_large_files(folder: &dyn Folder) {
    for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
        let error = folder.open("c", mode).expect_err("no such file");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains('c'), "the error names the file: {error}");
    }
    let device = folder.open("c", OpenMode::Create).expect("create works");
    device.write_at(5, b"xyz").expect("write works");
    device.sync().expect("sync works");
    let again = folder.open("c", OpenMode::Create).expect("open works");
    assert_eq!(again.len_bytes().expect("length is known"), 8, "create keeps what is there");
    let reader = folder.open("c", OpenMode::ReadOnly).expect("open works");
    let mut bytes = [1; 8];
    reader.read_at(0, &mut bytes).expect("read works");
    assert_eq!(&bytes, b"\0\0\0\0\0xyz");
    folder.write_atomic("c", b"new").expect("replacing an open file works");
    reader.read_at(0, &mut bytes).expect("an open device keeps the old file");
    assert_eq!(&bytes, b"\0\0\0\0\0xyz");
    folder.remove("a").expect("remove works");
    folder.remove("c").expect("remove works");
    reader.read_at(0, &mut bytes).expect("an open device outlives its name");
    assert_eq!(folder.open("c", OpenMode::ReadOnly).expect_err("gone").kind(), ErrorKind::Invalid);
}
