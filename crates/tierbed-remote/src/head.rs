//! HEAD of a channel: the version that it is at, and those that this one is built on.
//!
//! One line `tierbed-head 1 <crc32c of the rest, 8 hex digits>`, then JSON. It names the digest of
//! the `parts.json` of each version, which names those of all parts: whoever has a HEAD can check
//! every byte behind it. Normative text: docs/reference/formats/remote.md.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};
use tierbed_io::checked_text::Refused;
use tierbed_io::CheckedText;

use crate::digest::Digest;
use crate::names::{check_identity, Seq};

/// Longest HEAD that is read.
pub(crate) const HEAD_BYTES_MAX: u64 = 1 << 20;
/// Most versions of a chain: a server has as many folders open.
pub(crate) const CHAIN_LEN_MAX: usize = 256;
/// Earlier versions that a HEAD remembers.
const PAST_LEN_MAX: usize = 16;
const TEXT: CheckedText = CheckedText { magic: "tierbed-head", versions: 1..=1 };

/// A version, named so that nothing else can pass for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its number.
    pub seq: Seq,
    /// Identity of what was published.
    pub identity: String,
    /// Digest of its `parts.json`.
    pub parts_sha256: Digest,
}

/// A version that a channel was at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Past {
    /// Its number.
    pub seq: Seq,
    /// When the channel left it, in seconds since 1970.
    pub until_s: u64,
}

/// Where a channel is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// A whole version, then deltas, each made for what is before it; the channel is at the last.
    pub chain: Vec<Link>,
    /// When the channel was moved here, in seconds since 1970.
    pub written_at_s: u64,
    /// A number of whoever moved it, so that no two HEADs are equal.
    pub writer: String,
    /// Where the channel was before, oldest first.
    pub past: Vec<Past>,
}

impl Head {
    /// Returns the HEAD that moves a channel from `before` to `chain`.
    #[must_use]
    pub fn after(before: Option<&Self>, chain: Vec<Link>, now_s: u64, writer: &str) -> Self {
        let mut past = before.map_or_else(Vec::new, |head| head.past.clone());
        past.extend(before.map(|head| Past { seq: head.seq(), until_s: now_s }));
        past.drain(..past.len().saturating_sub(PAST_LEN_MAX));
        Self { chain, written_at_s: now_s, writer: writer.to_owned(), past }
    }

    /// Returns the version that the channel is at.
    #[must_use]
    #[expect(clippy::expect_used, reason = "checked when decoded, and where chains are made")]
    pub fn newest(&self) -> &Link {
        self.chain.last().expect("a chain has a version")
    }

    /// Returns the number of the version that the channel is at.
    #[must_use]
    pub fn seq(&self) -> Seq {
        self.newest().seq
    }

    /// Returns whether version `seq` is needed to serve the channel.
    #[must_use]
    pub fn names(&self, seq: Seq) -> bool {
        self.chain.iter().any(|link| link.seq == seq)
    }

    /// Encodes the object.
    ///
    /// # Errors
    /// `Invalid` when the chain is none.
    pub fn encode(&self) -> Result<Vec<u8>> {
        check_chain(&self.chain)?;
        encode(&TEXT, self)
    }

    /// Decodes and checks an object.
    ///
    /// # Errors
    /// `Invalid` for another format or version, `Corruption` when the bytes are not what was
    /// written.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let head: Self = decode(&TEXT, bytes)?;
        let bad = |cause| Error::corruption("HEAD has a bad chain").with("cause", cause);
        check_chain(&head.chain).map_err(bad)?;
        if head.past.len() > PAST_LEN_MAX || head.writer.len() > 64 {
            return Err(Error::corruption("HEAD is longer than one can be"));
        }
        Ok(head)
    }
}

/// Checks that `chain` has a version, and that each one is later than the one before.
pub(crate) fn check_chain(chain: &[Link]) -> Result<()> {
    if chain.is_empty() || chain.len() > CHAIN_LEN_MAX {
        return Err(Error::invalid("a chain has 1 to 256 versions")
            .with("found", chain.len())
            .with("remedy", "publish in full, and push that"));
    }
    chain.iter().try_for_each(|link| check_identity(&link.identity))?;
    if !chain.is_sorted_by(|before, next| before.seq < next.seq) {
        return Err(Error::invalid("versions of a chain must ascend"));
    }
    Ok(())
}

/// Returns the checked text of `value`.
pub(crate) fn encode(kind: &CheckedText, value: &impl Serialize) -> Result<Vec<u8>> {
    let mut body = serde_json::to_vec_pretty(value)
        .map_err(|cause| Error::invalid("cannot be written as JSON").with("cause", cause))?;
    body.push(b'\n');
    Ok(kind.encode(*kind.versions.end(), &body))
}

/// Reads what [`encode`] wrote.
pub(crate) fn decode<T: for<'de> Deserialize<'de>>(kind: &CheckedText, bytes: &[u8]) -> Result<T> {
    let magic = kind.magic;
    let (_, body) = kind.decode(bytes).map_err(|refused| match refused {
        Refused::Foreign(found) => Error::corruption(format!("no object of kind {magic}"))
            .with("found", format_args!("{found:?}")),
        Refused::Version(found) => Error::invalid(format!("{magic} has another format version"))
            .with("found", found)
            .with("remedy", "publish it again with this version, or read it with that one"),
        Refused::Damaged { found, body_crc32c } => {
            Error::corruption(format!("{magic} has another checksum"))
                .with("expected", format_args!("{body_crc32c:08x}"))
                .with("found", format_args!("{found:?}"))
        }
    })?;
    serde_json::from_slice(body).map_err(|cause| {
        Error::corruption(format!("{magic} is not the expected JSON")).with("cause", cause)
    })
}

#[cfg(test)]
mod tests {
    use tierbed_core::ErrorKind;

    use super::*;

    fn link(seq: u64) -> Link {
        let parts_sha256 = Digest::of(&seq.to_le_bytes());
        Link { seq: Seq(seq), identity: format!("id{seq}"), parts_sha256 }
    }

    #[test]
    fn a_head_comes_back_and_remembers_where_it_was() {
        let mut head = Head::after(None, vec![link(1)], 10, "a");
        for seq in 2..40 {
            head = Head::after(Some(&head), vec![link(1), link(seq)], 10 + seq, "b");
            assert_eq!(Head::decode(&head.encode().unwrap()).unwrap(), head);
        }
        assert_eq!((head.seq(), head.past.len()), (Seq(39), PAST_LEN_MAX));
        assert_eq!(head.past.last(), Some(&Past { seq: Seq(38), until_s: 49 }));
        assert!(head.names(Seq(1)) && !head.names(Seq(38)));
    }

    #[test]
    fn every_flipped_bit_of_a_head_is_noticed() {
        let head = Head::after(None, vec![link(5), link(6)], 7, "w");
        let bytes = head.encode().unwrap();
        for at in 0..bytes.len() {
            assert!(Head::decode(&bytes[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut wrong = bytes.clone();
                wrong[at] ^= 1 << bit;
                assert!(Head::decode(&wrong).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn chains_ascend_and_have_an_end() {
        for chain in [vec![], vec![link(2), link(2)], vec![link(3), link(2)]] {
            let head = Head { chain, written_at_s: 0, writer: String::new(), past: Vec::new() };
            let bytes = encode(&TEXT, &head).unwrap();
            assert_eq!(Head::decode(&bytes).unwrap_err().kind(), ErrorKind::Corruption);
            assert!(head.encode().is_err());
        }
        let long = (0..=CHAIN_LEN_MAX as u64).map(link).collect();
        assert!(Head::after(None, long, 0, "w").encode().is_err());
    }
}
