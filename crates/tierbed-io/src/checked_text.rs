//! Text files that check themselves: a line of magic, version and checksum, then a body.
//!
//! ```text
//! <magic> <version> <CRC32C of the body, 8 hex digits>\n<body>
//! ```

use std::ops::RangeInclusive;

use tierbed_core::checksum::crc32c;

/// A kind of such files.
#[derive(Debug, Clone)]
pub struct CheckedText {
    /// The first word.
    pub magic: &'static str,
    /// The versions that are read.
    pub versions: RangeInclusive<u32>,
}

/// Why bytes are not a file of this kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// The first word is another; what the first line begins with.
    Foreign(String),
    /// The version is none of those that are read.
    Version(u32),
    /// The first line is not that of the body.
    Damaged {
        /// What the first line begins with.
        found: String,
        /// CRC32C of the body.
        body_crc32c: u32,
    },
}

impl CheckedText {
    /// Returns the file of `body`.
    #[must_use]
    pub fn encode(&self, version: u32, body: &[u8]) -> Vec<u8> {
        [self.line(version, crc32c(body)).as_bytes(), body].concat()
    }

    /// Returns version and body of a file.
    ///
    /// # Errors
    /// [`Refused`] says what is wrong with the first line.
    pub fn decode<'a>(&self, bytes: &'a [u8]) -> Result<(u32, &'a [u8]), Refused> {
        let end = bytes.iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |at| at + 1);
        let (line, body) = bytes.split_at(end);
        let body_crc32c = crc32c(body);
        let mut versions = self.versions.clone();
        if let Some(version) =
            versions.find(|&version| line == self.line(version, body_crc32c).as_bytes())
        {
            return Ok((version, body));
        }
        let (start, _) = line.split_at(line.len().min(80));
        let found = String::from_utf8_lossy(start).trim_end().to_owned();
        let mut words = found.split_ascii_whitespace();
        if words.next() != Some(self.magic) {
            return Err(Refused::Foreign(found));
        }
        match words.next().and_then(|version| version.parse().ok()) {
            Some(version) if !self.versions.contains(&version) => Err(Refused::Version(version)),
            _ => Err(Refused::Damaged { found, body_crc32c }),
        }
    }

    fn line(&self, version: u32, body_crc32c: u32) -> String {
        format!("{} {version} {body_crc32c:08x}\n", self.magic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_a_file_is_noticed() {
        let kind = CheckedText { magic: "tierbed-test", versions: 2..=3 };
        let bytes = kind.encode(3, b"a body\n");
        assert_eq!(kind.decode(&bytes), Ok((3, &b"a body\n"[..])));
        for at in 0..bytes.len() {
            assert!(kind.decode(&bytes[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut wrong = bytes.clone();
                wrong[at] ^= 1 << bit;
                // Version 2 is read as well: whoever reads it holds the body against it.
                let is_version = at == "tierbed-test ".len() && wrong[at] == b'2';
                assert!(is_version || kind.decode(&wrong).is_err(), "bit {bit} of {at}");
            }
        }
        let other = |magic, version| CheckedText { magic, versions: version..=version };
        let foreign = kind.decode(&other("other", 3).encode(3, b"")).map(|_| ());
        assert!(matches!(foreign, Err(Refused::Foreign(_))), "{foreign:?}");
        let newer = other("tierbed-test", 4).encode(4, b"");
        assert_eq!(kind.decode(&newer), Err(Refused::Version(4)));
        let damaged = kind.decode(b"tierbed-test 3 00000000\nx");
        assert!(matches!(damaged, Err(Refused::Damaged { .. })), "{damaged:?}");
        assert!(matches!(kind.decode(b"\xFF\xFE"), Err(Refused::Foreign(_))));
    }
}
