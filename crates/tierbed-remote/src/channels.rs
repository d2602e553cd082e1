//! Moving a channel without pushing: promotion to another channel's version, and back.

use tierbed_core::{Error, Result};

use crate::head::{Head, Link};
use crate::location::{FoundHead, Location};
use crate::names::{head_name, Seq};
use crate::objects::When;

impl Location {
    /// Moves the channel `to` where the channel `from` is.
    ///
    /// # Errors
    /// `Invalid` when `from` is at no version, a version is not whole, or another publisher moved
    /// `to` meanwhile, naming where to; `Corruption` and `Io` from the store.
    pub fn promote(&self, from: &str, to: &str, now_s: u64) -> Result<Head> {
        let chain = self.some_head(from)?.chain;
        self.move_to(to, chain, now_s)
    }

    /// Moves `channel` to version `seq`, an earlier one as a rule. A HEAD that cannot be read is
    /// replaced.
    ///
    /// # Errors
    /// As [`promote`](Self::promote).
    pub fn rollback(&self, channel: &str, seq: Seq, now_s: u64) -> Result<Head> {
        self.check_whole([seq])?;
        let (parts, bytes) = self.parts_at(seq)?;
        self.move_to(channel, parts.chain(&bytes), now_s)
    }

    fn move_to(&self, channel: &str, chain: Vec<Link>, now_s: u64) -> Result<Head> {
        self.check_whole(chain.iter().map(|link| link.seq))?;
        let found = self.found_head(channel)?;
        let head = self.move_head(channel, found.as_ref(), chain, now_s)?;
        // Who prunes marks first and looks at HEADs then; we do it the other way round. So one of
        // us sees the other.
        match self.check_whole(head.chain.iter().map(|link| link.seq)) {
            Ok(()) => Ok(head),
            Err(error) => Err(self.move_back(channel, found.as_ref(), &head, error)),
        }
    }

    /// Puts `channel` back from `ours` to what was `found`, as far as it can, because of `error`.
    fn move_back(
        &self,
        channel: &str,
        found: Option<&FoundHead>,
        ours: &Head,
        error: Error,
    ) -> Error {
        let before = found.and_then(|found| found.head.as_ref().ok());
        let moved_back = || -> Result<()> {
            let Some(before) = before else { return Ok(()) };
            let Some(now) = self.found_head(channel)? else { return Ok(()) };
            let is_ours = now.head.as_ref().is_ok_and(|head| head == ours);
            if is_ours {
                let when = When::Unchanged(now.tag);
                self.objects.put(&head_name(channel)?, &before.encode()?, &when)?;
            }
            Ok(())
        };
        match moved_back() {
            Ok(()) => error.with("channel", self.named(channel)),
            Err(cause) => error.with("channel", self.named(channel)).with("cause", cause),
        }
    }
}
