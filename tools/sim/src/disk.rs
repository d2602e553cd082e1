//! The disk under a simulated folder: files, names, faults.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::device::past_the_end;
use tierbed_io::PAGE_BYTES;

use crate::file::{torn, SimFile};
use crate::plan::{FaultPlan, IoCounts};

/// Error numbers of Linux.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Which file, whatever its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId(u64);

type Names = BTreeMap<String, FileId>;

/// Something that happened to the names since the last sync of the folder.
#[derive(Debug, Clone)]
enum NameChange {
    Set { name: String, file: FileId },
    Rename { from: String, to: String, file: FileId },
    Remove { name: String },
}

impl NameChange {
    fn apply(&self, names: &mut Names) {
        match self {
            Self::Set { name, file } => {
                names.insert(name.clone(), *file);
            }
            // Also where the old name never became durable: the rename alone names the file.
            Self::Rename { from, to, file } => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
            Self::Remove { name } => {
                names.remove(name);
            }
        }
    }
}

/// Whether the call is the one in which power fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Power {
    On,
    Fails,
}

impl Power {
    fn result(self) -> Result<()> {
        match self {
            Self::On => Ok(()),
            Self::Fails => Err(crash_error()),
        }
    }
}

/// Everything a simulated folder and its devices share.
#[derive(Debug)]
pub(crate) struct Disk {
    plan: FaultPlan,
    rng: SplitMix64,
    counts: IoCounts,
    is_crashed: bool,
    files: BTreeMap<FileId, SimFile>,
    next_file: u64,
    names: Names,
    durable_names: Names,
    unsynced_names: Vec<NameChange>,
}

/// A disk shared by its folder and devices.
#[derive(Debug, Clone)]
pub(crate) struct SharedDisk(Arc<Mutex<Disk>>);

impl SharedDisk {
    pub(crate) fn new(disk: Disk) -> Self {
        Self(Arc::new(Mutex::new(disk)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk {
    pub(crate) fn new(plan: FaultPlan) -> Self {
        Self {
            rng: SplitMix64::new(plan.seed),
            plan,
            counts: IoCounts::default(),
            is_crashed: false,
            files: BTreeMap::new(),
            next_file: 0,
            names: Names::new(),
            durable_names: Names::new(),
            unsynced_names: Vec::new(),
        }
    }

    pub(crate) fn set_plan(&mut self, plan: FaultPlan) {
        self.rng = SplitMix64::new(plan.seed);
        self.plan = plan;
        self.counts = IoCounts::default();
    }

    pub(crate) fn counts(&self) -> IoCounts {
        self.counts
    }

    pub(crate) fn is_crashed(&self) -> bool {
        self.is_crashed
    }

    /// Returns the disk as it is found after power loss; without luck only synced data is.
    pub(crate) fn crashed(&self, mut rng: Option<SplitMix64>) -> Self {
        let mut names = self.durable_names.clone();
        for change in &self.unsynced_names {
            if rng.as_mut().is_some_and(|rng| rng.below(2) == 0) {
                change.apply(&mut names);
            }
        }
        let mut disk = Self::new(FaultPlan::default());
        for (id, file) in &self.files {
            let file = file.crashed(rng.as_mut());
            if names.values().any(|named| named == id) {
                disk.files.insert(*id, file);
            }
        }
        disk.next_file = self.next_file;
        disk.durable_names = names.clone();
        disk.names = names;
        disk
    }

    fn check_power(&self) -> Result<()> {
        if self.is_crashed {
            return Err(crash_error());
        }
        Ok(())
    }

    /// Counts a change and says whether power fails in it.
    fn begin_change(&mut self) -> Result<Power> {
        self.check_power()?;
        let is_last =
            self.plan.crash_after_io.is_some_and(|after| after <= self.counts.change_count);
        self.counts.change_count += 1;
        self.is_crashed = is_last;
        Ok(if is_last { Power::Fails } else { Power::On })
    }

    #[expect(clippy::expect_used, reason = "files are never forgotten")]
    fn file(&self, id: FileId) -> &SimFile {
        self.files.get(&id).expect("files live as long as the disk")
    }

    #[expect(clippy::expect_used, reason = "files are never forgotten")]
    fn file_mut(&mut self, id: FileId) -> &mut SimFile {
        self.files.get_mut(&id).expect("files live as long as the disk")
    }

    // Names.

    pub(crate) fn find(&self, name: &str) -> Result<Option<FileId>> {
        self.check_power()?;
        Ok(self.names.get(name).copied())
    }

    pub(crate) fn names(&self) -> Result<Vec<String>> {
        self.check_power()?;
        Ok(self.names.keys().cloned().collect())
    }

    pub(crate) fn create(&mut self, name: &str) -> Result<FileId> {
        let id = FileId(self.next_file);
        self.next_file += 1;
        self.files.insert(id, SimFile::default());
        self.change_name(NameChange::Set { name: name.to_owned(), file: id })?;
        Ok(id)
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        let Some(file) = self.find(from)? else {
            return Err(Error::invalid("no such file").with("path", from));
        };
        self.change_name(NameChange::Rename { from: from.to_owned(), to: to.to_owned(), file })
    }

    pub(crate) fn remove(&mut self, name: &str) -> Result<()> {
        if self.find(name)?.is_none() {
            return Ok(());
        }
        self.change_name(NameChange::Remove { name: name.to_owned() })
    }

    fn change_name(&mut self, change: NameChange) -> Result<()> {
        let power = self.begin_change()?;
        self.counts.name_count += 1;
        change.apply(&mut self.names);
        self.unsynced_names.push(change);
        power.result()
    }

    pub(crate) fn sync_names(&mut self) -> Result<()> {
        self.begin_change()?.result()?;
        let call_at = self.counts.folder_sync_count;
        self.counts.folder_sync_count += 1;
        let fails = self.plan.folder_sync_error.strikes(call_at, &mut self.rng);
        for change in self.unsynced_names.drain(..) {
            if !fails || self.rng.below(2) == 0 {
                change.apply(&mut self.durable_names);
            }
        }
        if fails {
            return Err(os_error("simulated folder sync error", EIO));
        }
        Ok(())
    }

    // Contents.

    pub(crate) fn len_bytes(&self, id: FileId) -> Result<u64> {
        self.check_power()?;
        Ok(self.file(id).seen().len() as u64)
    }

    pub(crate) fn allocated_bytes(&self, id: FileId) -> Result<u64> {
        self.check_power()?;
        Ok(self.file(id).allocated_bytes())
    }

    pub(crate) fn read(
        &mut self,
        id: FileId,
        device: &str,
        offset_bytes: u64,
        out: &mut [u8],
    ) -> Result<()> {
        self.check_power()?;
        let call_at = self.counts.read_count;
        self.counts.read_count += 1;
        let past = || past_the_end(device, offset_bytes, out.len());
        let at = usize::try_from(offset_bytes).map_err(|_| past())?;
        let end = at.checked_add(out.len()).ok_or_else(past)?;
        let bytes = self.file(id).seen().get(at..end).ok_or_else(past)?;
        out.copy_from_slice(bytes);
        if self.plan.read_error.strikes(call_at, &mut self.rng) {
            return Err(os_error("simulated read error", EIO).with("path", device));
        }
        if !out.is_empty() && self.plan.read_bit_flip.strikes(call_at, &mut self.rng) {
            let bit = self.rng.below(out.len() as u64 * 8);
            if let Some(byte) = out.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }

    pub(crate) fn write(&mut self, id: FileId, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let power = self.begin_change()?;
        let call_at = self.counts.write_count;
        self.counts.write_count += 1;
        let mut at = to_usize(offset_bytes)?;
        if self.plan.lost_write.strikes(call_at, &mut self.rng) {
            return power.result();
        }
        if self.plan.misdirected_write.strikes(call_at, &mut self.rng) {
            let Some(elsewhere) = self.other_page(id, at) else { return power.result() };
            at = elsewhere;
        }
        let fails = self.plan.write_error.strikes(call_at, &mut self.rng);
        if fails || self.plan.torn_write.strikes(call_at, &mut self.rng) {
            let mut written = Ok(());
            for (at, sector) in torn(at, bytes, &mut self.rng) {
                written = written.and(self.write_what_fits(id, at, sector));
            }
            power.result().and(written)?;
            return if fails { Err(os_error("simulated write error", EIO)) } else { Ok(()) };
        }
        let written = self.write_what_fits(id, at, bytes);
        power.result()?;
        written
    }

    fn write_what_fits(&mut self, id: FileId, at: usize, bytes: &[u8]) -> Result<()> {
        let fitting_bytes = match self.plan.enospc_after_bytes {
            None => bytes.len(),
            Some(limit) => {
                let free_bytes = limit.saturating_sub(self.occupied_bytes(id));
                self.file(id).fitting_bytes(at, bytes.len(), free_bytes)
            }
        };
        let (fitting, rest) = bytes.split_at(fitting_bytes);
        self.file_mut(id).write(at, fitting);
        if rest.is_empty() {
            return Ok(());
        }
        Err(os_error("simulated full disk", ENOSPC))
    }

    /// Sums the space of all files that have a name, and of `id`.
    fn occupied_bytes(&self, id: FileId) -> u64 {
        let is_kept = |file: &FileId| *file == id || self.names.values().any(|named| named == file);
        self.files
            .iter()
            .filter(|(file, _)| is_kept(file))
            .map(|(_, file)| file.allocated_bytes())
            .sum()
    }

    /// Draws the same place on another page of the file; `None` when it has no other page.
    fn other_page(&mut self, id: FileId, at: usize) -> Option<usize> {
        let page_count = (self.file(id).seen().len() / PAGE_BYTES) as u64;
        let page = (at / PAGE_BYTES) as u64;
        let others = if page < page_count { page_count - 1 } else { page_count };
        if others == 0 {
            return None;
        }
        let drawn = self.rng.below(others);
        let drawn = if drawn < page { drawn } else { drawn + 1 };
        Some(drawn as usize * PAGE_BYTES + at % PAGE_BYTES)
    }

    pub(crate) fn set_len(&mut self, id: FileId, len_bytes: u64) -> Result<()> {
        let power = self.begin_change()?;
        let len_bytes = to_usize(len_bytes)?;
        self.file_mut(id).set_len(len_bytes);
        power.result()
    }

    pub(crate) fn sync(&mut self, id: FileId) -> Result<()> {
        self.begin_change()?.result()?;
        let call_at = self.counts.sync_count;
        self.counts.sync_count += 1;
        if self.plan.sync_error.strikes(call_at, &mut self.rng) {
            let mut rng = SplitMix64::new(self.rng.next_u64());
            self.file_mut(id).fail_sync(&mut rng);
            return Err(os_error("simulated sync error", EIO));
        }
        self.file_mut(id).sync();
        Ok(())
    }
}

fn crash_error() -> Error {
    Error::new(ErrorKind::Io, "simulated crash")
}

fn os_error(message: &str, errno: i32) -> Error {
    Error::os(message, std::io::Error::from_raw_os_error(errno))
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::invalid("position does not fit memory"))
}
