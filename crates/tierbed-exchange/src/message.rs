//! Ids on their way to another node: what a holder there must look up.
//!
//! ```text
//! | fingerprint of the plan, 8 | bytes of the bags, 8 | bags | mirrors |
//! bags     parts; per rank of the node: samples, flags; then member by member, rank by rank
//! mirrors  members of mirrored tables, of the sending rank alone: each rail brings its own
//! member   lengths of its bags | lengths of whole bags, where they matter | ids | weights
//! ```
//!
//! Lengths take no more than they must: nothing when all are equal, a bit each when none is longer
//! than one, else a byte or more (LEB128). Ids count from the first row that is held and take 4
//! bytes, or 8 where a holder has more than 2^32 rows of a table.

#![expect(clippy::indexing_slicing, reason = "bounds of checked bags lie within their indices")]

use tierbed_core::{Error, Result};
use tierbed_kernels::Pooling;

use crate::bags::MemberBags;
use crate::plan::{GroupKind, Member};
use crate::row_set::RowSet;

const EQUAL: u8 = 0;
const BITS: u8 = 1;
const BYTES: u8 = 2;

/// What is sent of a member.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemberForm {
    /// Rows that are held; ids count from their first.
    rows: RowSet,
    /// Lengths of whole bags are sent: the mean of a bag needs them, and others hold its rest.
    has_counts: bool,
}

impl MemberForm {
    /// Returns how the bags of `member` are sent, whose feature is pooled by `pooling`.
    pub(crate) fn of(kind: GroupKind, member: &Member, pooling: Pooling) -> Self {
        let has_counts = kind == GroupKind::Rows && pooling == Pooling::Mean;
        Self { rows: member.rows, has_counts }
    }

    fn is_long(self) -> bool {
        self.rows.end() - self.rows.first() > 1 << 32
    }

    /// Writes bags whose ids are all held.
    pub(crate) fn write(self, bags: &MemberBags<'_>, to: &mut Vec<u8>) {
        let lengths: Vec<u64> = bags.bounds().map(|bag| bag.len() as u64).collect();
        write_lengths(&lengths, to);
        if self.has_counts {
            let counts: Vec<u64> =
                (0..lengths.len()).map(|bag| u64::from(bags.count_of(bag))).collect();
            write_lengths(&counts, to);
        }
        let range = bags.range();
        for &id in &bags.indices[range.clone()] {
            let id = id as u64 - self.rows.first();
            match self.is_long() {
                true => to.extend(id.to_le_bytes()),
                false => to.extend((id as u32).to_le_bytes()),
            }
        }
        if let Some(weights) = bags.weights {
            to.extend(weights[range].iter().flat_map(|weight| weight.to_le_bytes()));
        }
    }

    /// Reads `sample_count` bags.
    ///
    /// # Errors
    /// `Corruption` for bytes that are no such bags.
    pub(crate) fn read(
        self,
        from: &mut Reader<'_>,
        sample_count: usize,
        has_weights: bool,
    ) -> Result<AwayMember> {
        let lengths = from.lengths(sample_count)?;
        let counts = match self.has_counts {
            true => Some(from.lengths(sample_count)?.iter().map(|&count| count as u32).collect()),
            false => None,
        };
        let mut offsets = vec![0];
        let mut end = 0u64;
        for length in lengths {
            end = end.saturating_add(length);
            offsets.push(i64::try_from(end).map_err(|_| damaged())?);
        }
        let mut indices = Vec::new();
        let width = if self.is_long() { 8 } else { 4 };
        let count = usize::try_from(end).map_err(|_| damaged())?;
        for bytes in from.take(count.checked_mul(width).ok_or_else(damaged)?)?.chunks(width) {
            let mut word = [0; 8];
            word[..width].copy_from_slice(bytes);
            let id = u64::from_le_bytes(word).checked_add(self.rows.first());
            let id = id.map(|id| id as i64).filter(|&id| self.rows.contains(id));
            indices.push(id.ok_or_else(damaged)?);
        }
        let weights = match has_weights {
            true => Some(from.floats(count)?),
            false => None,
        };
        Ok(AwayMember { offsets, indices, weights, counts })
    }
}

/// The bags of a member, of a rank of another node.
#[derive(Debug, Clone, Default)]
pub(crate) struct AwayMember {
    /// `[B + 1]`.
    offsets: Vec<i64>,
    indices: Vec<i64>,
    weights: Option<Vec<f32>>,
    /// Indices of each whole bag, where not all of it is held here.
    counts: Option<Vec<u32>>,
}

impl AwayMember {
    /// Returns the bags.
    pub(crate) fn bags(&self) -> MemberBags<'_> {
        MemberBags {
            offsets: &self.offsets,
            indices: &self.indices,
            weights: self.weights.as_deref(),
            counts: self.counts.as_deref(),
        }
    }
}

/// Writes a number in as many bytes as it needs.
pub(crate) fn write_number(mut number: u64, to: &mut Vec<u8>) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

fn write_lengths(lengths: &[u64], to: &mut Vec<u8>) {
    let first = lengths.first().copied().unwrap_or(0);
    if lengths.iter().all(|&length| length == first) {
        to.push(EQUAL);
        write_number(first, to);
    } else if lengths.iter().all(|&length| length <= 1) {
        to.push(BITS);
        for bits in lengths.chunks(8) {
            to.push(bits.iter().rev().fold(0, |byte, &bit| byte << 1 | bit as u8));
        }
    } else {
        to.push(BYTES);
        lengths.iter().for_each(|&length| write_number(length, to));
    }
}

/// Bytes that came, from front to back.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(damaged)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn word(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| damaged())?))
    }

    pub(crate) fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(damaged())
    }

    /// Reads a number of things that are in memory.
    pub(crate) fn count(&mut self) -> Result<usize> {
        usize::try_from(self.number()?).map_err(|_| damaged())
    }

    /// Makes sure that nothing is left.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(damaged())
    }

    fn floats(&mut self, count: usize) -> Result<Vec<f32>> {
        let bytes = self.take(count.checked_mul(4).ok_or_else(damaged)?)?;
        Ok(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
    }

    fn lengths(&mut self, count: usize) -> Result<Vec<u64>> {
        match self.byte()? {
            EQUAL => Ok(vec![self.number()?; count]),
            BITS => {
                let bytes = self.take(count.div_ceil(8))?;
                Ok((0..count).map(|at| u64::from(bytes[at / 8] >> (at % 8) & 1)).collect())
            }
            BYTES => (0..count).map(|_| self.number()).collect(),
            _ => Err(damaged()),
        }
    }
}

/// Builds the error of a message that is none.
pub(crate) fn damaged() -> Error {
    Error::corruption("a message between nodes cannot be read")
        .with("remedy", "run the same version of Tierbed on all ranks, then start them again")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    fn form(first_row: u64, end_row: u64, has_counts: bool) -> MemberForm {
        MemberForm { rows: RowSet::Range { first: first_row, end: end_row }, has_counts }
    }

    fn roundtrip(form: MemberForm, lengths: &[i64], ids: &[i64]) -> usize {
        let mut offsets = vec![0];
        for length in lengths {
            offsets.push(offsets[offsets.len() - 1] + length);
        }
        let weights: Vec<f32> = ids.iter().map(|&id| id as f32 * 0.5).collect();
        let counts: Vec<u32> = lengths.iter().map(|&length| length as u32 * 3).collect();
        let bags = MemberBags {
            offsets: &offsets,
            indices: ids,
            weights: Some(&weights),
            counts: form.has_counts.then_some(&counts),
        };
        let mut bytes = Vec::new();
        form.write(&bags, &mut bytes);
        let mut reader = Reader::new(&bytes);
        let found = form.read(&mut reader, lengths.len(), true).unwrap();
        reader.finish().unwrap();
        assert_eq!((found.offsets, found.indices), (offsets, ids.to_vec()));
        assert_eq!(found.weights, Some(weights));
        assert_eq!(found.counts, form.has_counts.then_some(counts));
        for end in 0..bytes.len() {
            // A message that ends early is never taken for a shorter one.
            assert!(form.read(&mut Reader::new(&bytes[..end]), lengths.len(), true).is_err());
        }
        bytes.len()
    }

    #[test]
    fn bags_come_as_they_were_sent_in_few_bytes() {
        let ids = [100, 105, 199, 100];
        assert_eq!(roundtrip(form(100, 200, false), &[1, 1, 1, 1], &ids), 2 + 4 * 8);
        assert_eq!(roundtrip(form(100, 200, false), &[1, 0, 1, 1, 0, 0, 0, 0, 1], &ids), 3 + 4 * 8);
        assert_eq!(roundtrip(form(0, 200, false), &[3, 0, 1], &ids), 4 + 4 * 8);
        assert_eq!(roundtrip(form(0, 1 << 33, true), &[200, 0], &[7; 200]), 8 + 200 * 12);
        roundtrip(form(0, 1, false), &[], &[]);
    }

    #[test]
    fn ids_that_are_not_held_are_refused() {
        let bags = MemberBags { offsets: &[0, 1], indices: &[9], weights: None, counts: None };
        let mut bytes = Vec::new();
        form(0, 10, false).write(&bags, &mut bytes);
        assert!(form(0, 9, false).read(&mut Reader::new(&bytes), 1, false).is_err());
        assert!(form(0, 10, false).read(&mut Reader::new(&bytes), 1, false).is_ok());
    }
}
