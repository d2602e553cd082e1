//! Second copy of a plan's entries: which row is which, when the plan is damaged.
//!
//! Rows lie by entry: without the entries of the plan a record cannot be named. So the
//! entries lie in a file of their own as well. It is the plan with holes where the batches are:
//! the same header, directory and offsets, hence the same identity. Normative:
//! `docs/reference/formats/plan.md`.

use tierbed_core::Result;
use tierbed_io::{AlignedBuf, Folder, OpenMode, PAGE_BYTES};

use super::reader::EpochPlan;

/// Returns the name of the copy of plan `name`.
#[must_use]
pub fn copy_name(name: &str) -> String {
    format!("{name}.ids")
}

/// Makes the copy of `plan` if there is none that is whole.
pub(super) fn ensure(folder: &dyn Folder, plan: &EpochPlan) -> Result<()> {
    let name = copy_name(plan.file());
    // A copy that cannot be read is made again, whatever is wrong with it.
    let found = EpochPlan::open(folder, &name).and_then(EpochPlan::into_rows_only);
    match found.is_ok_and(|copy| copy.identity() == plan.identity()) {
        true => Ok(()),
        false => write(folder, &name, plan),
    }
}

/// Writes the copy of `plan`; it exists from its header on, which is written last.
pub(super) fn write(folder: &dyn Folder, name: &str, plan: &EpochPlan) -> Result<()> {
    // A kept checkpoint may have the one there under another name.
    folder.remove(name)?;
    let device = folder.open(name, OpenMode::Create)?;
    device.set_len(0)?;
    let mut window = super::PlanWindow::default();
    for (number, meta) in plan.directory().windows.iter().enumerate() {
        let entries = plan.raw_entries(number, &mut window)?;
        device.write_at(meta.offset_bytes, entries)?;
    }
    let bytes = plan.directory().encode();
    let mut padded = AlignedBuf::new(bytes.len().next_multiple_of(PAGE_BYTES));
    padded.split_at_mut(bytes.len()).0.copy_from_slice(&bytes);
    device.write_at(plan.header().directory_offset_bytes, &padded)?;
    device.sync()?;
    let mut page = AlignedBuf::new(PAGE_BYTES);
    page.copy_from_slice(&plan.header().encode());
    device.write_at(0, &page)?;
    device.sync()?;
    folder.sync()
}
