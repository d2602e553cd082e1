//! Checkpoints that are kept under a name, from either order.

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result};
use tierbed_store::kept;

use crate::auto::engine::{lost, AutoEngine, State};
use crate::auto::windowed::Standing;
use crate::engine::TrainEngine;

impl AutoEngine {
    /// Checkpoints and keeps the checkpoint under `name`; returns its number.
    ///
    /// # Errors
    /// As [`crate::window::WindowEngine::keep_checkpoint`].
    pub fn keep_checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        // Along a plan, and of a store that left one, checkpoints are kept in its own folder.
        if let Some(folder) = &self.folder {
            kept::check_free(folder.as_ref(), name)?;
        }
        if self.planned_mut().is_some() {
            let folder = self.folder()?;
            let number = self.checkpoint(name, attachments)?;
            kept::check_quota(folder.as_ref(), self.config.disk_quota_bytes)?;
            kept::keep(folder.as_ref(), name, number)?;
            if let Some(planned) = self.planned_mut() {
                planned.engine.bound_extents()?;
            }
            return Ok(number);
        }
        match self.windowed_mut()? {
            Some(windowed) => {
                windowed.standing = Standing::Changed;
                let number = windowed.engine.keep_checkpoint(name, attachments)?;
                windowed.note_checkpoint();
                Ok(number)
            }
            None => Err(lost("no engine")),
        }
    }

    /// Forgets the kept checkpoint `name` and gives its disk space back.
    ///
    /// # Errors
    /// `Invalid` when there is none of that name, `Unsupported` without a folder, `Io`.
    pub fn drop_checkpoint(&mut self, name: &str) -> Result<()> {
        let is_here = match &self.folder {
            Some(folder) => kept::kept_names(folder.as_ref())?.contains(name),
            None => false,
        };
        match &mut self.state {
            State::Windowed(windowed) if !is_here => windowed.engine.drop_checkpoint(name),
            State::Lost(cause) => Err(lost(cause)),
            state => {
                let Some(folder) = &self.folder else {
                    return Err(Error::invalid("the store has no folder"));
                };
                kept::drop_checkpoint(folder.as_ref(), name)?;
                match state {
                    State::Windowed(windowed) => windowed.engine.leave_space_to_kept(),
                    _ => Ok(()),
                }
            }
        }
    }
}
