//! Criteo TSV files of generated samples.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use tierbed_core::{Error, Result};

use super::shape::FEATURE_COUNT;
use super::{Draw, Generator, MISSING};
use tierbed_io::lines::Packing;

/// Samples between two reports of progress.
const REPORT_SAMPLE_COUNT: u64 = 1 << 14;

/// Writes samples as a Criteo file: label, 13 integers, 26 tokens of 8 hexadecimal digits. A
/// feature's tokens stand for its ids one to one, the empty token for id 0 where that is missing.
/// Calls `report` with the number of samples written, every now and then; its error stops.
///
/// # Errors
/// `Io` or `NoSpace` when the file cannot be written; errors of `report`.
pub fn write_criteo(
    generator: &Generator,
    samples: Range<u64>,
    path: &Path,
    packing: Packing,
    report: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let failed = |error| Error::os("cannot write log file", error).with("path", path.display());
    let file = BufWriter::with_capacity(256 << 10, File::create(path).map_err(failed)?);
    let mut target = match packing {
        Packing::Plain => Target::Plain(file),
        Packing::Gzip => {
            Target::Gzip(flate2::write::GzEncoder::new(file, flate2::Compression::fast()))
        }
        Packing::Zstd => Target::Zstd(zstd::Encoder::new(file, 1).map_err(failed)?),
    };
    let mut lines = Vec::new();
    let mut next = samples.start;
    while next < samples.end {
        let end = samples.end.min(next + REPORT_SAMPLE_COUNT);
        lines.clear();
        for number in next..end {
            generator.push_line(&generator.draw(number), &mut lines);
        }
        target.write(&lines).map_err(failed)?;
        next = end;
        report(next - samples.start)?;
    }
    target.finish().map_err(failed)
}

enum Target {
    Plain(BufWriter<File>),
    Gzip(flate2::write::GzEncoder<BufWriter<File>>),
    Zstd(zstd::Encoder<'static, BufWriter<File>>),
}

impl Target {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Plain(file) => file.write_all(bytes),
            Self::Gzip(file) => file.write_all(bytes),
            Self::Zstd(file) => file.write_all(bytes),
        }
    }

    fn finish(self) -> std::io::Result<()> {
        match self {
            Self::Plain(mut file) => file.flush(),
            Self::Gzip(file) => file.finish()?.flush(),
            Self::Zstd(file) => file.finish()?.flush(),
        }
    }
}

impl Generator {
    fn push_line(&self, draw: &Draw, line: &mut Vec<u8>) {
        line.push(if self.is_click(draw) { b'1' } else { b'0' });
        for value in self.integers.values(&draw.levels) {
            line.push(b'\t');
            if let Some(value) = value {
                push_integer(value, line);
            }
        }
        let ids = self.ids(draw);
        let tokens: [u32; FEATURE_COUNT] = draw.tokens;
        for ((feature, id), token) in (0u32..).zip(ids).zip(tokens) {
            line.push(b'\t');
            if token != MISSING {
                line.extend(hexadecimal(token_word(feature, id)));
            }
        }
        line.push(b'\n');
    }
}

/// Returns the 32 bits that stand for id `id` of feature `feature` in a log: a permutation, so
/// different ids of a feature have different tokens. Source: the murmur3 finaliser.
fn token_word(feature: u32, id: u32) -> u32 {
    let mut word = id.wrapping_add(feature.wrapping_mul(0x9E37_79B9)) ^ 0x7469_6572;
    word = (word ^ (word >> 16)).wrapping_mul(0x85EB_CA6B);
    word = (word ^ (word >> 13)).wrapping_mul(0xC2B2_AE35);
    word ^ (word >> 16)
}

fn hexadecimal(word: u32) -> [u8; 8] {
    let mut digits = [0; 8];
    for (at, digit) in digits.iter_mut().enumerate() {
        let value = ((word >> (28 - 4 * at)) & 0xf) as u8;
        *digit = if value < 10 { b'0' + value } else { b'a' + value - 10 };
    }
    digits
}

fn push_integer(value: i64, line: &mut Vec<u8>) {
    if value < 0 {
        line.push(b'-');
    }
    let mut digits = [0u8; 20];
    let mut used = 0;
    let mut rest = value.unsigned_abs();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        used += 1;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    line.extend(digits.iter().skip(digits.len() - used));
}
