//! Step commits: recovery of the steps logged since the last full commit.
//!
//! A step commit is one entry behind the rows it commits, and one sync. At opening the log is
//! walked on from where the full commit ends; what counts ends with the last whole step commit.
//!
//! ```text
//! full commit's segments … | rows rows STEP 8 | rows STEP 9 | rows ✂ torn
//!                          ^ base                           ^ tail ends here
//! ```
//!
//! A broken entry ends the log, as a crash leaves it, unless something was written after a sync
//! that must have saved the entry: a later segment, an entry behind a later step commit, or a step
//! commit that does not follow the last whole one. Then it is damage. So only the very last step
//! commit can be taken for one that never finished.
//!
//! | bytes of a step commit | field |
//! |---|---|
//! | 0..8 | commit number |
//! | 8.. | length u32 and bytes of the name; then of each attachment: name, bytes, both so |

use std::collections::BTreeSet;

use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Budget, Error, Result};
use tierbed_io::Folder;

use super::{Entry, LogReader, SegmentId, SegmentMeta};
use crate::sst::{read_u32, read_u64};

/// A commit that lives in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepCommit {
    pub(crate) info: CommitInfo,
    pub(crate) attachments: Vec<(String, Vec<u8>)>,
}

/// What counts of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tail {
    /// Segments to replay, those of the full commit included, as far as they count.
    pub(crate) segments: Vec<SegmentMeta>,
    /// The last step commit, if there is one since the full commit.
    pub(crate) commit: Option<StepCommit>,
    /// Number of the next segment.
    pub(crate) next_segment: u64,
    /// Bytes behind the full commit.
    pub(crate) len_bytes: u64,
}

impl StepCommit {
    /// Lays out commit `info` with `attachments` as an entry.
    pub(crate) fn encode(entry: &mut Entry, info: &CommitInfo, attachments: &[Attachment<'_>]) {
        entry.clear();
        entry.extend(&info.number.to_le_bytes());
        let mut put = |bytes: &[u8]| {
            entry.extend(&(bytes.len() as u32).to_le_bytes());
            entry.extend(bytes);
        };
        put(info.name.as_bytes());
        for attachment in attachments {
            put(attachment.name.as_bytes());
            put(attachment.bytes);
        }
    }

    /// Returns the bytes of the payload.
    pub(crate) fn payload_len(name: &str, attachments: &[Attachment<'_>]) -> usize {
        let each = |blob: &Attachment<'_>| 8 + blob.name.len() + blob.bytes.len();
        12 + name.len() + attachments.iter().map(each).sum::<usize>()
    }

    /// Reads a payload; `None` when no writer left it.
    pub(crate) fn decode(payload: &[u8]) -> Option<Self> {
        let number = read_u64(payload, 0)?;
        let (name, mut rest) = split_part(payload.get(8..)?)?;
        let mut attachments = Vec::new();
        while !rest.is_empty() {
            let (name, later) = split_part(rest)?;
            let (bytes, later) = split_part(later)?;
            attachments.push((text(name)?, bytes.to_vec()));
            rest = later;
        }
        Some(Self { info: CommitInfo { number, name: text(name)? }, attachments })
    }
}

fn text(bytes: &[u8]) -> Option<String> {
    String::from_utf8(bytes.to_vec()).ok()
}

// Splits off a length and as many bytes.
fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    bytes.get(4..)?.split_at_checked(read_u32(bytes, 0)? as usize)
}

/// Finds what counts of the log behind a full commit, number `number`, whose version names the
/// segments `base` and `next_segment`.
///
/// # Errors
/// `Corruption` when something in the middle is damaged, `Invalid` when the budget does not hold
/// an entry for a moment, `Io`.
pub(crate) fn find_tail(
    folder: &dyn Folder,
    base: &[SegmentMeta],
    next_segment: u64,
    number: u64,
    budget: &Budget,
) -> Result<Tail> {
    let mut tail = Tail { segments: base.to_vec(), commit: None, next_segment, len_bytes: 0 };
    let mut walked = tail.segments.clone();
    let mut seen_bytes = 0;
    let present: BTreeSet<SegmentId> =
        folder.list()?.iter().filter_map(|name| SegmentId::of_file(name)).collect();
    let open = walked.pop();
    let fresh =
        (next_segment..).map(|id| SegmentMeta { id: SegmentId(id), len_bytes: 0, entry_count: 0 });
    let fresh = fresh.take_while(|segment| present.contains(&segment.id));
    let mut is_broken = None;
    for from in open.into_iter().chain(fresh) {
        let Some(mut log) = LogReader::open(folder, from.id, budget)? else { break };
        if let Some(broken) = is_broken {
            // The segment before was synced before this one was begun.
            if log.entry(0, 0)?.is_some() {
                return Err(damaged(broken));
            }
            break;
        }
        let mut walk = Walk { log, reached: from };
        while let Some(commit) = walk.next_commit(tail.number(number))? {
            tail.len_bytes = seen_bytes + walk.reached.len_bytes - from.len_bytes;
            tail.commit = Some(commit);
            tail.segments.clone_from(&walked);
            tail.segments.push(walk.reached);
            tail.next_segment = next_segment.max(from.id.0 + 1);
        }
        if !walk.is_at_end() {
            walk.check_rest(tail.number(number))?;
            is_broken = Some(from.id);
        }
        seen_bytes += walk.reached.len_bytes - from.len_bytes;
        walked.push(walk.reached);
    }
    Ok(tail)
}

impl Tail {
    fn number(&self, base: u64) -> u64 {
        self.commit.as_ref().map_or(base, |commit| commit.info.number)
    }
}

fn damaged(segment: SegmentId) -> Error {
    Error::corruption("log entry is damaged")
        .with("file", segment.file_name())
        .with("remedy", "restore the store's folder from a copy")
}

/// A walk along a segment's entries.
struct Walk {
    log: LogReader,
    reached: SegmentMeta,
}

impl Walk {
    fn is_at_end(&self) -> bool {
        self.reached.len_bytes >= self.log.len_bytes()
    }

    // Goes on behind the next step commit; `None` at the end or at a broken entry.
    fn next_commit(&mut self, after: u64) -> Result<Option<StepCommit>> {
        let reached = &mut self.reached;
        while let Some(entry) = self.log.entry(reached.len_bytes, reached.entry_count)? {
            reached.len_bytes += entry.len_bytes as u64;
            reached.entry_count += 1;
            if entry.is_commit {
                let commit = StepCommit::decode(entry.payload);
                let commit = commit.filter(|commit| commit.info.number == after + 1);
                return commit.map(Some).ok_or_else(|| damaged(reached.id));
            }
        }
        Ok(None)
    }

    // Behind a broken entry nothing may lie that was written after a sync: an entry behind a
    // whole step commit, or a step commit behind one that is missing.
    fn check_rest(&mut self, after: u64) -> Result<()> {
        let SegmentMeta { id, len_bytes, entry_count } = self.reached;
        let (mut at, mut has_commit) = (len_bytes, false);
        while let Some((place, number)) = self.log.next_header(at, entry_count)? {
            let Some(entry) = self.log.entry(place, number)? else {
                at = place + 1;
                continue;
            };
            let commit = StepCommit::decode(entry.payload).filter(|_| entry.is_commit);
            if has_commit || commit.is_some_and(|commit| commit.info.number > after + 1) {
                return Err(damaged(id));
            }
            has_commit = entry.is_commit;
            at = place + entry.len_bytes as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
