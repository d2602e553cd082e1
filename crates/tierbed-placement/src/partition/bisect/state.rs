//! Which levels are done already? A file between levels, so that a long bisection can go on.
//!
//! ```text
//! magic │ crc32c │ level │ rows_per_page iteration_count │ seed │ pins' crc32c │ row count │ rows
//! ```
//!
//! The order of rows after a level is all there is to know: the sizes of nodes follow from the
//! number of rows, and a row's side in each split above follows from its place. Later runs divide
//! pins along that order without an exchange, and get the same nodes to the last bit. Numbers have
//! 4 bytes, the seed 8, all little-endian; the checksum covers what follows it. The file belongs to
//! one log and to one set of options and may be deleted at any time. Format:
//! `docs/formats/placement.md`.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::BisectionOptions;
use crate::hypergraph::Hypergraph;

const MAGIC: [u8; 8] = *b"TBhalve1";
/// Magic and checksum.
const PREFIX_BYTES: usize = 12;
/// Level, rows per page, iterations, seed, checksum of the pins, row count.
const HEADER_BYTES: usize = 28;

/// A bisection that can be gone on with.
#[derive(Debug)]
pub(super) struct State<'a> {
    path: &'a Path,
    /// Header without the level: what must be equal to go on.
    identity: Vec<u8>,
}

impl<'a> State<'a> {
    /// Names the bisection of `graph`, which is not split yet.
    pub(super) fn new(path: &'a Path, graph: &Hypergraph, options: &BisectionOptions) -> Self {
        let mut identity = Vec::with_capacity(HEADER_BYTES);
        identity.extend(options.rows_per_page.to_le_bytes());
        identity.extend(options.iteration_count.to_le_bytes());
        identity.extend(options.seed.to_le_bytes());
        identity.extend(checksum_of(&graph.pins).to_le_bytes());
        identity.extend((graph.rows.len() as u32).to_le_bytes());
        Self { path, identity }
    }

    /// Reads how many levels are done, and the order of rows after them; `None` without a file.
    ///
    /// # Errors
    ///
    /// `Corruption` for a damaged file, `Invalid` for one of another log or other options, `Io`.
    pub(super) fn read(&self) -> Result<Option<(u32, Vec<u32>)>> {
        let bytes = match std::fs::read(self.path) {
            Ok(bytes) => bytes,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(self.name(Error::os("cannot read bisection state", cause))),
        };
        self.decode(&bytes).map(Some).map_err(|error| self.name(error))
    }

    fn decode(&self, bytes: &[u8]) -> Result<(u32, Vec<u32>)> {
        let damaged = || Error::corruption("bisection state is damaged");
        let (prefix, rest) = bytes.split_at_checked(PREFIX_BYTES).ok_or_else(damaged)?;
        let (magic, checksum) = prefix.split_at_checked(MAGIC.len()).ok_or_else(damaged)?;
        if magic != MAGIC || checksum != crc32c(rest).to_le_bytes() {
            return Err(damaged());
        }
        let (level, rest) = rest.split_first_chunk::<4>().ok_or_else(damaged)?;
        let (identity, rows) = rest.split_at_checked(self.identity.len()).ok_or_else(damaged)?;
        if identity != self.identity {
            return Err(Error::invalid("bisection state is of another log or other options")
                .with("remedy", "delete the file, or name another one"));
        }
        let (rows, tail) = rows.as_chunks::<4>();
        let expected = self.identity.last_chunk::<4>().map(|count| u32::from_le_bytes(*count));
        if !tail.is_empty() || expected != u32::try_from(rows.len()).ok() {
            return Err(damaged());
        }
        let rows = rows.iter().map(|row| u32::from_le_bytes(*row)).collect();
        Ok((u32::from_le_bytes(*level), rows))
    }

    /// Writes the order of rows after `level` levels. The file appears whole or not at all.
    ///
    /// # Errors
    ///
    /// `Io` and `NoSpace`.
    pub(super) fn write(&self, level: u32, rows: &[u32]) -> Result<()> {
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + HEADER_BYTES + 4 * rows.len());
        bytes.extend(level.to_le_bytes());
        bytes.extend(&self.identity);
        bytes.extend(rows.iter().flat_map(|row| row.to_le_bytes()));
        let temporary = self.path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(&MAGIC)?;
            file.write_all(&crc32c(&bytes).to_le_bytes())?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&temporary, self.path)
        };
        write().map_err(|cause| self.name(Error::os("cannot write bisection state", cause)))
    }

    /// Removes the file: the bisection is complete.
    ///
    /// # Errors
    ///
    /// `Io`.
    pub(super) fn remove(&self) -> Result<()> {
        match std::fs::remove_file(self.path) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                Err(self.name(Error::os("cannot remove bisection state", cause)))
            }
            _ => Ok(()),
        }
    }

    fn name(&self, error: Error) -> Error {
        error.with("path", self.path.display())
    }
}

/// Sums up the pins, in pieces: the checksums of pieces are checked together.
fn checksum_of(pins: &[u32]) -> u32 {
    const PIECE: usize = 1 << 14;
    let mut bytes = Vec::with_capacity(4 * PIECE);
    let mut sums = Vec::new();
    for piece in pins.chunks(PIECE) {
        bytes.clear();
        bytes.extend(piece.iter().flat_map(|pin| pin.to_le_bytes()));
        sums.extend(crc32c(&bytes).to_le_bytes());
    }
    crc32c(&sums)
}
