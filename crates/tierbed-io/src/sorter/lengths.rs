//! Lengths of records: one for all, or one for each class of them.
#![expect(clippy::indexing_slicing, reason = "classes and keys are of the lengths given")]

use tierbed_core::{Error, Result};

/// Bytes of a key that are compared as one number.
const HEAD_BYTES: usize = 8;

/// Payloads of several lengths: the first bytes of a key are the number of its class.
#[derive(Debug, Clone)]
pub struct PayloadClasses {
    /// Bytes of the number, most significant first, at most 4; 0 where there is one class.
    pub class_bytes: usize,
    /// Bytes of the payload, by class.
    pub payload_bytes: Vec<usize>,
}

/// How long each record is.
#[derive(Debug, Clone)]
pub(super) struct Lengths {
    pub(super) key_bytes: usize,
    class_bytes: usize,
    /// Key and payload, by class.
    record_bytes: Vec<usize>,
    pub(super) longest_bytes: usize,
}

impl Lengths {
    pub(super) fn new(key_bytes: usize, classes: &PayloadClasses) -> Result<Self> {
        let PayloadClasses { class_bytes, payload_bytes } = classes;
        if *class_bytes > key_bytes.min(4) || payload_bytes.is_empty() {
            return Err(Error::invalid("classes of a sorter out of range")
                .with("class_bytes", class_bytes)
                .with("key_bytes", key_bytes)
                .with("classes", payload_bytes.len()));
        }
        let record_bytes: Vec<usize> =
            payload_bytes.iter().map(|payload_bytes| key_bytes + payload_bytes).collect();
        let longest_bytes = record_bytes.iter().copied().max().unwrap_or(key_bytes);
        Ok(Self { key_bytes, class_bytes: *class_bytes, record_bytes, longest_bytes })
    }

    /// Returns the bytes of the record that begins with `bytes`, which has its whole key; `None`
    /// where no record begins like that.
    pub(super) fn of(&self, bytes: &[u8]) -> Option<usize> {
        if self.class_bytes == 0 {
            return Some(self.longest_bytes);
        }
        let class = bytes[..self.class_bytes].iter();
        let class = class.fold(0usize, |class, &byte| class << 8 | usize::from(byte));
        self.record_bytes.get(class).copied()
    }

    /// Returns the first bytes of a record's key as a number that compares as they do.
    pub(super) fn head(&self, record: &[u8]) -> u64 {
        if let (true, Some(bytes)) = (self.key_bytes >= HEAD_BYTES, record.first_chunk()) {
            return from_most_significant(*bytes);
        }
        let mut bytes = [0; HEAD_BYTES];
        let count = self.key_bytes.min(HEAD_BYTES);
        bytes[..count].copy_from_slice(&record[..count]);
        from_most_significant(bytes)
    }

    /// Tells whether keys are longer than their heads.
    pub(super) fn has_rest(&self) -> bool {
        self.key_bytes > HEAD_BYTES
    }

    /// Returns the bytes of a record's key that [`head`](Self::head) leaves out.
    pub(super) fn rest<'a>(&self, record: &'a [u8]) -> &'a [u8] {
        match self.has_rest() {
            true => &record[HEAD_BYTES..self.key_bytes],
            false => &[],
        }
    }
}

#[expect(clippy::big_endian_bytes, reason = "keys compare most significant byte first")]
fn from_most_significant(bytes: [u8; HEAD_BYTES]) -> u64 {
    u64::from_be_bytes(bytes)
}
