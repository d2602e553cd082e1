//! A channel of a location that a server follows: the version that it is at is what answers.
//!
//! ```text
//! HEAD ─▶ versions that are not here are pulled, verified ─▶ upon what answers: deltas applied
//!                                                         └▶ else: another snapshot, swapped in
//! ```
//!
//! A thread of its own looks at HEAD. What fails is counted, told and tried again; what answered
//! goes on. HEAD goes back, too. Versions that answer are noted in the folder where they lie, so
//! that a server starts from them when its store cannot be reached.

mod begin;
mod follower;
mod moving;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tierbed_core::{Error, Result};
use tierbed_io::FsFolder;
use tierbed_remote::{check_channel, Retry};
use tierbed_snapshot::SnapshotOptions;

pub use begin::Following;
pub(crate) use follower::FollowThread;

/// The channel that is followed where none is named.
const CHANNEL: &str = "stable";

/// What to follow.
#[derive(Debug, Clone)]
pub struct Follow {
    /// A folder, or a bucket: `s3://bucket/prefix`.
    pub location: String,
    /// The channel.
    pub channel: String,
    /// The folder of this machine that versions come to; each server has its own.
    pub local: PathBuf,
    /// Time between two looks at the channel.
    pub poll: Duration,
    /// Most bytes per second that are fetched; 0 is no limit. `None`: a fifth of what the device of
    /// `local` takes, which is measured at the start.
    pub sync_bytes_per_s: Option<u64>,
    /// Part of the memory for rows that a new snapshot has until it answers alone.
    pub swap_share: f64,
    /// How often parts are asked for.
    pub retry: Retry,
}

impl Follow {
    /// The time between two looks where none is given.
    pub const POLL: Duration = Duration::from_secs(2);
    /// The share of a new snapshot where none is given.
    pub const SWAP_SHARE: f64 = 0.1;

    /// Follows `channel` of `location` by the default rules.
    #[must_use]
    pub fn new(location: &str, channel: &str, local: PathBuf) -> Self {
        Self {
            location: location.to_owned(),
            channel: channel.to_owned(),
            local,
            poll: Self::POLL,
            sync_bytes_per_s: None,
            swap_share: Self::SWAP_SHARE,
            retry: Retry::default(),
        }
    }

    /// Reads `LOCATION` or `LOCATION@CHANNEL`.
    ///
    /// # Errors
    /// `Invalid` for a channel that can be none.
    pub fn parse(text: &str, local: PathBuf) -> Result<Self> {
        let (location, channel) = text.rsplit_once('@').unwrap_or((text, CHANNEL));
        check_channel(channel)?;
        Ok(Self::new(location, channel, local))
    }

    fn check(&self) -> Result<()> {
        check_channel(&self.channel)?;
        if !(self.swap_share > 0.0 && self.swap_share <= 0.5) {
            return Err(Error::invalid("the share of a new snapshot is out of range")
                .with("swap_share", self.swap_share)
                .with("expected", "above 0, up to 0.5"));
        }
        let poll_s = self.poll.as_secs_f64();
        if !(0.01..=3600.0).contains(&poll_s) {
            return Err(Error::invalid("the time between two looks is out of range")
                .with("poll_s", poll_s)
                .with("expected", "0.01 to 3600"));
        }
        Ok(())
    }
}

type MakeOptions = dyn Fn(&FsFolder) -> Result<SnapshotOptions> + Send + Sync;

/// How versions are opened.
#[derive(Clone)]
pub struct Opener(Arc<MakeOptions>);

impl Opener {
    /// Opens each snapshot with what `options` makes for its folder.
    pub fn new(
        options: impl Fn(&FsFolder) -> Result<SnapshotOptions> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(options))
    }

    fn options(&self, folder: &FsFolder) -> Result<SnapshotOptions> {
        (self.0)(folder)
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener")
    }
}
