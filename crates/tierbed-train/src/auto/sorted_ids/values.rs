//! What is sorted outside memory.

/// A distinct id of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Use {
    pub(super) table: u32,
    pub(super) hash: u64,
    pub(super) run: u32,
    pub(super) number: u32,
}

/// The first use of an id that has no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NewId {
    pub(super) table: u32,
    pub(super) run: u32,
    pub(super) number: u32,
    pub(super) hash: u64,
}

/// An id and the row that it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Given {
    pub(super) table: u32,
    pub(super) hash: u64,
    pub(super) row: u64,
}

/// The row of a number of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) run: u32,
    pub(super) number: u32,
    pub(super) row: u64,
}

/// Bytes of a value, by how many each of its fields takes.
pub(super) const USE_BYTES: usize = 20;
pub(super) const FOUND_BYTES: usize = 16;
/// A multiple of the bytes of each value.
pub(super) const BLOCK_UNIT: usize = 80;

impl Use {
    pub(super) fn encode(self) -> [u8; USE_BYTES] {
        joined(self.hash, [self.table, self.run, self.number])
    }

    pub(super) fn decode(bytes: [u8; USE_BYTES]) -> Self {
        let (hash, [table, run, number]) = parted(bytes);
        Self { table, hash, run, number }
    }
}

impl NewId {
    pub(super) fn encode(self) -> [u8; USE_BYTES] {
        joined(self.hash, [self.table, self.run, self.number])
    }

    pub(super) fn decode(bytes: [u8; USE_BYTES]) -> Self {
        let (hash, [table, run, number]) = parted(bytes);
        Self { table, run, number, hash }
    }
}

impl Given {
    pub(super) fn encode(self) -> [u8; USE_BYTES] {
        joined(self.hash, [self.table, self.row as u32, (self.row >> 32) as u32])
    }

    pub(super) fn decode(bytes: [u8; USE_BYTES]) -> Self {
        let (hash, [table, low, high]) = parted(bytes);
        Self { table, hash, row: u64::from(high) << 32 | u64::from(low) }
    }
}

impl Found {
    pub(super) fn encode(self) -> [u8; FOUND_BYTES] {
        let [a, b, c, d] = self.run.to_le_bytes();
        let [e, f, g, h] = self.number.to_le_bytes();
        let [i, j, k, l, m, n, o, p] = self.row.to_le_bytes();
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }

    pub(super) fn decode(bytes: [u8; FOUND_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, row @ ..] = bytes;
        Self {
            run: u32::from_le_bytes([a, b, c, d]),
            number: u32::from_le_bytes([e, f, g, h]),
            row: u64::from_le_bytes(row),
        }
    }
}

fn joined(hash: u64, words: [u32; 3]) -> [u8; USE_BYTES] {
    let mut bytes = [0; USE_BYTES];
    let (of_hash, rest) = bytes.split_at_mut(8);
    of_hash.copy_from_slice(&hash.to_le_bytes());
    for (place, word) in rest.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn parted(bytes: [u8; USE_BYTES]) -> (u64, [u32; 3]) {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t] = bytes;
    let words = [[i, j, k, l], [m, n, o, p], [q, r, s, t]];
    (u64::from_le_bytes([a, b, c, d, e, f, g, h]), words.map(u32::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let (table, run, number, hash) = (7, 1 << 30, u32::MAX, u64::MAX - 5);
        let used = Use { table, hash, run, number };
        assert_eq!(Use::decode(used.encode()), used);
        let new = NewId { table, run, number, hash };
        assert_eq!(NewId::decode(new.encode()), new);
        let given = Given { table, hash, row: 0x1234_5678_9abc };
        assert_eq!(Given::decode(given.encode()), given);
        let found = Found { run, number, row: hash };
        assert_eq!(Found::decode(found.encode()), found);
        assert!([USE_BYTES, FOUND_BYTES].iter().all(|bytes| BLOCK_UNIT.is_multiple_of(*bytes)));
    }
}
