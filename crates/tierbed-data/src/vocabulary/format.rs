//! The vocabulary file format.
//!
//! The normative text is `docs/reference/formats/vocabulary.md`; a test reads its constants.
//!
//! ```text
//! 0          header     64 bytes, own crc32c
//! 64         directory  64 bytes a feature
//! 64 + 64 F  names      UTF-8, back to back; then crc32c of directory and names
//! (64-aligned sections, per feature)
//!            fingerprints [n] u64, ascending
//!            ids          [n] u32, ids[i] belongs to fingerprints[i]
//! ```

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, Result};

use super::builder::FeatureReport;

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"TBVOCAB\n";
/// Version this code writes and reads.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of a directory entry.
pub const ENTRY_BYTES: usize = 64;
/// Sections begin at multiples of this.
pub const SECTION_ALIGN_BYTES: u64 = 64;
/// More bytes of directory and names than this is not a vocabulary.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;

/// One feature's sections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FeatureEntry {
    pub(crate) name: String,
    pub(crate) token_count: u64,
    pub(crate) fingerprints_at: u64,
    pub(crate) ids_at: u64,
    pub(crate) fingerprints_crc: u32,
    pub(crate) ids_crc: u32,
    pub(crate) rare_token_count: u64,
    pub(crate) missing_count: u64,
}

/// Header and directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) features: Vec<FeatureEntry>,
    pub(crate) min_count: u64,
    pub(crate) sample_count: u64,
    pub(crate) file_bytes: u64,
}

fn align(offset_bytes: u64) -> u64 {
    offset_bytes.next_multiple_of(SECTION_ALIGN_BYTES)
}

impl Directory {
    /// Lays out the sections of `features`.
    fn lay_out(features: &[FeatureReport], min_count: u64, sample_count: u64) -> Self {
        let names_bytes: usize = features.iter().map(|feature| feature.name.len()).sum();
        let mut at = (HEADER_BYTES + features.len() * ENTRY_BYTES + names_bytes + 4) as u64;
        let mut entries = Vec::with_capacity(features.len());
        for feature in features {
            let fingerprints_at = align(at);
            let ids_at = align(fingerprints_at + feature.token_count * 8);
            at = ids_at + feature.token_count * 4;
            entries.push(FeatureEntry {
                name: feature.name.clone(),
                token_count: feature.token_count,
                fingerprints_at,
                ids_at,
                rare_token_count: feature.rare_token_count,
                missing_count: feature.missing_count,
                ..FeatureEntry::default()
            });
        }
        Self { features: entries, min_count, sample_count, file_bytes: at }
    }

    /// Encodes header, directory and names.
    fn encode(&self) -> Vec<u8> {
        let names_bytes: usize = self.features.iter().map(|entry| entry.name.len()).sum();
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((self.features.len() as u32).to_le_bytes());
        header.extend(self.file_bytes.to_le_bytes());
        header.extend(self.min_count.to_le_bytes());
        header.extend(self.sample_count.to_le_bytes());
        header.extend((names_bytes as u64).to_le_bytes());
        header.resize(HEADER_BYTES - 4, 0);
        header.extend(crc32c(&header).to_le_bytes());
        let mut directory = Vec::new();
        for entry in &self.features {
            let start = directory.len();
            for word in [
                entry.token_count,
                entry.fingerprints_at,
                entry.ids_at,
                entry.rare_token_count,
                entry.missing_count,
            ] {
                directory.extend(word.to_le_bytes());
            }
            for half in [entry.fingerprints_crc, entry.ids_crc, entry.name.len() as u32] {
                directory.extend(half.to_le_bytes());
            }
            directory.resize(start + ENTRY_BYTES, 0);
        }
        for entry in &self.features {
            directory.extend(entry.name.as_bytes());
        }
        directory.extend(crc32c(&directory).to_le_bytes());
        [header, directory].concat()
    }

    /// Reads header and directory of `file`, checks them and that the sections lie inside.
    pub(crate) fn read(file: &mut File) -> Result<Self> {
        let size_bytes = file.metadata().map_err(unreadable)?.len();
        let mut header = [0; HEADER_BYTES];
        let is_whole = read_whole(file, &mut header)?;
        if !header.starts_with(&MAGIC) {
            return Err(Error::invalid("this is not a vocabulary file")
                .with("remedy", "give the file that was written when the vocabulary was built"));
        }
        if !is_whole {
            return Err(Error::corruption("vocabulary file is cut short in its header"));
        }
        let (_, bytes) = header.split_at(8);
        let mut fields = FieldReader { bytes };
        let version = fields.u32()?;
        let feature_count = fields.u32()?;
        let (file_bytes, min_count, sample_count) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let names_bytes = fields.u64()?;
        check_crc("header", &header)?;
        if version != VERSION {
            return Err(Error::invalid("vocabulary file has another version")
                .with("expected", VERSION)
                .with("found", version));
        }
        if file_bytes != size_bytes {
            return Err(Error::corruption("vocabulary file has the wrong size")
                .with("expected", file_bytes)
                .with("found", size_bytes));
        }
        let entries_bytes = u64::from(feature_count) * ENTRY_BYTES as u64;
        let directory_bytes = entries_bytes.saturating_add(names_bytes).saturating_add(4);
        if directory_bytes > DIRECTORY_BYTES_MAX || directory_bytes > size_bytes {
            return Err(Error::corruption("vocabulary directory does not fit into the file"));
        }
        let mut directory = vec![0; directory_bytes as usize];
        if !read_whole(file, &mut directory)? {
            return Err(Error::corruption("vocabulary file is cut short in its directory"));
        }
        check_crc("directory", &directory)?;
        let (entries, names) = directory.split_at(entries_bytes as usize);
        let features = decode_entries(entries, names, file_bytes)?;
        Ok(Self { features, min_count, sample_count, file_bytes })
    }
}

fn decode_entries(entries: &[u8], mut names: &[u8], file_bytes: u64) -> Result<Vec<FeatureEntry>> {
    let outside = || Error::corruption("vocabulary section lies outside the file");
    let mut features = Vec::new();
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let mut fields = FieldReader { bytes: entry };
        let mut entry = FeatureEntry {
            token_count: fields.u64()?,
            fingerprints_at: fields.u64()?,
            ids_at: fields.u64()?,
            rare_token_count: fields.u64()?,
            missing_count: fields.u64()?,
            fingerprints_crc: fields.u32()?,
            ids_crc: fields.u32()?,
            name: String::new(),
        };
        let name_bytes = fields.u32()? as usize;
        let (name, rest) = names.split_at_checked(name_bytes).ok_or_else(outside)?;
        entry.name = std::str::from_utf8(name)
            .map_err(|_| Error::corruption("vocabulary feature name is not UTF-8"))?
            .to_owned();
        names = rest;
        for (at, width_bytes) in [(entry.fingerprints_at, 8), (entry.ids_at, 4)] {
            let end =
                entry.token_count.checked_mul(width_bytes).and_then(|len| at.checked_add(len));
            if end.is_none_or(|end| end > file_bytes) {
                return Err(outside().with("feature", &entry.name));
            }
        }
        features.push(entry);
    }
    Ok(features)
}

fn check_crc(part: &'static str, bytes: &[u8]) -> Result<()> {
    let Some((body, crc)) = bytes.split_last_chunk::<4>() else {
        return Err(Error::corruption("vocabulary file is cut short"));
    };
    let (expected, found) = (u32::from_le_bytes(*crc), crc32c(body));
    if expected == found {
        return Ok(());
    }
    Err(Error::corruption("vocabulary file checksum mismatch")
        .with("part", part)
        .with("expected", format_args!("{expected:#010x}"))
        .with("found", format_args!("{found:#010x}")))
}

fn unreadable(error: std::io::Error) -> Error {
    Error::os("cannot read vocabulary file", error)
}

/// Reads as much of `bytes` as the file has; tells whether that was all.
pub(crate) fn read_whole(file: &mut File, bytes: &mut [u8]) -> Result<bool> {
    match file.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(unreadable(error)),
    }
}

/// Reads one section in pieces, checks its checksum, and shows each piece to `visit`.
pub(crate) fn read_section(
    file: &mut File,
    at: u64,
    len: u64,
    expected_crc: u32,
    visit: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    file.seek(SeekFrom::Start(at)).map_err(unreadable)?;
    let mut piece = vec![0; 1 << 18];
    let mut left = len;
    let mut crc = 0;
    while left > 0 {
        let step = left.min(piece.len() as u64) as usize;
        let (piece, _) = piece.split_at_mut(step);
        if !read_whole(file, piece)? {
            return Err(Error::corruption("vocabulary file is cut short in a section"));
        }
        crc = crc32c_append(crc, piece);
        visit(piece)?;
        left -= step as u64;
    }
    if crc != expected_crc {
        return Err(Error::corruption("vocabulary file checksum mismatch")
            .with("part", "section")
            .with("offset_bytes", at)
            .with("expected", format_args!("{expected_crc:#010x}"))
            .with("found", format_args!("{crc:#010x}")));
    }
    Ok(())
}

struct FieldReader<'a> {
    bytes: &'a [u8],
}

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (field, rest) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or_else(|| Error::corruption("vocabulary file is cut short"))?;
        self.bytes = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Writes a vocabulary file beside its name and renames it when it is whole.
#[derive(Debug)]
pub(crate) struct VocabularyWriter {
    path: PathBuf,
    part_path: PathBuf,
    fingerprints: BufWriter<File>,
    ids: BufWriter<File>,
    directory: Directory,
    current: Option<usize>,
}

impl VocabularyWriter {
    pub(crate) fn create(
        path: &Path,
        features: &[FeatureReport],
        min_count: u64,
        sample_count: u64,
    ) -> Result<Self> {
        let mut part_path = path.as_os_str().to_owned();
        part_path.push(".part");
        let part_path = PathBuf::from(part_path);
        let failed = |error| unwritable(error, &part_path);
        let file = File::create(&part_path).map_err(failed)?;
        let directory = Directory::lay_out(features, min_count, sample_count);
        // Gaps between sections, and sections of tokens, are zero until written.
        file.set_len(directory.file_bytes).map_err(failed)?;
        // A handle of its own for each stream: a cloned one would share the file position.
        let second = File::options().write(true).open(&part_path).map_err(failed)?;
        Ok(Self {
            path: path.to_path_buf(),
            fingerprints: BufWriter::with_capacity(64 << 10, file),
            ids: BufWriter::with_capacity(64 << 10, second),
            part_path,
            directory,
            current: None,
        })
    }

    /// Adds one token; features and fingerprints come in ascending order.
    pub(crate) fn push(&mut self, feature: u16, fingerprint: u64, id: u32) -> Result<()> {
        let feature = usize::from(feature);
        let Some(entry) = self.directory.features.get_mut(feature) else {
            return Err(Error::invalid("vocabulary has no such feature").with("feature", feature));
        };
        let failed = |error| unwritable(error, &self.part_path);
        if self.current != Some(feature) {
            self.current = Some(feature);
            self.fingerprints.seek(SeekFrom::Start(entry.fingerprints_at)).map_err(failed)?;
            self.ids.seek(SeekFrom::Start(entry.ids_at)).map_err(failed)?;
        }
        let (fingerprint, id) = (fingerprint.to_le_bytes(), id.to_le_bytes());
        entry.fingerprints_crc = crc32c_append(entry.fingerprints_crc, &fingerprint);
        entry.ids_crc = crc32c_append(entry.ids_crc, &id);
        self.fingerprints.write_all(&fingerprint).map_err(failed)?;
        self.ids.write_all(&id).map_err(failed)
    }

    /// Writes the directory, syncs, renames. Returns the bytes of the file.
    pub(crate) fn finish(mut self) -> Result<u64> {
        let result = self.write_directory();
        if result.is_err() {
            // Half a file is of no use; that it cannot be removed changes nothing.
            let _ = std::fs::remove_file(&self.part_path);
        }
        result.map(|()| self.directory.file_bytes)
    }

    fn write_directory(&mut self) -> Result<()> {
        let head = self.directory.encode();
        let write = || -> std::io::Result<()> {
            self.ids.flush()?;
            self.fingerprints.seek(SeekFrom::Start(0))?;
            self.fingerprints.write_all(&head)?;
            self.fingerprints.flush()?;
            self.fingerprints.get_ref().sync_all()?;
            std::fs::rename(&self.part_path, &self.path)?;
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        };
        let mut write = write;
        write().map_err(|error| unwritable(error, &self.part_path))
    }
}

fn unwritable(error: std::io::Error, path: &Path) -> Error {
    Error::os("cannot write vocabulary file", error).with("path", path.display())
}
