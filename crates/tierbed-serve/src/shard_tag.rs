//! What a snapshot says of the divided model that it is a shard of.

use serde::Deserialize;
use tierbed_core::{Error, Result};
use tierbed_snapshot::shards::SHARD_ATTACHMENT;
use tierbed_snapshot::View;

/// The attachment that says it.
const SHARD_NAME: &str = SHARD_ATTACHMENT;

/// A shard of a publish, and the delta upon it. Answers of shards whose publish and delta are equal
/// belong together. See docs/reference/formats/shards.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) struct ShardTag {
    pub(crate) publish: u64,
    pub(crate) shard: u32,
    pub(crate) shard_count: u32,
    /// Counts deltas upon the publish; 0: the snapshot itself.
    #[serde(default)]
    pub(crate) delta: u64,
}

impl ShardTag {
    /// Reads it; `None`: the model is not divided.
    ///
    /// # Errors
    /// `Corruption` for an attachment that says something else; those of reading it.
    pub(crate) fn of(view: &View<'_>) -> Result<Option<Self>> {
        let Some(bytes) = view.attachment(SHARD_NAME)? else { return Ok(None) };
        let tag: Self = serde_json::from_slice(&bytes).map_err(|cause| {
            Error::corruption("attachment does not say which shard the snapshot is")
                .with("name", SHARD_NAME)
                .with("cause", cause)
                .with("remedy", "publish again, without an attachment of that name")
        })?;
        if tag.shard >= tag.shard_count {
            return Err(Error::corruption("attachment names a shard that there is not")
                .with("shard", tag.shard)
                .with("shards", tag.shard_count)
                .with("remedy", "publish again, without an attachment of that name"));
        }
        Ok(Some(tag))
    }
}
